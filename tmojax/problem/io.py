"""Problem files: versioned JSON of a `Problem`, and the hash by which plans name it (docs/instance-format.md).

Plan files are in `tmojax.problem.plan_file`; their names are importable from here as well.
"""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from typing import Any

from tmojax.errors import InputError
from tmojax.problem.plan_file import PLAN_SCHEMA, PlanFile, plan_from_json, plan_to_json, read_plan, write_plan
from tmojax.problem.problem import Problem, validate_problem
from tmojax.problem.strict_json import canonical_text, parse_json, read_file, readable_text, shorten, write_text
from tmojax.problem.typed_json import expect_object, reader, writer
from tmojax.problem.workload import Workload

__all__ = [
    "PLAN_SCHEMA",
    "PROBLEM_SCHEMA",
    "PlanFile",
    "check_size",
    "plan_from_json",
    "plan_to_json",
    "problem_from_json",
    "problem_hash",
    "problem_to_json",
    "read_plan",
    "read_problem",
    "write_plan",
    "write_problem",
]

PROBLEM_SCHEMA = "tmojax-problem-1"
# Tensor accesses of all first executions on all devices in all orders: bounds the time that validation takes.
MAX_ACCESSES = 20_000_000
# Tensor instances of all devices, and memories times devices: what a checker or simulator has one entry for.
MAX_INSTANCES = 20_000_000
MAX_PLACES = 4_000_000
# Sums of all tensor instances stay far inside 64-bit integers.
MAX_TOTAL_BYTES = 2**61


def problem_to_json(problem: Problem) -> dict[str, Any]:
    """A problem as JSON values, every field present. Raises InputError for values that JSON cannot carry (NaN)."""
    return {"schema": PROBLEM_SCHEMA, **writer(Problem)(problem, "")}


def problem_from_json(value: Any) -> Problem:
    """A valid problem from parsed JSON. Raises InputError naming the path of the field, its value and the remedy."""
    content = dict(expect_object(value, "problem"))
    schema = content.pop("schema", None)
    if schema != PROBLEM_SCHEMA:
        raise InputError(f"schema: expected {PROBLEM_SCHEMA!r}, got {shorten(schema)}; is this a problem file?")
    problem = reader(Problem)(content, "")
    check_size(problem.workload)
    places = len(problem.machine.memories) * len(problem.machine.devices)
    if places > MAX_PLACES:
        raise InputError(f"machine: memories times devices is {places}; at most {MAX_PLACES} are possible")
    validate_problem(problem)
    return problem


def check_size(workload: Workload) -> None:
    """Raises InputError for what makes validation run for ever, tables too large or byte sums overflow: huge K, huge
    sizes, segments out of range."""
    devices = Counter(workload.device_program)
    accesses, size_bytes = sum(len(collective.devices) for collective in workload.collectives), 0
    instances = 0
    for index, program in enumerate(workload.programs):
        count = len(program.ops)
        per_op = [1 + len(op.reads) + len(op.writes) + len(op.updates) for op in program.ops]
        longest = max(per_op, default=1)
        per_device = sum(per_op) * max(workload.micro_batches, 1)
        for name, segments in program.orders.items():
            for number, segment in enumerate(segments):
                if not 0 <= segment.first_op <= segment.end_op <= count:
                    raise InputError(
                        f"workload.programs[{index}].orders[{shorten(name)}][{number}]: ops {segment.first_op} to "
                        f"{segment.end_op} (half-open) must lie in 0..{count}"
                    )
                per_device += (segment.end_op - segment.first_op) * longest
        accesses += per_device * max(devices[index], 1)
        instances += len(program.tensors) * max(workload.micro_batches, 1) * max(devices[index], 1)
        size_bytes += sum(abs(tensor.size_bytes) for tensor in program.tensors) * max(devices[index], 1)
        size_bytes += sum(abs(op.workspace_bytes) for op in program.ops) * max(devices[index], 1)
    if accesses > MAX_ACCESSES:
        raise InputError(
            f"workload: about {shorten(accesses)} tensor accesses over all devices, micro-batches and orders; at most "
            f"{MAX_ACCESSES} are possible; lower micro_batches ({shorten(workload.micro_batches)}) or merge ops"
        )
    if instances > MAX_INSTANCES:
        raise InputError(
            f"workload: {shorten(instances)} tensor instances over all devices and micro-batches; at most "
            f"{MAX_INSTANCES} are possible; lower micro_batches ({shorten(workload.micro_batches)})"
        )
    if size_bytes * max(workload.micro_batches, 1) > MAX_TOTAL_BYTES:
        raise InputError(
            f"workload: all tensor instances together have {shorten(size_bytes * workload.micro_batches)} bytes, more "
            f"than 64-bit sums can hold; check size_bytes and micro_batches"
        )


def problem_hash(problem: Problem) -> str:
    """SHA-256 (64 hexadecimal digits) of the canonical JSON of a problem; equal problems have equal hashes."""
    return hashlib.sha256(canonical_text(problem_to_json(problem)).encode("ascii")).hexdigest()


def write_problem(path: str | os.PathLike[str], problem: Problem) -> None:
    """Write a problem file (temporary name, then rename); equal problems give equal bytes. Raises InputError."""
    write_text(path, readable_text(problem_to_json(problem)))


def read_problem(path: str | os.PathLike[str]) -> Problem:
    """Read and validate a problem file. Raises InputError starting with the file's name."""
    data = read_file(path)
    try:
        return problem_from_json(parse_json(data))
    except InputError as error:
        raise InputError(f"{path}: {error}") from None
    except RecursionError:
        raise InputError(f"{path}: nested too deeply to be a problem file") from None
