"""`--sweep KEY=V1,V2,...`: one run for each value, whose plans are offered to each other (docs/configuration.md)."""

from __future__ import annotations

import hashlib
import math
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tmojax.build import BuiltProblem, build_problem
from tmojax.config import RunConfig
from tmojax.errors import InfeasibleError, InputError
from tmojax.planners.points import Offer, by_size, exchange
from tmojax.problem.strict_json import canonical_text
from tmojax.report.interrupts import Interrupts
from tmojax.report.outcome import RunReport, device_capacities
from tmojax.report.points import PointRow, points_table, write_points
from tmojax.report.run_folder import RunFolder
from tmojax.report.streams import stdout_to_stderr
from tmojax.report.summary import SUMMARY_SCHEMA
from tmojax.session import Session, require_room_for_largest_op


def read_sweep(text: str) -> tuple[str, list[str]]:
    """(key, values as texts of `-o`) of `KEY=V1,V2,...`. Values are TOML, or text without commas. Raises InputError."""
    key, separator, listed = text.partition("=")
    try:
        parsed = tomllib.loads(f"values = [{listed}]")["values"]
        values = [str(value) if isinstance(value, str | int | float) else None for value in parsed]
    except (tomllib.TOMLDecodeError, RecursionError):
        values = [value.strip() for value in listed.split(",")]
    wanted = [value for value in values if value]
    if not separator or not key.strip() or len(wanted) != len(values) or len(set(wanted)) < max(2, len(values)):
        raise InputError(
            f"--sweep {text!r}: write key.path=value,value with at least two different numbers or texts, for example "
            f"--sweep capacity.footprint_factor=1.5,2,3"
        )
    return key.strip(), wanted


@dataclass(frozen=True)
class Swept:
    """What a sweep ends with. reports: of the points that are done and where something can fit. text: the table and,
    as its last line, the folder."""

    reports: list[RunReport]
    interrupted: bool
    text: str


@dataclass
class _Point:
    """One run of the sweep. report: None until it is done, and where nothing can fit; `failure` says why then."""

    label: str
    value: str
    config: RunConfig
    built: BuiltProblem
    folder: RunFolder | None = None
    session: Session | None = None
    report: RunReport | None = None
    failure: str = ""

    @property
    def best_s(self) -> float:
        best = self.report.best if self.report is not None else None
        return math.inf if best is None else best.step_s

    def offer(self) -> Offer:
        assert self.report is not None and self.report.best is not None
        return Offer(self.report.best.result, self.report.problem, self.label)


def run_sweep(load: Callable[[str], RunConfig], sweep: str, out: str, command_line: Sequence[str]) -> Swept:
    """Run all points, the one with the least memory first.

    `load` reads the configuration with one override more. Every point is offered the best plan of the point before it;
    in the end neighbours exchange their best plans. Raises InputError; a point where nothing can fit is a row.
    """
    key, values = read_sweep(sweep)
    configs = [load(f"{key}={value}") for value in values]
    with stdout_to_stderr():
        points = [
            _Point(f"{key}={value}", value, config, build_problem(config))
            for value, config in zip(values, configs, strict=True)
        ]
    digest = hashlib.sha256(canonical_text([config.document for config in configs]).encode("ascii")).hexdigest()
    parent = RunFolder(out, f"{configs[0].name}-sweep", digest)
    order = [points[position] for position in by_size([point.built.problem for point in points])]
    interrupted = False
    with Interrupts() as interrupts:
        try:
            for place, point in enumerate(order):
                earlier = next((p for p in reversed(order[:place]) if math.isfinite(p.best_s)), None)
                offers = [] if earlier is None else [earlier.offer()]
                _run_point(point, RunFolder(parent.path, point.label, digest), command_line, interrupts, offers)
            _exchange(order, interrupts)
        except KeyboardInterrupt:
            interrupted = True
    for point in order:
        if point.folder is not None:
            point.folder.close()
    rows = [_row(point) for point in points]
    write_points(parent, key, rows)
    parent.close()
    text = f"{points_table(key, rows).plain()}\n{parent.path}"
    return Swept([point.report for point in points if point.report is not None], interrupted, text)


def _run_point(
    point: _Point, folder: RunFolder, command_line: Sequence[str], interrupts: Interrupts, offers: Sequence[Offer]
) -> None:
    """Run and write one point. Raises KeyboardInterrupt, when what was found is written."""
    point.folder = folder
    point.session = session = Session(point.config, folder, command_line, interrupts, point.built, offers)
    session.say(f"{point.label}: writing to {folder.path}")
    try:
        with stdout_to_stderr():
            require_room_for_largest_op(point.built.problem)
            session.run()
    except InfeasibleError as error:
        point.failure = str(error)
        folder.write_json("summary.json", {"schema": SUMMARY_SCHEMA, "verdict": str(error), "planners": []})
        session.say(str(error))
        return
    except KeyboardInterrupt:
        session.interrupted = True
        if session.has_problem:
            _write(point, interrupts)
        raise
    _write(point, interrupts)


def _write(point: _Point, interrupts: Interrupts) -> None:
    """Write the run of a point; an interrupt in the meantime takes effect when that is done."""
    assert point.session is not None
    interrupts.writing = True
    with stdout_to_stderr():
        point.report = point.session.write()
    noticed = not interrupts.writing
    interrupts.writing = False
    if noticed or interrupts.seen:
        raise KeyboardInterrupt


def _exchange(order: Sequence[_Point], interrupts: Interrupts) -> None:
    """Neighbours take over what is faster there; the folder of a point that did is written again."""

    def offer(source: int, target: int) -> None:
        point = order[target]
        if point.session is None or point.report is None:
            return
        point.session.take_over(order[source].offer())
        if len(point.session.report().outcomes) > len(point.report.outcomes):
            _write(point, interrupts)

    exchange(len(order), lambda place: order[place].best_s, offer)


def _row(point: _Point) -> PointRow:
    report, best = point.report, point.report.best if point.report is not None else None
    return PointRow(
        value=point.value,
        capacity_bytes=device_capacities(point.built.problem),
        folder=point.folder.path.name if point.folder is not None else "",
        failure=point.failure or ("not run" if report is None else "no plan found" if best is None else ""),
        planner=best.result.details.get("planner", best.planner) if best is not None else "",
        taken_over_from=best.result.details.get("taken_over_from", "") if best is not None else "",
        step_s=point.best_s,
        bound_s=best.bound_s if best is not None else 0.0,
        p95_s=best.jitter.p95_s if best is not None and best.jitter is not None else None,
    )
