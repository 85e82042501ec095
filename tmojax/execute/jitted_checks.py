"""Whether JAX does what a plan says: a policy that is ignored gives no error, only memory that is not there.

Three looks, each at a later stage: names and bytes in the jaxpr (always), placements in the lowering for CUDA (always,
no GPU needed), and the compiled program (`jitted_gpu`, where a compiler for GPUs is installed).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax

import tmojax.jax_setup  # noqa: F401
from tmojax.errors import InputError
from tmojax.execute.jitted_names import NameAction, NamedPlan
from tmojax.execute.jitted_scans import ScanEquation, inner_jaxprs, names_of

WORKING_FORMS = (
    "put one jax.checkpoint with prevent_cse=True around the whole loss (jitted_step does), scan over the layers, or "
    "use the explicit form (explicit_step)"
)
PLATFORMS = ("cpu", "gpu")
_FUNCTION = re.compile(r"func\.func (?:public |private )?@([\w.$-]+)")
_CALL = re.compile(r"\bcall @([\w.$-]+)")
_PLACEMENT = re.compile(r'@annotate_device_placement\(.*_xla_buffer_placement = "(\w+)"')


@dataclass(frozen=True)
class Move:
    """One `device_put` of a jaxpr to another memory: bytes of all its executions, how many, and if in a scan."""

    to_host: bool
    size_bytes: int
    times: int
    in_scan: bool


@dataclass(frozen=True)
class GpuCompile:
    """What the compiler says, in bytes: temporary memory on the device (`temp`) and on the host, arguments, and the
    most that the device has at any time (`peak`)."""

    target: str
    flags: tuple[str, ...]
    jax_version: str
    temp_bytes: int
    host_temp_bytes: int
    argument_bytes: int
    peak_bytes: int

    def line(self) -> str:
        """The figures as a line of text."""
        return (
            f"compiled for {self.target} (jax {self.jax_version}, {' '.join(self.flags)}): {self.host_temp_bytes} "
            f"bytes of temporary memory on the host, {self.temp_bytes} on the device, whose peak is {self.peak_bytes}"
        )


@dataclass(frozen=True)
class Verification:
    """What was found, per micro-batch and device. `moves`: `device_put` equations to the host; the lowering has as many
    placements on the host and on the device. `void`: why a GPU compiler would keep on the device what the jaxpr
    offloads, or the empty string. `compiled`: what a compiler for GPUs made of it; in exports without, `not_compiled`
    says why. `capacity_bytes`: what the plan lets a GPU have.
    """

    names: int
    planned_host_bytes: int
    jaxpr_host_bytes: int
    moves: int
    placements_on_host: int
    placements_on_device: int
    scanned: bool
    void: str
    compiled: GpuCompile | None = None
    not_compiled: str = ""
    capacity_bytes: int = 0

    def lines(self) -> list[str]:
        """The verification as lines of text."""
        text = [
            f"{self.names} names, each in the step and listed once",
            f"bytes to the host: {self.planned_host_bytes} planned, {self.jaxpr_host_bytes} in the jaxpr",
            f"lowered for CUDA: {self.moves} tensors, {self.placements_on_host} placements on the host and "
            f"{self.placements_on_device} on the device",
        ]
        text += [f"void on a GPU: {self.void}"] * bool(self.void)
        if self.compiled is not None:
            text.append(self.compiled.line())
            over = self.compiled.peak_bytes - self.capacity_bytes
            if over > 0:
                text.append(
                    f"that peak is {over} bytes more than a GPU has by the plan ({self.capacity_bytes}), because XLA "
                    f"orders recomputation itself: plan for less, or run the plan with PlannedStep"
                )
        return text + [f"not compiled for a GPU: {self.not_compiled}"] * bool(self.not_compiled)


def moves_of(jaxpr: Any, times: int = 1, in_scan: bool = False) -> Iterator[Move]:
    """Every `device_put` between memories in a jaxpr and all inside it; the turns of scans are counted."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == "device_put":
            for atom, target in zip(equation.invars, equation.params["devices"], strict=True):
                if isinstance(target, jax.memory.Space):
                    size = math.prod(atom.aval.shape) * atom.aval.dtype.itemsize
                    yield Move(target is jax.memory.Space.Host, size * times, times, in_scan)
        is_scan = equation.primitive.name == "scan"
        turns = times * ScanEquation(equation).params["length"] if is_scan else times
        for inner in inner_jaxprs(equation):
            yield from moves_of(inner, turns, in_scan or is_scan)


