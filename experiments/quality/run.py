"""Every planner on every instance of configs/bench (--held-out: of configs/held-out), then tables and figures. See
README.md.

What an instance is (size, capacity, bound) and each (instance, rival) is one file, written when it is complete, and not
made again while its definition is the same; so a run that was stopped goes on where it was.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import time
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from experiments.quality.rivals import HEURISTICS, MODELS, SEARCHES, Rival, quick
from experiments.quality.table import write_tables
from experiments.recorded import exit_with, parsed, planned
from tmojax.bounds import bound
from tmojax.build import build_problem
from tmojax.config import RunConfig, load_config
from tmojax.errors import InputError
from tmojax.planners.base import Planner, PlanResult
from tmojax.planners.orders import Orders
from tmojax.planners.simple import KeepAll
from tmojax.problem import Problem
from tmojax.problem.io import problem_hash
from tmojax.problem.strict_json import readable_text, write_text
from tmojax.report.provenance import provenance
from tmojax.report.summary import json_values

HERE = Path(__file__).resolve().parent
SUITE = HERE.parents[1] / "configs" / "bench"
HELD_OUT = SUITE.with_name("held-out")
LIMIT_S = 120.0  # of each solve of an integer programme
BOUND_LIMIT_S = 60.0  # of the lower bound: more than in a run, so that it depends less on other load
QUICK_INSTANCES = ("prototype-4gpu-k1-f1.33-offload", "prototype-4gpu-sync-k1-f2")
SEED = 0

Record = dict[str, Any]


def main() -> int:
    arguments = _arguments()
    suite, home = (HELD_OUT, HERE / "held-out") if arguments.held_out else (SUITE, HERE)
    known = sorted(path.stem for path in suite.glob("*.toml"))
    if unknown := sorted(set(arguments.instance) - set(known)):
        raise InputError(f"--instance: there is no {unknown[0]!r} in configs/{suite.name}; choose from {known}")
    out: Path = home / "results" if arguments.out == HERE / "results" else arguments.out
    for folder in ("instances", "runs"):
        (out / folder).mkdir(parents=True, exist_ok=True)
    if not arguments.table:
        names = arguments.instance or (QUICK_INSTANCES if arguments.quick else known)
        cases = {name: Case(suite / f"{name}.toml", out, arguments.limit) for name in names}
        searches, models = (quick(SEARCHES), quick(MODELS)) if arguments.quick else (SEARCHES, MODELS)
        # What takes least first: heuristics on everything, then searches, small instances before large ones.
        for group in (HEURISTICS, searches, models if arguments.rivals or arguments.rival else ()):
            wanted = [rival for rival in group if not arguments.rival or rival.name in arguments.rival]
            for name in sorted(names, key=lambda name: _effort(out, name)) if wanted else ():
                cases[name].run(wanted)
    runs = [json.loads(path.read_text()) for path in sorted((out / "runs").glob("*/*.json"))]
    facts = {path.stem: json.loads(path.read_text()) for path in sorted((out / "instances").glob("*.json"))}
    readme = home / "README.md" if out == home / "results" else None
    mistakes = write_tables(runs, facts, known, out, readme)
    print("\n".join(mistakes) or f"{len(runs)} runs on {len(facts)} instances in {out}; every plan is valid")
    return 1 if mistakes else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="experiments.quality.run", description=__doc__)
    parser.add_argument("--held-out", action="store_true", help="the held-out instances in place of the suite")
    parser.add_argument("--instance", action="append", default=[], metavar="NAME",
                        help="only this instance (repeatable)")  # fmt: skip
    names = [rival.name for rival in (*HEURISTICS, *SEARCHES, *MODELS)]
    parser.add_argument("--rival", action="append", default=[], choices=names, metavar="NAME",
                        help="only this rival (repeatable)")  # fmt: skip
    parser.add_argument("--rivals", action="store_true", help="the integer programmes as well")
    parser.add_argument("--limit", type=float, default=LIMIT_S, help="seconds that each of their solves may take")
    return parsed(parser, HERE / "results", "two instances with little effort")


def _effort(out: Path, name: str) -> tuple[float, str]:
    """Small instances first, as far as their size is known: ops of a micro-batch on all GPUs."""
    path = out / "instances" / f"{name}.json"
    if not path.exists():
        return float("inf"), name
    fact = json.loads(path.read_text())
    return fact["gpus"] * max(fact["ops"]), name


class Case:
    """One instance; its problem, bound and heuristic plans are made when the first missing file needs them."""

    def __init__(self, path: Path, out: Path, limit_s: float) -> None:
        self.path, self.name, self.out, self.limit_s = path, path.stem, out, limit_s
        self.config: RunConfig = load_config(path)
        posed = {key: value for key, value in self.config.document.items() if key not in ("planners", "output")}
        self.digest = hashlib.sha256(readable_text(json_values(posed)).encode()).hexdigest()[:16]
        self.problem: Problem | None = None
        self.orders: Orders | None = None  # where the problem offers orders of micro-batches
        self.bound_s = 0.0
        self.seeds: tuple[PlanResult, ...] | None = None  # of the heuristics, once they have run

    def run(self, rivals: list[Rival]) -> None:
        """Make the files of these rivals that are missing, and that of the instance."""
        missing = [rival for rival in rivals if self._missing(rival)]
        if not missing and self.known():
            return
        if self.problem is None:
            self._build()
        if missing and self.seeds is None:
            self.seeds = ()
            for rival in HEURISTICS:  # in their order: each may start from those before
                self._record(rival)
        for rival in missing:
            if rival not in HEURISTICS:
                self._record(rival)

    def _build(self) -> None:
        begin = time.perf_counter()
        built = build_problem(self.config)
        build_s = time.perf_counter() - begin
        self.problem = problem = built.problem
        if any(program.orders for program in problem.workload.programs):
            self.orders = Orders(problem)
        if not self.known():
            begin = time.perf_counter()
            found = bound(problem, time_limit_s=BOUND_LIMIT_S)
            workload = problem.workload
            self._write(self.fact_file(), {
                "name": self.name,
                "definition": self.digest,
                "commit": provenance(seed=SEED, command_line=())["git_commit"],
                "problem_hash": problem_hash(problem),
                "words": self.path.read_text().splitlines()[0].partition(": ")[2],
                "gpus": workload.device_count,
                "micro_batches": self.config.micro_batches,  # a pipeline's workload has them all in one
                "actions": sorted(problem.actions),
                "ops": [len(program.ops) for program in workload.programs],
                "tensors": [len(program.tensors) for program in workload.programs],
                "footprint_bytes": max(built.footprint_bytes),
                "capacity_bytes": problem.capacity_bytes(0),
                "notes": built.notes,
                "build_s": build_s,
                "bound_s": found.bound_s,
                "bound_status": found.status,
                "bound_parts": {part.name: part.step_s for part in found.parts},
                "bound_plan_s": time.perf_counter() - begin,
                "unlimited_s": KeepAll().plan(problem.with_device_capacity(2 * max(built.footprint_bytes))).step_s,
            })  # fmt: skip
        self.bound_s = json.loads(self.fact_file().read_text())["bound_s"]

    def _record(self, rival: Rival) -> None:
        """Plan, judge and write; a heuristic's plan is kept for those that come after."""
        assert self.problem is not None and self.seeds is not None
        result, record, cpu_s = planned(self._planner(rival), self.problem, self.bound_s, self.seeds, SEED, self.orders)
        if rival in HEURISTICS and result is not None and record["valid"]:
            self.seeds += (result,)
        if not self._missing(rival):  # a heuristic that others need, recorded before
            return
        found = provenance(seed=SEED, command_line=())
        self._write(self._run_file(rival), record | {
            "instance": self.name,
            "rival": rival.name,
            "limit_s": self.limit_s if rival in MODELS else None,
            "plan_cpu_s": cpu_s,
            "compile_s": result.compile_s if result is not None else 0.0,
            "definition": self._definition(rival),
            "commit": found["git_commit"],
            "machine": {"cpu_count": found["cpu_count"], "platform": found["platform"], **found["versions"]},
            "date": f"{datetime.now(UTC):%Y-%m-%d}",
        })  # fmt: skip
        outcome = f"{100 * (record['step_s'] / self.bound_s - 1):.2f} %" if record["valid"] else record["status"]
        print(f"{self.name}, {rival.name}: {outcome}, {cpu_s:.1f} s", file=sys.stderr, flush=True)

    def _planner(self, rival: Rival) -> Planner:
        return rival.planner(self.limit_s if rival.kind in {model.kind for model in MODELS} else None)

    def fact_file(self) -> Path:
        return self.out / "instances" / f"{self.name}.json"

    def _run_file(self, rival: Rival) -> Path:
        return self.out / "runs" / self.name / f"{rival.name.replace(', ', '-').replace(' ', '-')}.json"

    def _definition(self, rival: Rival) -> Record:
        settings = asdict(self._planner(rival))  # type: ignore[call-overload]
        return json.loads(readable_text(json_values({"instance": self.digest, "settings": settings, "seed": SEED})))

    def known(self) -> bool:
        path = self.fact_file()
        return path.exists() and json.loads(path.read_text())["definition"] == self.digest

    def _missing(self, rival: Rival) -> bool:
        path = self._run_file(rival)
        return not path.exists() or json.loads(path.read_text())["definition"] != self._definition(rival)

    def _write(self, path: Path, value: Record) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, readable_text(json_values(value)))


if __name__ == "__main__":
    exit_with(main)
