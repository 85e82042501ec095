"""Compile a loss under a plan for a GPU that is not there, and read how much of it really leaves the device.

Needs the CUDA plugin (`pip install "jax[cuda12]"`) and `flatbuffers`, but no GPU. The compiler runs in a process of its
own (`gpu_compiler`), because some XLA flags end the process.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax

import tmojax.jax_setup  # noqa: F401
from tmojax.errors import InputError
from tmojax.execute.jitted_checks import WORKING_FORMS, GpuCompile, Verification
from tmojax.execute.jitted_names import NamedPlan

if TYPE_CHECKING:  # it imports this module
    from tmojax.execute.jitted_step import JittedStep

# Without a GPU nothing can be timed, so XLA must not try; more flags may be given.
BASE_FLAGS = ("--xla_gpu_autotune_level=0",)
LONGEST_S = 1800
NOT_INSTALLED = 'the CUDA compiler of JAX is not installed (pip install "jax[cuda12]")'
_LEAVE_OUT = "an export with compile_for=None is not compiled"
# XLA rematerialises on its own where memory is short; what a plan does is seen where it is not.
_MEMORY_BYTES = 10**13


@dataclass(frozen=True)
class GpuTarget:
    """What XLA wants to know of a GPU: figures of the vendor's data sheets. Bandwidth in bytes/s, sizes in bytes."""

    name: str
    compute_capability: tuple[int, int]
    cores: int
    clock_ghz: float
    bandwidth_bytes_per_s: int
    l2_bytes: int
    shared_bytes_per_core: int

    def text(self) -> str:
        """XLA's `GpuTargetConfigProto` in text form."""
        major, minor = self.compute_capability
        info = {
            "threads_per_block_limit": 1024, "threads_per_warp": 32, "shared_memory_per_block": 48 * 1024,
            "shared_memory_per_core": self.shared_bytes_per_core, "threads_per_core_limit": 2048,
            "core_count": self.cores, "fpus_per_core": 128 if major >= 9 else 64, "block_dim_limit_x": 2**31 - 1,
            "block_dim_limit_y": 65535, "block_dim_limit_z": 65535, "memory_bandwidth": self.bandwidth_bytes_per_s,
            "l2_cache_size": self.l2_bytes, "clock_rate_ghz": self.clock_ghz, "device_memory_size": _MEMORY_BYTES,
            "shared_memory_per_block_optin": self.shared_bytes_per_core - 1024, "registers_per_core_limit": 65536,
            "registers_per_block_limit": 65536,
        }  # fmt: skip
        fields = " ".join(f"{key}: {value}" for key, value in info.items())
        return (
            f"gpu_device_info {{ {fields} cuda_compute_capability {{ major: {major} minor: {minor} }} }} "
            f'runtime_version {{ major: 12 minor: 8 }} dnn_version_info {{ major: 9 minor: 7 }} platform_name: "CUDA" '
            f'device_description_str: "{self.name}"'
        )


TARGETS = {
    "a100": GpuTarget("NVIDIA A100-SXM4-80GB", (8, 0), 108, 1.41, 2039 * 10**9, 40 * 2**20, 164 * 1024),
    "h100": GpuTarget("NVIDIA H100 80GB HBM3", (9, 0), 132, 1.98, 3352 * 10**9, 50 * 2**20, 228 * 1024),
}


def missing() -> str:
    """Why nothing can be compiled for a GPU here, or the empty string."""
    if importlib.util.find_spec("jax_cuda12_plugin") is None:
        return NOT_INSTALLED
    if importlib.util.find_spec("flatbuffers") is None:
        return "flatbuffers is not installed, which jax.export needs (pip install flatbuffers)"
    return ""


def target_device(target: str) -> Any:
    """A device that programs can be compiled for and not run on. Raises InputError for an unknown target."""
    from jax.experimental import topologies

    _require_known(target)
    config = TARGETS[target].text()
    return topologies.get_topology_desc(platform="cuda", target_config=config, topology="1x1x1").devices[0]