def placements(text: str) -> dict[str, int]:
    """Placement annotations in a lowered module by memory; functions count as often as they are called."""
    bodies: dict[str, list[str]] = {}
    current = ""
    for line in text.splitlines():
        found = _FUNCTION.search(line)
        if found:
            current = found.group(1)
        bodies.setdefault(current, []).append(line)

    counted: dict[str, dict[str, int]] = {}

    def count(function: str) -> dict[str, int]:
        if function not in counted:
            total: dict[str, int] = {}
            for line in bodies.get(function, ()):
                for memory in _PLACEMENT.findall(line):
                    total[memory] = total.get(memory, 0) + 1
                for called in _CALL.findall(line):
                    for memory, number in count(called).items():
                        total[memory] = total.get(memory, 0) + number
            counted[function] = total
        return counted[function]

    return count("main")


def verify(
    loss: Callable[[Any, Any], jax.Array], params: Any, batch: Any, plan: NamedPlan, *, explicit: bool = False
) -> Verification:
    """Check a loss that carries out `plan`; `params`, `batch`: arrays or shapes of one micro-batch of one device.

    `explicit`: by copies that are written out (`explicit_chain`), where names are gone and copies stay in place.

    Raises InputError for a name that the loss does not have, for bytes to the host that are not those of the plan, and
    for tensors without exactly one placement on the host and one on the device.
    """
    listed = [*plan.names(NameAction.SAVE), *plan.names(NameAction.OFFLOAD)]
    if not explicit:
        require_names(loss, params, batch, listed)
    gradient = jax.value_and_grad(loss)
    traced = jax.jit(gradient).trace(params, batch)
    out = [move for move in moves_of(traced.jaxpr.jaxpr) if move.to_host]
    moved = sum(move.size_bytes for move in out)
    if moved != plan.host_bytes:
        raise InputError(
            f"plan: it sends {plan.host_bytes} bytes per micro-batch to the host, and the jaxpr {moved}; an offloaded "
            f"name is not needed by backward, or is needed under another name: offloaded are "
            f"{', '.join(plan.names(NameAction.OFFLOAD)) or 'none'}"
        )
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    found = placements(text)
    on_host, on_device = found.get("pinned_host", 0), found.get("device", 0)
    if on_host != len(out) or on_device != len(out):
        raise InputError(
            f"lowering for CUDA: {len(out)} tensors are offloaded, and there are {on_host} placements on the host and "
            f"{on_device} on the device, where each tensor needs one of both; the plan would not be carried out"
        )
    return Verification(
        names=len(listed),
        planned_host_bytes=plan.host_bytes,
        jaxpr_host_bytes=moved,
        moves=len(out),
        placements_on_host=on_host,
        placements_on_device=on_device,
        scanned=bool(out) and all(move.in_scan for move in out),
        void=void_reason(traced.jaxpr.jaxpr),
    )


def require_names(loss: Callable[[Any, Any], jax.Array], params: Any, batch: Any, listed: list[str]) -> None:
    """Raises InputError for names that are not in the loss (JAX ignores them in silence) or are listed twice."""
    present = names_of(jax.make_jaxpr(loss)(params, batch).jaxpr)
    for name in listed:
        if name not in present:
            raise InputError(
                f"name {name!r}: the loss has no checkpoint_name of that spelling, and JAX would ignore it in silence; "
                f"it has {', '.join(sorted(present)) or 'none'}"
            )
        if listed.count(name) > 1:
            raise InputError(f"name {name!r}: is listed {listed.count(name)} times; list every name once")


def void_reason(jaxpr: Any) -> str:
    """Why XLA would void offloads of a gradient's jaxpr, or the empty string.

    Outside of scans only a barrier keeps copies apart. A checkpoint has one for all that it restores together; without
    it, or with a checkpoint per layer, XLA moves a copy out next to its copy back and drops both (jax 0.10.1, compiled
    for H100, six layers with 1.5 MiB to offload: 0 and 0.5 MiB on the host; with one checkpoint, 1.5).
    """
    restored = list(_checkpoints_of_host_arrays(jaxpr))
    if any(not equation.params["prevent_cse"] for equation in restored):
        return "a jax.checkpoint with prevent_cse=False outside of a scan restores what was offloaded"
    if len(restored) > 1:
        return f"{len(restored)} jax.checkpoints outside of scans restore what was offloaded"
    return ""


def _checkpoints_of_host_arrays(jaxpr: Any) -> Iterator[Any]:
    for equation in jaxpr.eqns:
        if equation.primitive.name in ("remat2", "checkpoint"):
            if any(getattr(atom.aval, "memory_space", None) is jax.memory.Space.Host for atom in equation.invars):
                yield equation
        elif equation.primitive.name != "scan":
            for inner in inner_jaxprs(equation):
                yield from _checkpoints_of_host_arrays(inner)


def require_effective(verification: Verification, platform: str) -> None:
    """Raises InputError for a plan that the compiler of `platform` would void, and for an unknown platform."""
    if platform not in PLATFORMS:
        raise InputError(f"platform: {platform!r} is unknown; choose one of {', '.join(PLATFORMS)}")
    if platform == "gpu" and verification.void:
        raise InputError(f"plan: XLA would void it: {verification.void}; {WORKING_FORMS}")
