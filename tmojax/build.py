"""From a checked configuration to the problem that it describes: workload, machine, capacity."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from tmojax.config import Capacity, FileWorkload, RunConfig
from tmojax.errors import InputError
from tmojax.importers.g10 import G10Workload, g10_workload
from tmojax.importers.harmony import HarmonyWorkload, harmony_workload
from tmojax.importers.micro_batch_orders import offer_orders
from tmojax.importers.model_zoo import ModelWorkload, import_model
from tmojax.importers.pipeline import pipeline_workload
from tmojax.importers.synthetic import SyntheticTransformer, synthetic_transformer
from tmojax.planners.least_capacity import least_capacity
from tmojax.problem import (
    Machine,
    Problem,
    Workload,
    keep_all_footprint_bytes,
    largest_op_bytes,
    validate_problem,
)
from tmojax.problem.io import check_size, read_problem
from tmojax.units import format_bytes


@dataclass(frozen=True, eq=False)
class BuiltProblem:
    """The problem of a run. `footprint_bytes`: keep-all footprint of every device.

    `notes`: sentences about what was decided on the way (capacity, import), for the report.
    """

    problem: Problem
    footprint_bytes: tuple[int, ...]
    notes: tuple[str, ...]


def build_problem(config: RunConfig) -> BuiltProblem:
    """Build the workload, put it on the machine, set the capacity. Traces JAX for models.

    Raises InputError (options of the model, a dtype that a GPU lacks, counts that do not match) and names the field.
    """
    notes: list[str] = []
    if isinstance(config.workload, FileWorkload):
        problem = read_problem(config.folder / config.workload.path)
        if config.micro_batches not in (None, problem.workload.micro_batches):
            raise InputError(
                f"micro_batches: {config.micro_batches}, but {config.workload.path} has "
                f"{problem.workload.micro_batches}; leave it out"
            )
        changes: dict[str, Any] = {"name": config.name}
        if config.machine is not None:
            changes["machine"] = config.machine
        if config.actions is not None:
            changes["actions"] = config.actions
        problem = replace(problem, **changes)
    else:
        assert config.machine is not None and config.actions is not None and config.micro_batches is not None
        if config.pipeline is None:
            workload, notes = _workload(config, config.machine, config.micro_batches)
        else:
            one = replace(config.machine, devices=config.machine.devices[:1])
            workload, notes = _workload(config, one, config.micro_batches)
            workload = pipeline_workload(workload, len(config.machine.devices), config.pipeline.order)
        problem = Problem(config.name, workload, config.machine, config.actions)
    problem = replace(problem, workload=offer_orders(problem.workload, config.micro_batch_orders))
    check_size(problem.workload)
    validate_problem(problem)
    footprint = tuple(keep_all_footprint_bytes(problem.workload, d) for d in range(problem.workload.device_count))
    if config.capacity is not None:
        capacity_bytes = _capacity_bytes(config.capacity, problem, max(footprint), notes)
        problem = problem.with_device_capacity(capacity_bytes)
    return BuiltProblem(problem, footprint, tuple(notes))


def _workload(config: RunConfig, machine: Machine, micro_batches: int) -> tuple[Workload, list[str]]:
    """The data-parallel step on all GPUs of `machine`, and notes for the report."""
    if isinstance(config.workload, SyntheticTransformer):
        return synthetic_transformer(config.workload, len(machine.devices), micro_batches), []
    if isinstance(config.workload, G10Workload):
        models = tuple(device.model for device in machine.devices)
        return g10_workload(config.workload, models, micro_batches, config.folder), []
    if isinstance(config.workload, HarmonyWorkload):
        return harmony_workload(config.workload, len(machine.devices), micro_batches, config.folder), []
    assert isinstance(config.workload, ModelWorkload)
    return import_model(config.workload, machine, micro_batches)


def _capacity_bytes(capacity: Capacity, problem: Problem, footprint_bytes: int, notes: list[str]) -> int:
    if capacity.footprint_factor is None:
        assert capacity.bytes is not None
        return capacity.bytes
    capacity_bytes = int(footprint_bytes / capacity.footprint_factor)
    if capacity.largest_feasible:
        asked = f"capacity: footprint / {capacity.footprint_factor:g} is {format_bytes(capacity_bytes)}"
        capacity_bytes = _largest_feasible(problem, footprint_bytes, capacity_bytes, asked, notes)
    if capacity_bytes <= 0:
        raise InputError(
            f"capacity.footprint_factor: {capacity.footprint_factor} leaves {capacity_bytes} bytes; lower it"
        )
    physical = min(problem.capacity_bytes(d) for d in range(problem.workload.device_count))
    if capacity_bytes > physical:
        notes.append(
            f"capacity: {format_bytes(capacity_bytes)} is more than the {format_bytes(physical)} that a GPU of this "
            f"machine has"
        )
    return capacity_bytes


def _largest_feasible(
    problem: Problem, footprint_bytes: int, wanted_bytes: int, asked: str, notes: list[str]
) -> int:
    """`wanted_bytes`, or what the largest op and then the best simple strategy need, with a note that says why."""
    needed = (largest_op_bytes(problem.workload, device) for device in range(problem.workload.device_count))
    device, (op, needed_bytes) = max(enumerate(needed), key=lambda found: found[1][1])
    found_bytes, strategy = least_capacity(problem, max(wanted_bytes, needed_bytes))
    name = problem.workload.program(device).ops[op].name
    alone = f"op {name!r} alone needs {format_bytes(needed_bytes)}"
    if found_bytes > max(wanted_bytes, needed_bytes):
        notes.append(
            f"{asked}; {alone}, and no simple strategy fits into less than {format_bytes(found_bytes)} ({strategy}, "
            f"and more sent away); that is used, a factor of {footprint_bytes / found_bytes:.4g}"
        )
    elif needed_bytes > wanted_bytes:
        notes.append(f"{asked}, but {alone}; that is used, a factor of {footprint_bytes / needed_bytes:.4g}")
    return found_bytes
