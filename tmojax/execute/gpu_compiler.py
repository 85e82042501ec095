"""The process that compiles for a GPU (`jitted_gpu`): `python -m tmojax.execute.gpu_compiler FILE TARGET`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import jax

import tmojax.jax_setup  # noqa: F401
from tmojax.execute.jitted_gpu import target_device


def main(program: str, target: str) -> None:
    """Compile a serialised program and print its memory as JSON."""
    exported = jax.export.deserialize(bytearray(Path(program).read_bytes()))
    sharding = jax.sharding.SingleDeviceSharding(target_device(target))
    shapes = [jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=sharding) for aval in exported.in_avals]
    args, kwargs = jax.tree.unflatten(exported.in_tree, shapes)
    memory = jax.jit(exported.call).lower(*args, **kwargs).compile().memory_analysis()
    assert memory is not None, "a compiler for GPUs has a memory analysis"
    found = {
        "temp_bytes": memory.temp_size_in_bytes,
        "host_temp_bytes": memory.host_temp_size_in_bytes,
        "argument_bytes": memory.argument_size_in_bytes,
        "peak_bytes": memory.peak_memory_in_bytes,
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
