"""An imported step, compiled op by op for the devices that will run it.

An importer does not know what a compiler needs beside the tensors. `CompiledStep.workload` counts it as workspace, so
that plans leave room for it and the runtime keeps what they promise. Compile once, then run any number of plans.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

import jax

import tmojax.jax_setup  # noqa: F401
from tmojax.errors import InputError
from tmojax.execute.collectives import AllReduce
from tmojax.execute.functions import StepFunctions
from tmojax.execute.segments import Compiled, Run, SegmentCompiler, array_bytes
from tmojax.importers.jax_importer import ImportedStep
from tmojax.problem import Op, Program, Workload

POINTER_BYTES = 8


class CompiledStep:
    """The ops and collectives of an imported step as programs for `devices`, one JAX device per device of its workload.

    `functions` [device]: the ops as functions. `array_bytes` [device][tensor].
    """

    def __init__(self, imported: ImportedStep, devices: Sequence[Any] | None = None) -> None:
        """Compile. `devices` default to the first ones of the process. Raises InputError where there are too few."""
        workload = imported.workload
        self._imported = workload
        self.devices = choose_devices(workload.device_count, devices)
        by_program = {p: StepFunctions(imported.traced, workload.programs[p]) for p in set(workload.device_program)}
        self.functions = tuple(by_program[p] for p in workload.device_program)
        self.array_bytes = tuple(tuple(map(array_bytes, functions.shapes)) for functions in self.functions)
        self._compilers = {
            p: SegmentCompiler(functions, partial(workload.instance, workload.device_program.index(p)))
            for p, functions in by_program.items()
        }

    @cached_property
    def workload(self) -> Workload:
        """The imported workload with workspace, in bytes, for what the compiled ops need; plan this one.

        Where the importer counts more (merged ops), that stays.
        """
        programs = list(self._imported.programs)
        for number, compiler in self._compilers.items():
            devices = [d for d, p in zip(self.devices, self._imported.device_program, strict=True) if p == number]
            compiler.compile_ahead(
                ((Run(op, 0),), None, device) for op in self._own_ops(number) for device in devices
            )  # fmt: skip
        for device, program in enumerate(self._imported.device_program):
            programs[program] = self._with_workspace(programs[program], device)
        return replace(self._imported, programs=tuple(programs))

    def workload_with_room(self, room_bytes: int) -> Workload:
        """`workload` with at least `room_bytes` of workspace for every op.

        Joined ops need more beside their tensors than single ones, and are joined as far as the plan leaves room: the
        more of it, the fewer programs. Raises InputError for a negative size.
        """
        if room_bytes < 0:
            raise InputError(f"room_bytes: {room_bytes} must be at least 0")
        programs = []
        for program in self.workload.programs:
            ops = (op if op.collective else _with_at_least(op, room_bytes) for op in program.ops)
            programs.append(replace(program, ops=tuple(ops)))
        return replace(self.workload, programs=tuple(programs))

    def _with_workspace(self, program: Program, device: int) -> Program:
        # Ops that are joined return more arrays than one, and the compiler allocates a table of pointers to them.
        table_bytes = POINTER_BYTES * len(program.tensors)
        ops = []
        for index, op in enumerate(program.ops):
            needed = self.workspace_bytes(device, index) + (0 if op.collective else table_bytes)
            ops.append(replace(op, workspace_bytes=max(op.workspace_bytes, needed)))
        return replace(program, ops=tuple(ops))

    @property
    def program_count(self) -> int:
        """Different ops that are compiled for a device, summed over the programs of the workload."""
        return sum(
            compiler.distinct(((Run(op, 0),), None) for op in self._own_ops(number))
            for number, compiler in self._compilers.items()
        )

    def _own_ops(self, program: int) -> list[int]:
        return [index for index, op in enumerate(self._imported.programs[program].ops) if not op.collective]

    def compiler(self, device: int) -> SegmentCompiler:
        """Compiles segments of a device's program."""
        return self._compilers[self._imported.device_program[device]]

    def op(self, device: int, op: int, micro_batch: int = 0) -> Compiled:
        """The program of one op on one device."""
        return self.compiler(device).compile((Run(op, micro_batch),), None, self.devices[device])

    @cached_property
    def reductions(self) -> dict[str, AllReduce]:
        """The collectives by name. Raises InputError for collectives that do not update tensors in place."""
        found = {}
        for collective in self._imported.collectives:
            first = collective.devices[0]
            op = next(op for op in self._imported.program(first).ops if op.collective == collective.name)
            if op.reads or op.writes:
                raise InputError(
                    f"collective {collective.name!r}: the runtime reduces tensors in place, and op {op.name!r} reads "
                    f"or writes others; use `updates`"
                )
            shapes = [self.functions[first].shapes[tensor] for tensor in op.updates]
            found[collective.name] = AllReduce(collective, shapes, [self.devices[d] for d in collective.devices])
        return found

    def workspace_bytes(self, device: int, op: int) -> int:
        """What the compiler needs for one op beside its tensors."""
        spec = self._imported.program(device).ops[op]
        if spec.collective:
            return self.reductions[spec.collective].workspace_bytes
        return self.op(device, op).workspace_bytes

    def require_same(self, planned: Workload) -> None:
        """Raises InputError unless `planned` is this step with at least its sizes and workspace."""
        ours = self._imported
        for field in ("device_program", "micro_batches"):
            if getattr(planned, field) != getattr(ours, field):
                raise InputError(
                    f"plan: {field} is {getattr(planned, field)}, and the step was imported with "
                    f"{getattr(ours, field)}; plan the workload of this step"
                )
        if planned.collectives != ours.collectives:
            theirs = {collective.name: collective for collective in planned.collectives}
            differing = [c for c in ours.collectives if theirs.get(c.name) != c] or [*planned.collectives]
            raise InputError(
                f"collective {differing[0].name!r}: the plan has other collectives than the step; plan the workload "
                f"of this step"
            )
        for device in range(len(self.devices)):
            _require_same_tensors(planned.program(device), ours.program(device), self.array_bytes[device])
            _require_same_ops(planned.program(device), ours.program(device))
            for index, op in enumerate(planned.program(device).ops):
                needed = self.workspace_bytes(device, index)
                if needed > op.workspace_bytes:
                    raise InputError(
                        f"op {op.name!r}: compiled it needs {needed} bytes of workspace, and the plan counts "
                        f"{op.workspace_bytes}; plan `CompiledStep.workload`, which counts them"
                    )


