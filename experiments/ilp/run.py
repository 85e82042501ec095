"""Every model on every instance with every time limit, next to heuristics and searches; then the tables. See README.md.

Each (instance, rival, limit) is one file, written when it is complete, and not computed again while its definition is
the same; so a run that was stopped goes on where it was.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from experiments.ilp.instances import INSTANCES, Instance
from experiments.ilp.rivals import HEURISTICS, MODELS, SEARCHES, Rival, quick
from experiments.ilp.table import write_table
from experiments.recorded import exit_with, parsed, planned
from tmojax.bounds import bound
from tmojax.build import build_problem
from tmojax.config import load_config
from tmojax.planners.base import PlanResult
from tmojax.problem import Problem
from tmojax.problem.io import problem_hash
from tmojax.problem.strict_json import readable_text, write_text
from tmojax.report.provenance import provenance
from tmojax.report.summary import json_values

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
LIMITS_S = (10.0, 60.0, 600.0)
LONG_S = 600.0  # only on the instances that are marked so
SEED = 0


def main() -> int:
    arguments = _arguments()
    out: Path = arguments.out
    instances = [i for i in INSTANCES if i.name in (arguments.instance or ("tiny",) if arguments.quick else
                                                    arguments.instance or [i.name])]  # fmt: skip
    limits = tuple(arguments.limit) or ((1.0, 2.0) if arguments.quick else LIMITS_S)
    if not arguments.table:
        # The shortest limit on everything first: what a stopped run has is then comparable.
        cases = {instance.name: _Case(instance, out, arguments.quick, set(arguments.rival)) for instance in instances}
        for limit_s in limits:
            for instance in instances:
                if limit_s < LONG_S or instance.long:
                    cases[instance.name].run(limit_s)
    runs = [json.loads(path.read_text()) for path in sorted((out / "runs").glob("*/*.json"))]
    facts = {path.stem: json.loads(path.read_text()) for path in sorted((out / "instances").glob("*.json"))}
    write_table(runs, facts, out, HERE / "README.md" if out == HERE / "results" else None)
    mistakes = [f"{run['instance']}, {run['rival']}: {mistake}" for run in runs for mistake in run["mistakes"]]
    print("\n".join(mistakes) or f"{len(runs)} runs in {out}; every plan is valid")
    return 1 if mistakes else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="experiments.ilp.run", description=__doc__)
    instances = [instance.name for instance in INSTANCES]
    rivals = [rival.name for rival in (*HEURISTICS, *SEARCHES, *MODELS)]
    parser.add_argument("--instance", action="append", default=[], choices=instances, metavar="NAME",
                        help="only this instance (repeatable)")  # fmt: skip
    parser.add_argument("--rival", action="append", default=[], choices=rivals, metavar="NAME",
                        help="only this rival (repeatable)")  # fmt: skip
    parser.add_argument("--limit", action="append", default=[], type=float, help="time limits in seconds (repeatable)")
    return parsed(parser, HERE / "results", "the tiny instance with little effort")


class _Case:
    """One instance: its problem, bound and heuristic plans are made when the first missing run needs them."""

    def __init__(self, instance: Instance, out: Path, quickly: bool, only: set[str]) -> None:
        self.instance, self.out, self.only = instance, out, only
        self.searches, self.models = (quick(SEARCHES), quick(MODELS)) if quickly else (SEARCHES, MODELS)
        self.document = load_config(ROOT / instance.config, instance.overrides).document
        self._problem: Problem | None = None
        self._bound_s = 0.0
        self._seeds: tuple[PlanResult, ...] = ()

    def run(self, limit_s: float) -> None:
        """What is missing with that limit; heuristics and searches, which have none, with the first."""
        for rival in (*HEURISTICS, *self.searches):
            if self._missing(rival, None):
                self._prepare()  # which runs the heuristics
            if rival in self.searches and self._missing(rival, None):
                self._record(rival, None)
        for rival in self.models:
            if self._missing(rival, limit_s) and not self._ended_earlier(rival, limit_s):
                self._prepare()
                self._record(rival, limit_s)

    def _path(self, rival: Rival, limit_s: float | None) -> Path:
        name = rival.name.replace(", ", "-").replace(" ", "-")
        return self.out / "runs" / self.instance.name / (name if limit_s is None else f"{name}-{limit_s:g}s")

    def _file(self, rival: Rival, limit_s: float | None) -> Path:
        path = self._path(rival, limit_s)
        return path.with_name(path.name + ".json")

    def _definition(self, rival: Rival, limit_s: float | None) -> Any:
        settings = asdict(rival.planner(limit_s))  # type: ignore[call-overload]
        return json.loads(
            readable_text(json_values({"configuration": self.document, "settings": settings, "seed": SEED}))
        )

    def _missing(self, rival: Rival, limit_s: float | None) -> bool:
        if self.only and rival.name not in self.only:
            return False
        path = self._file(rival, limit_s)
        return not path.exists() or json.loads(path.read_text())["definition"] != self._definition(rival, limit_s)

    def _ended_earlier(self, rival: Rival, limit_s: float) -> bool:
        """Whether a run with less time ended by itself: more would change nothing."""
        for path in self._file(rival, limit_s).parent.glob(f"{self._path(rival, None).name}-*s.json"):
            run = json.loads(path.read_text())
            same = run["definition"] == self._definition(rival, run["limit_s"])
            if run["rival"] == rival.name and run["limit_s"] < limit_s and same and not run["time_limited"]:
                return True
        return False

    def _prepare(self) -> None:
        if self._problem is not None:
            return
        built = build_problem(load_config(ROOT / self.instance.config, self.instance.overrides))
        self._problem = built.problem
        found = bound(built.problem)
        self._bound_s = found.bound_s
        for folder in (self.out / "instances", self.out / "runs" / self.instance.name):
            folder.mkdir(parents=True, exist_ok=True)
        write_text(self.out / "instances" / f"{self.instance.name}.json", readable_text(json_values({
            "name": self.instance.name, "words": self.instance.words, "problem_hash": problem_hash(built.problem),
            "bound_s": found.bound_s, "bound_status": found.status, "bound_solve_s": found.solve_s,
            "devices": built.problem.workload.device_count, "micro_batches": built.problem.workload.micro_batches,
            "ops": [len(program.ops) for program in built.problem.workload.programs],
            "tensors": [len(program.tensors) for program in built.problem.workload.programs],
            "capacity_bytes": built.problem.capacity_bytes(0), "notes": built.notes,
        })))  # fmt: skip
        for rival in HEURISTICS:
            result = self._record(rival, None)
            if result is not None and result.status.has_plan:
                self._seeds += (result,)

    def _record(self, rival: Rival, limit_s: float | None) -> PlanResult | None:
        """Plan, check, simulate, write; None if the planner failed."""
        assert self._problem is not None
        result, record, _ = planned(rival.planner(limit_s), self._problem, self._bound_s, self._seeds, SEED)
        if not self._missing(rival, limit_s):  # a heuristic that others need, recorded before
            return result
        write_text(self._file(rival, limit_s), readable_text(json_values(record | {
            "instance": self.instance.name,
            "rival": rival.name,
            "kind": rival.kind,
            "limit_s": limit_s,
            "bound_s": self._bound_s,
            "definition": self._definition(rival, limit_s),
            "provenance": provenance(seed=SEED, command_line=sys.argv[1:]),
            "date": f"{datetime.now(UTC):%Y-%m-%d}",
        })))  # fmt: skip
        limit = "" if limit_s is None else f" ({limit_s:g} s)"
        outcome = f"{record['step_s']:.5g} s" if record["step_s"] is not None else record["status"]
        print(f"{self.instance.name}, {rival.name}{limit}: {outcome} after {record['plan_s']:.1f} s",
              file=sys.stderr, flush=True)  # fmt: skip
        return result


if __name__ == "__main__":
    exit_with(main)
