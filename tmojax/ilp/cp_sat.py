"""Solving the CP-SAT model of a step (`tmojax.ilp.cp_sat_model`) with OR-tools."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any

from tmojax.ilp.cp_sat_links import OUT
from tmojax.ilp.cp_sat_model import CpModel
from tmojax.ilp.cp_sat_times import DeviceTimes, Model, step_ticks


@dataclass(frozen=True)
class CpSettings:
    """time_limit_s: wall clock. gap: relative, at which the search stops. deterministic_limit: in CP-SAT's
    deterministic time, 0 for none; with one, the workers take turns and the result depends on the settings only, if the
    wall clock does not end the search first. workers, seed: of the solver. hint_only: every variable keeps its hinted
    value."""

    time_limit_s: float = 60.0
    gap: float = 1e-4
    deterministic_limit: float = 0.0
    workers: int = 8
    seed: int = 0
    hint_only: bool = False

    def depends_on_speed(self, answer: CpAnswer) -> bool:
        """Whether another run could end with another incumbent."""
        turns = self.deterministic_limit > 0 or self.workers == 1
        return answer.wall_limited or not turns


@dataclass(frozen=True)
class CpAnswer:
    """status: CP-SAT's name of it. times: of the incumbent, if there is one. objective, bound: ticks (-1: none).
    first_incumbent_s: seconds into the solve (-1: none). wall_limited: the wall clock ended the search."""

    status: str
    times: tuple[DeviceTimes, ...] | None
    objective: int
    bound: int
    build_s: float
    solve_s: float
    first_incumbent_s: float
    variables: int
    constraints: int
    intervals: int
    wall_limited: bool


def solver_version() -> str:
    import ortools

    return f"OR-tools CP-SAT {ortools.__version__}"


def solve_cp_sat(model: Model, settings: CpSettings, *, horizon: int = 0, start: tuple[DeviceTimes, ...] | None = None,
                 free: frozenset[tuple[int, int]] | None = None) -> CpAnswer:  # fmt: skip
    """Minimise the step time. One of `horizon` (ticks within which a schedule is looked for) and `start` is given."""
    from ortools.sat.python import cp_model

    begin = time.perf_counter()
    built = CpModel(model, horizon, start, free)
    build_s = time.perf_counter() - begin
    solver = cp_model.CpSolver()
    parameters = solver.parameters
    parameters.max_time_in_seconds = settings.time_limit_s
    parameters.num_workers = settings.workers
    parameters.relative_gap_limit = settings.gap
    parameters.random_seed = settings.seed
    if settings.deterministic_limit > 0:
        parameters.max_deterministic_time = settings.deterministic_limit
        parameters.interleave_search = settings.workers > 1
    parameters.fix_variables_to_their_hinted_value = settings.hint_only
    parameters.catch_sigint_signal = False  # it would leave the process without Python's handler

    class First(cp_model.CpSolverSolutionCallback):
        found_s = -1.0

        def on_solution_callback(self) -> None:
            if self.found_s < 0:
                self.found_s = self.wall_time

    first = First()
    status = _solve(solver, built, first)
    name = solver.status_name(status)
    times, objective, bound = None, -1, -1
    if status in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        times = tuple(_read(built, solver, device) for device in range(len(model.steps)))
        objective = round(solver.objective_value) if free is None else step_ticks(model, times)
    if status in (cp_model.OPTIMAL, cp_model.FEASIBLE, cp_model.UNKNOWN):
        bound = round(solver.best_objective_bound)
    wall_limited = status != cp_model.OPTIMAL and solver.wall_time >= settings.time_limit_s
    return CpAnswer(
        name, times, objective, bound, build_s, solver.wall_time, first.found_s, len(built.cp.proto.variables),
        len(built.cp.proto.constraints), built.intervals, wall_limited,
    )  # fmt: skip


def _solve(solver: Any, built: CpModel, callback: Any) -> Any:
    """Status of the search, which runs beside this thread so that Ctrl-C gets through and ends it."""
    with ThreadPoolExecutor(1) as beside:
        try:
            answer = beside.submit(solver.solve, built.cp, callback)
            while not wait([answer], timeout=0.1).done:  # in turns: a lock without limit may keep a signal waiting
                pass
            return answer.result()
        except KeyboardInterrupt:
            solver.stop_search()
            raise


def _read(built: CpModel, solver: Any, device: int) -> DeviceTimes:
    part = built.devices[device]

    def true(literal: Any) -> bool:
        return literal == 1 if isinstance(literal, int) else bool(solver.boolean_value(literal))

    times = DeviceTimes([solver.value(start) for start in part.run_start])
    times.reruns = {number: solver.value(item.start) for number, item in part.again.items() if true(item.present)}
    for (gap, way), copy in part.copies.items():
        if true(copy.present):
            (times.out if way == OUT else times.into)[gap] = solver.value(copy.start)
    times.again = {gap for gap, literal in part.restored.items() if true(literal)}
    times.resting = {store for store, literal in part.rests.items() if true(literal)}
    return times
