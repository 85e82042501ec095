"""The whole configuration of a run: a TOML file and overrides (docs/configuration.md).

`load_config` checks everything that can be checked without tracing a network and imports no JAX; `tmojax.build` does
the rest.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Sequence
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_type_hints

from pydantic import Field, ValidationError, model_validator

from tmojax.errors import InputError
from tmojax.importers.g10 import PACKAGED as G10_TRACES
from tmojax.importers.g10 import G10Workload
from tmojax.importers.harmony import PACKAGED as HARMONY_PROFILES
from tmojax.importers.harmony import HarmonyWorkload
from tmojax.importers.machine_build import build_machine
from tmojax.importers.machine_toml import (
    Bytes,
    Seconds,
    Strict,
    explain,
    parse_machine,
    read_toml,
    resolve_presets,
)
from tmojax.importers.micro_batch_orders import BreadthFirst
from tmojax.importers.model_zoo import ModelWorkload
from tmojax.importers.pipeline_order import ORDERS as PIPELINE_ORDERS
from tmojax.importers.synthetic import SyntheticTransformer
from tmojax.planners.alone import COORDINATED
from tmojax.planners.base import Planner
from tmojax.planners.registry import PLANNERS
from tmojax.problem import (
    Action,
    Machine,
)
from tmojax.problem.strict_json import shorten
from tmojax.problem.typed_json import reader, writer

Settings = TypeVar("Settings")


@dataclass(frozen=True)
class FileWorkload:
    """`kind = "file"`: a problem file; its machine is used unless the configuration describes one."""

    path: str


AnyWorkload = ModelWorkload | SyntheticTransformer | FileWorkload | G10Workload | HarmonyWorkload
WORKLOADS: dict[str, type] = {
    "model": ModelWorkload,
    "synthetic": SyntheticTransformer,
    "file": FileWorkload,
    "g10": G10Workload,
    "harmony": HarmonyWorkload,
}


class Capacity(Strict):
    """Device memory that plans may use, on every GPU: `bytes`, or keep-all footprint / `footprint_factor`.

    `largest_feasible`: where no simple strategy fits into footprint / factor, the least that one fits into is used.
    """

    bytes: Bytes | None = None
    footprint_factor: Annotated[float, Field(ge=0.001, le=1000)] | None = None
    largest_feasible: bool = False

    @model_validator(mode="after")
    def _exactly_one(self) -> Capacity:
        if (self.bytes is None) == (self.footprint_factor is None):
            raise ValueError("give exactly one of bytes and footprint_factor")
        if self.bytes == 0:
            raise ValueError("bytes must be positive")
        if self.largest_feasible and self.footprint_factor is None:
            raise ValueError("largest_feasible needs footprint_factor")
        return self


class Pipeline(Strict):
    """The layers of the workload are divided over the GPUs instead of the batch. `order`: "1f1b" or "gpipe"."""

    order: str = "1f1b"

    @model_validator(mode="after")
    def _known_order(self) -> Pipeline:
        if self.order not in PIPELINE_ORDERS:
            raise ValueError(f"order {self.order!r} is unknown; choose one of {', '.join(PIPELINE_ORDERS)}")
        return self


class Output(Strict):
    """Times are reported under `jitter_samples` random changes of all durations by up to +-`jitter`."""

    jitter_samples: Annotated[int, Field(ge=0, le=100_000)] = 100
    jitter: Annotated[float, Field(ge=0, lt=1)] = 0.05


class RunFile(Strict):
    """The top level of a run's TOML file. `workload` and `planners` are tables with a `kind`."""

    name: str = ""
    workload: dict[str, Any]
    machine: dict[str, Any] | None = None
    capacity: Capacity | None = None
    actions: list[str] | None = None
    micro_batches: Annotated[int, Field(ge=1, le=100_000)] | None = None
    micro_batch_orders: list[dict[str, Any]] | None = None
    pipeline: Pipeline | None = None
    planners: Annotated[list[dict[str, Any]], Field(min_length=1)]
    coordinate: bool = True
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    time_budget: Seconds | None = None
    output: Output = Output()


@dataclass(frozen=True, eq=False)
class RunConfig:
    """A checked configuration.

    `document`: the whole of it as JSON values, presets, overrides and defaults filled in; it can be parsed again.
    `machine` is None where a problem file brings its own; `actions` and `micro_batches` are None where a problem file
    decides. `micro_batch_orders`: to be offered besides those of the workload. `time_budget_s`: wall-clock seconds for
    all planners together (None: no limit). `coordinate`: with False every GPU plans as if it were alone, and the report
    says what that costs. `folder`: paths in the file are relative to it.
    """

    name: str
    folder: Path
    document: dict[str, Any]
    workload: AnyWorkload
    machine: Machine | None
    capacity: Capacity | None
    actions: frozenset[Action] | None
    micro_batches: int | None
    micro_batch_orders: tuple[BreadthFirst, ...]
    pipeline: Pipeline | None
    planners: tuple[Planner, ...]
    coordinate: bool
    seed: int
    time_budget_s: float | None
    output: Output