def _with_at_least(op: Op, room_bytes: int) -> Op:
    return replace(op, workspace_bytes=max(op.workspace_bytes, room_bytes))


def choose_devices(needed: int, devices: Sequence[Any] | None) -> list[Any]:
    """The devices of a workload. Raises InputError for too few."""
    present = list(devices) if devices is not None else jax.devices()
    if len(present) < needed:
        raise InputError(
            f"devices: the workload needs {needed}, and {len(present)} {'is' if len(present) == 1 else 'are'} "
            f"present; on CPU set XLA_FLAGS=--xla_force_host_platform_device_count={needed} before the first use of JAX"
        )
    if devices is not None and len(present) != needed:
        raise InputError(f"devices: the workload needs {needed}, got {len(present)}; give exactly that many")
    return present[:needed]


def _require_same_tensors(planned: Program, ours: Program, array_bytes: Sequence[int]) -> None:
    _require_same_names("tensor", [t.name for t in planned.tensors], [t.name for t in ours.tensors])
    for tensor, size in zip(planned.tensors, array_bytes, strict=True):
        if size > tensor.size_bytes:
            raise InputError(
                f"tensor {tensor.name!r}: the step makes {size} bytes, and the plan counts {tensor.size_bytes}; plan "
                f"the workload of this step"
            )
        if tensor.alias_group:
            raise InputError(
                f"tensor {tensor.name!r}: shares its storage (aliased, group {tensor.alias_group!r}), and the step "
                f"makes arrays of their own; plan the workload of this step"
            )


def _require_same_ops(planned: Program, ours: Program) -> None:
    _require_same_names("op", [op.name for op in planned.ops], [op.name for op in ours.ops])
    for a, b in zip(planned.ops, ours.ops, strict=True):
        if (a.reads, a.writes, a.updates) != (b.reads, b.writes, b.updates):
            raise InputError(f"op {a.name!r}: the plan has other operands for it; plan the workload of this step")


def _require_same_names(what: str, planned: list[str], ours: list[str]) -> None:
    if planned == ours:
        return
    missing = [name for name in planned if name not in set(ours)] or [n for n in ours if n not in set(planned)]
    name = missing[0] if missing else next(a for a, b in zip(planned, ours, strict=False) if a != b)
    where = "is not in the step" if name in planned and missing else "of the step has no place in the plan"
    raise InputError(f"{what} {name!r} {where}: the plan is of another step; plan the workload of this step")