def compile_for_gpu(
    function: Callable[..., Any], *arguments: Any, target: str = "a100", flags: Sequence[str] = ()
) -> GpuCompile:
    """Compile `function` for `arguments` (arrays or shapes) in a process of its own.

    Raises InputError where that is not possible (`missing`), for an unknown target, for a function that cannot be sent
    to another process (with callbacks, say), and for a compiler that fails, with its last words, or takes too long.
    """
    reason = missing()
    if reason:
        raise InputError(f"compile for a GPU: {reason}")
    _require_known(target)
    placement = jax.export.DisabledSafetyCheck.custom_call("annotate_device_placement")
    export = jax.export.export(jax.jit(function), platforms=("cuda",), disabled_checks=(placement,))
    try:
        content = export(*arguments).serialize()
    except (NotImplementedError, TypeError, ValueError) as error:
        raise InputError(f"compile for a GPU: JAX cannot export the function: {error}; {_LEAVE_OUT}") from error
    every = (*BASE_FLAGS, *flags)
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "program"
        program.write_bytes(content)
        path = os.pathsep.join(part for part in sys.path if part)
        try:
            done = subprocess.run(
                [sys.executable, "-m", "tmojax.execute.gpu_compiler", str(program), target],
                env=os.environ | {"XLA_FLAGS": " ".join(every), "JAX_PLATFORMS": "cpu", "PYTHONPATH": path},
                capture_output=True, text=True, timeout=LONGEST_S, check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            raise InputError(
                f"compile for a GPU: not done after {LONGEST_S} s with flags {' '.join(every)}; {_LEAVE_OUT}"
            ) from None
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:] or [f"exit code {done.returncode}"]
        raise InputError(
            f"compile for a GPU: the compiler failed with flags {' '.join(every)}: {last[0]}; {_LEAVE_OUT}"
        )
    return GpuCompile(target, every, jax.__version__, **json.loads(done.stdout.splitlines()[-1]))


def compiled_gradient(
    loss: Callable[[Any, Any], jax.Array], plan: NamedPlan, params: Any, batch: Any, target: str,
    flags: Sequence[str] = (),
) -> GpuCompile:
    """Compile the gradient of a loss that carries out `plan`.

    Raises InputError if less leaves the device than planned, and as `compile_for_gpu`.
    """
    found = compile_for_gpu(jax.value_and_grad(loss), params, batch, target=target, flags=flags)
    if found.host_temp_bytes < plan.host_bytes:
        raise InputError(
            f"compile for {target}: the plan has {plan.host_bytes} bytes on the host at once, and the compiled "
            f"program {found.host_temp_bytes} with flags {' '.join(found.flags)}: XLA has voided it; {WORKING_FORMS}"
        )
    return found


def verify_on_gpu(
    step: JittedStep, params: Any, batch: Any, *, target: str = "a100", flags: Sequence[str] = ()
) -> GpuCompile:
    """Compile the gradient of a step's loss for another GPU or with other flags; `batch` is one micro-batch.

    Raises InputError as `compiled_gradient`.
    """
    return compiled_gradient(step.loss, step.plan, params, batch, target, flags)


def with_compile(
    verification: Verification, loss: Callable[[Any, Any], jax.Array], plan: NamedPlan, params: Any, batch: Any,
    target: str | None,
) -> Verification:
    """The verification with what the compiler for `target` says, or with why it was not asked.

    Raises InputError for an unknown target, and where there is a compiler as `compiled_gradient`.
    """
    if target is not None:
        _require_known(target, "compile_for")
    reason = "compile_for is None" if target is None else missing()
    if target is None or reason:
        return replace(verification, not_compiled=reason)
    return replace(verification, compiled=compiled_gradient(loss, plan, params, batch, target))


def _require_known(target: str, field: str = "target") -> None:
    if target not in TARGETS:
        raise InputError(f"{field}: {target!r} is unknown; choose one of {', '.join(TARGETS)}")