def load_config(path: str | os.PathLike[str], overrides: Sequence[str] = ()) -> RunConfig:
    """Read and check a configuration; `overrides` are texts `key.path=value`. Raises InputError with all mistakes."""
    document = read_toml(path)
    for override in overrides:
        document = apply_override(document, override)
    try:
        return parse_config(document, Path(path).parent, Path(path).stem)
    except InputError as error:
        raise InputError(f"{path}: {error}" if "\n" not in str(error) else f"{path}:\n{error}") from None


def apply_override(document: dict[str, Any], override: str) -> dict[str, Any]:
    """`document` with one value replaced. The value is TOML; text that is not TOML is taken as a string.

    Path parts are keys, or positions in lists. Raises InputError for a malformed override or path.
    """
    key, separator, text = override.partition("=")
    parts = key.strip().split(".")
    if not separator or not all(parts):
        raise InputError(f"-o {override!r}: write key.path=value, for example -o machine.gpus.rtx4090.count=2")
    try:
        parsed = tomllib.loads(f"value = {text}")
    except (tomllib.TOMLDecodeError, RecursionError):
        parsed = {}
    return _replaced(document, parts, parsed["value"] if parsed.keys() == {"value"} else text.strip(), override)


def _replaced(target: Any, parts: list[str], value: Any, override: str) -> Any:
    if not parts:
        return value
    head, rest = parts[0], parts[1:]
    if isinstance(target, list):
        if not (head.isascii() and head.isdigit() and len(head) < 9 and int(head) < len(target)):
            raise InputError(f"-o {override!r}: {head!r} is not a position in a list of {len(target)}")
        items = list(target)
        items[int(head)] = _replaced(items[int(head)], rest, value, override)
        return items
    if not isinstance(target, dict):
        raise InputError(f"-o {override!r}: there is nothing under a value; {head!r} cannot be set")
    return {**target, head: _replaced(target.get(head, {}), rest, value, override)}


def parse_config(document: dict[str, Any], folder: Path, default_name: str) -> RunConfig:
    """Check a parsed configuration. Raises InputError with one line for each mistake."""
    try:
        file = RunFile.model_validate(document)
    except ValidationError as error:
        raise InputError(explain(error, RunFile, "")) from None
    mistakes: list[str] = []
    workload = _read_tagged(file.workload, WORKLOADS, "workload", mistakes)
    planners = [
        _read_tagged(table, PLANNERS, f"planners.{index}", mistakes) for index, table in enumerate(file.planners)
    ]
    orders = [
        read_settings(BreadthFirst, table, f"micro_batch_orders.{index}", mistakes)
        for index, table in enumerate(file.micro_batch_orders or [])
    ]
    if orders and file.pipeline is not None:
        mistakes.append("micro_batch_orders: stages follow pipeline.order; leave one of the two out")
    names = [planner.name for planner in planners if planner is not None]
    for name in [*([file.name] if file.name else []), *names]:
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._+-]{0,63}", name):
            mistakes.append(f"name: {shorten(name)} becomes a file name; use letters, digits and . _ + - (at most 64)")
    for name in sorted({name for name in names if names.count(name) > 1}):
        mistakes.append(f"planners: two are called {name!r}; give one of them another `name`")
    if not file.coordinate:
        if all(planner is not None and not planner.coordinates for planner in planners):
            mistakes.append("coordinate: none of the planners coordinates GPUs, so false has no effect; leave it out")
        for name in names:
            if name.endswith(COORDINATED):
                mistakes.append(f"name: {name!r} ends in {COORDINATED!r}, as plans with coordination do; rename it")
    actions = None
    if file.actions is not None:
        actions = [_collect(lambda a=a: reader(Action)(a, "actions"), mistakes) for a in file.actions]
    machine_document = None
    machine = None
    if file.machine is not None:
        machine_document = _collect(lambda: resolve_presets(file.machine or {}, folder), mistakes)
        if machine_document is not None:
            machine = _collect(lambda: build_machine(parse_machine(machine_document)), mistakes)
    from_file = isinstance(workload, FileWorkload)
    if workload is not None and not from_file:
        for name in ("machine", "actions", "micro_batches"):
            if getattr(file, name) is None:
                mistakes.append(f"{name}: is missing; only a workload of kind 'file' brings its own")
    if file.pipeline is not None:
        mistakes += _pipeline_mistakes(workload, machine)
    path = _file_named(workload)
    if path is not None and not (folder / path[1]).is_file():
        mistakes.append(f"workload.{path[0]}: there is no file {folder / path[1]}")
    recorded = isinstance(workload, G10Workload) and workload.times == "recorded"
    if isinstance(workload, ModelWorkload | G10Workload) and not recorded and machine is not None and not workload.gpu:
        unnamed = [device.name for device in machine.devices if not device.model]
        if unnamed:
            mistakes.append(
                f"workload.gpu: is missing; the machine names no model for {unnamed[0]}, so rates are unknown"
            )
    if machine is not None and file.capacity is not None and file.capacity.bytes is not None:
        for device in machine.devices:
            memory = machine.memories[device.memory]
            usable = memory.capacity_bytes - memory.reserve_bytes
            if file.capacity.bytes > usable:
                mistakes.append(
                    f"capacity.bytes: {file.capacity.bytes} is more than {memory.name} has ({usable} bytes less its "
                    f"reserve); lower it or set memory in machine.gpus"
                )
                break
    if mistakes:
        raise InputError("\n".join(mistakes))
    assert workload is not None
    name = file.name or default_name
    # Quantities stay as they were written; everything else is there with its default.
    resolved = {"name": name, "coordinate": file.coordinate, "seed": file.seed, "output": file.output.model_dump()}
    resolved |= {
        key: document[key] for key in ("micro_batches", "actions", "capacity", "time_budget") if key in document
    }
    if orders:
        resolved["micro_batch_orders"] = [writer(BreadthFirst)(order, "") for order in orders]
    if file.pipeline is not None:
        resolved["pipeline"] = file.pipeline.model_dump()
    resolved["workload"] = _table(file.workload["kind"], workload)
    if machine_document is not None:
        resolved["machine"] = machine_document
    resolved["planners"] = [_table(t["kind"], p) for t, p in zip(file.planners, planners, strict=True)]
    return RunConfig(
        name=name,
        folder=folder,
        document=resolved,
        workload=workload,
        machine=machine,
        capacity=file.capacity,
        actions=None if actions is None else frozenset(actions),
        micro_batches=file.micro_batches,
        micro_batch_orders=tuple(order for order in orders if order is not None),
        pipeline=file.pipeline,
        planners=tuple(planners),
        coordinate=file.coordinate,
        seed=file.seed,
        time_budget_s=file.time_budget,
        output=file.output,
    )


