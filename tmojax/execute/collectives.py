"""Collectives between the devices of one process: gradients are averaged in place."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from tmojax.errors import InputError
from tmojax.execute.segments import array_bytes, workspace_bytes
from tmojax.execute.tokens import Abort
from tmojax.problem import Collective, CollectiveKind

Array = Any
_AXIS = "device"


class AllReduce:
    """The mean over devices of a list of tensors, which replaces them on every device.

    The mean, not the sum: the loss is a mean over the rows of a micro-batch, so the step is that of one batch with the
    rows of all devices. `workspace_bytes`: per device, as the compiler says.
    """

    def __init__(self, collective: Collective, shapes: Sequence[jax.ShapeDtypeStruct], devices: Sequence[Any]) -> None:
        if collective.kind is not CollectiveKind.ALL_REDUCE:
            raise InputError(
                f"collective {collective.name!r}: its kind is {collective.kind}, and the runtime averages gradients in "
                f"place ({CollectiveKind.ALL_REDUCE}) and does nothing else between devices; import the step with "
                f"import_train_step(..., gpus=N), which synchronises gradients so"
            )
        self._shapes, self._devices = list(shapes), list(devices)
        mesh = Mesh(np.array(devices), (_AXIS,))
        self._sharding = NamedSharding(mesh, PartitionSpec(_AXIS))
        count = len(devices)

        def mean(*arrays: Array) -> tuple[Array, ...]:
            return tuple(jax.lax.psum(array, _AXIS) / np.asarray(count, array.dtype) for array in arrays)

        spec = (PartitionSpec(_AXIS),) * len(self._shapes)
        together = jax.shard_map(mean, mesh=mesh, in_specs=spec, out_specs=spec)
        jitted = jax.jit(together, donate_argnums=tuple(range(len(self._shapes))))
        inputs = [jax.ShapeDtypeStruct(self._global(s), s.dtype, sharding=self._sharding) for s in self._shapes]
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Some donated buffers were not usable")
            self._executable = jitted.lower(*inputs).compile()
        # A number is copied into an array of one element and back.
        numbers = sum(2 * array_bytes(shape) for shape in self._shapes if not shape.shape)
        self.workspace_bytes = workspace_bytes(self._executable, 0) + numbers

    def _global(self, shape: jax.ShapeDtypeStruct) -> tuple[int, ...]:
        rows, *rest = shape.shape or (1,)
        return (rows * len(self._devices), *rest)

    def run(self, arrays: Sequence[Sequence[Array]]) -> list[list[Array]]:
        """[device][tensor] -> [device][tensor]; the operands are gone afterwards."""
        operands = []
        for place, shape in enumerate(self._shapes):
            parts = [own[place] if shape.shape else jnp.reshape(own[place], (1,)) for own in arrays]
            operands.append(jax.make_array_from_single_device_arrays(self._global(shape), self._sharding, parts))
        outputs = self._executable(*operands)
        found: list[list[Array]] = [[] for _ in self._devices]
        for output, shape in zip(outputs, self._shapes, strict=True):
            by_device = {shard.device: shard.data for shard in output.addressable_shards}
            for own, device in zip(found, self._devices, strict=True):
                own.append(by_device[device] if shape.shape else jnp.reshape(by_device[device], ()))
        return found


class Meeting:
    """One collective of one step: the last device to enter runs it for all."""

    def __init__(self, reduce: AllReduce, devices: Sequence[int], abort: Abort) -> None:
        self._reduce, self._devices, self._abort = reduce, list(devices), abort
        self._arrays: dict[int, Sequence[Array]] = {}
        self._results: dict[int, list[Array]] = {}
        self._lock = threading.Lock()
        self._finished = threading.Event()

    def enter(self, device: int, arrays: Sequence[Array]) -> list[Array]:
        """Give the arrays of one device; returns their means, complete, once all have entered."""
        with self._lock:
            self._arrays[device] = arrays
            last = len(self._arrays) == len(self._devices)
        if last:
            found = self._reduce.run([self._arrays[d] for d in self._devices])
            jax.block_until_ready(found)
            self._results = dict(zip(self._devices, found, strict=True))
            self._finished.set()
        self._abort.wait(self._finished)
        return self._results.pop(device)