def _pipeline_mistakes(workload: AnyWorkload | None, machine: Machine | None) -> list[str]:
    if isinstance(workload, FileWorkload):
        return ["pipeline: a problem file says itself what each GPU runs; leave pipeline out"]
    if machine is None:
        return []
    if len(machine.devices) < 2:
        return ["pipeline: needs at least two GPUs; the machine has one"]
    models = sorted({device.model for device in machine.devices})
    if isinstance(workload, ModelWorkload | G10Workload) and not workload.gpu and len(models) > 1:
        return [f"pipeline: stages are timed for one GPU model and the machine has {models}; set workload.gpu"]
    return []


def _file_named(workload: AnyWorkload | None) -> tuple[str, str] | None:
    """(key, path) of the file that a workload reads, if it is not one of the package."""
    if isinstance(workload, FileWorkload):
        return "path", workload.path
    if isinstance(workload, G10Workload) and workload.trace not in G10_TRACES:
        return "trace", workload.trace
    if isinstance(workload, HarmonyWorkload) and workload.profile not in HARMONY_PROFILES:
        return "profile", workload.profile
    return None


def _table(kind: str, settings: Any) -> dict[str, Any]:
    return {"kind": kind, **writer(type(settings))(settings, "")}


def _collect(read: Any, mistakes: list[str]) -> Any:
    """What `read` returns, or None with its mistake noted."""
    try:
        return read()
    except InputError as error:
        mistakes.append(str(error))
        return None


def _read_tagged(table: dict[str, Any], kinds: dict[str, Any], path: str, mistakes: list[str]) -> Any:
    """The frozen dataclass that `kind` names, from the other keys of a table; all mistakes are noted (then None)."""
    kind = table.get("kind")
    if not isinstance(kind, str) or kind not in kinds:
        mistakes.append(
            f"{path}.kind: {'is missing' if kind is None else shorten(kind)}; choose one of {', '.join(kinds)}"
        )
        return None
    values = {key: value for key, value in table.items() if key != "kind"}
    return read_settings(kinds[kind], values, path, mistakes)


def read_settings(settings: type[Settings], values: dict[str, Any], path: str, mistakes: list[str]) -> Settings | None:
    """A settings dataclass from a table, strict by its annotations; adds every mistake with its path to `mistakes`."""
    hints = get_type_hints(settings)
    known = {f.name: f for f in fields(settings)}  # type: ignore[arg-type]
    before = len(mistakes)
    for key in values.keys() - known.keys():
        mistakes.append(f"{path}.{key}: unknown key; known: {', '.join(sorted(known))}")
    for name, spec in known.items():
        if name not in values and spec.default is MISSING and spec.default_factory is MISSING:
            mistakes.append(f"{path}.{name}: is missing")
    read = {
        key: _collect(lambda key=key, value=value: reader(hints[key])(value, f"{path}.{key}"), mistakes)
        for key, value in values.items()
        if key in known
    }
    if len(mistakes) > before:
        return None
    try:
        return settings(**read)
    except InputError as error:
        mistakes.append(f"{path}.{error}")
    return None
