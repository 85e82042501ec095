"""The gradient planner, the same with parts taken out, and other searches, in the same planning time. See README.md.

Each (instance, variant, seed) is one file, written when it is complete, and not made again while its definition is the
same; so a run that was stopped goes on where it was.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from experiments.ablation.evolution import Evolution
from experiments.ablation.table import write_tables
from experiments.ablation.variants import Annealing, NoGradient, NoSearch, Variant
from experiments.quality.rivals import HEURISTICS
from experiments.quality.run import HERE as QUALITY
from experiments.quality.run import LIMIT_S, SUITE, Case
from experiments.recorded import exit_with, parsed, planned
from tmojax.build import build_problem
from tmojax.errors import InputError
from tmojax.planners.base import Planner, PlanResult
from tmojax.planners.gradient import Gradient
from tmojax.planners.local_search import SearchSettings
from tmojax.problem import Problem
from tmojax.problem.strict_json import readable_text, write_text
from tmojax.report.provenance import provenance
from tmojax.report.summary import json_values

HERE = Path(__file__).resolve().parent
# With something left above the best heuristic when they were chosen, then without.
INSTANCES = (
    "prototype-4gpu-sync-k1-f2",
    "dlrm-4gpu-k4-f1.33",
    "harmony-gpt2-xl-4gpu-k4-f2",
    "harmony-gpt2-xl-4gpu-one-on-x1-k4-f1.5",
    "pipeline-4gpu-nvlink-gpipe-k4-f3",
    "gpt2-1gpu-k4-f3",
    "gpt2-4gpu-k1-f1.33",
    "synthetic-8gpu-sockets-sync-k1-f1.5",
    "resnet50-4gpu-k1-f2",
    "convnext-4gpu-k4-f2",
    "vit-b16-4gpu-k4-f3",
    "g10-bert-128-4gpu-roofline-k1-f2",
    "bert-large-4gpu-k4-f2",
    "prototype-4gpu-k16-f3",
    "prototype-4gpu-half-sync-k4-f3",
    "gpt2-4gpu-half-k4-f2",
    "harmony-bert-large-4gpu-k4-f2",
)
QUICK_INSTANCES = ("prototype-4gpu-sync-k1-f2",)
SEEDS = (0, 1, 2)
QUICK = Gradient(restarts=1, steps=40, roundings=2, search=SearchSettings(evaluations=6))
QUICK_S = 1.0  # CPU seconds of a rival in a quick run

Record = dict[str, Any]


# The gradient planner comes first: how long it takes with the first seed is what all others get.
RIVALS: dict[str, Callable[[Gradient, float], Variant]] = {
    "no-gradient": lambda planner, budget_s: NoGradient("no-gradient", budget_s, planner),
    "no-search": lambda planner, budget_s: NoSearch("no-search", budget_s, planner),
    "evolution": lambda planner, budget_s: Evolution("evolution", budget_s),
    "annealing": lambda planner, budget_s: Annealing("annealing", budget_s),
}


def main() -> int:
    arguments = _arguments()
    out: Path = arguments.out
    if not arguments.table:
        names = arguments.instance or (QUICK_INSTANCES if arguments.quick else INSTANCES)
        cases = [_Ablation(name, out, arguments.quick) for name in names]
        cases.sort(key=lambda case: case.effort)
        for seed in SEEDS[: 1 if arguments.quick else arguments.seeds]:
            for case in cases:
                case.run(seed, arguments.variant)
    known = [_Ablation(name, out, arguments.quick) for name in (QUICK_INSTANCES if arguments.quick else INSTANCES)]
    mistakes = write_tables(
        [case.fact() for case in known if case.quality is not None],
        [json.loads(path.read_text()) for path in sorted((out / "runs").glob("*/*.json"))],
        out,
        HERE / "README.md" if out == HERE / "results" else None,
    )
    print("\n".join(mistakes) or f"tables and figures in {out}; every plan is valid")
    return 1 if mistakes else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="experiments.ablation.run", description=__doc__)
    parser.add_argument("--instance", action="append", default=[], choices=INSTANCES, metavar="NAME",
                        help="only this instance (repeatable)")  # fmt: skip
    parser.add_argument("--variant", action="append", default=[], choices=("gradient", *RIVALS), metavar="NAME",
                        help="only this variant (repeatable)")  # fmt: skip
    parser.add_argument("--seeds", type=int, choices=range(1, len(SEEDS) + 1), default=len(SEEDS), help="how many")
    return parsed(parser, HERE / "results", "one instance with little effort")


class _Ablation:
    """One instance. Bound and size are those of the quality experiment; problem and heuristics are made when the first
    missing file needs them."""

    def __init__(self, name: str, out: Path, quick: bool) -> None:
        self.name, self.out = name, out
        self.planner = QUICK if quick else Gradient()
        self.quick = quick
        self.quality = Case(SUITE / f"{name}.toml", QUALITY / "results", LIMIT_S)
        if not self.quality.known():
            raise InputError(f"{name}: no bound yet; sh experiments/quality/run.sh --instance {name} --rival keep-all")
        self.problem: Problem | None = None
        self.seeds: tuple[PlanResult, ...] = ()

    def fact(self) -> Record:
        """What the quality experiment knows of it."""
        return json.loads(self.quality.fact_file().read_text())

    @property
    def effort(self) -> tuple[float, str]:
        """Small instances first: ops of a micro-batch on all GPUs."""
        fact = self.fact()
        return fact["gpus"] * max(fact["ops"]), self.name

    def run(self, seed: int, wanted: list[str]) -> None:
        """Make the files of a seed that are missing; the gradient planner with the first seed says how long."""
        self._record("gradient", self.planner, SEEDS[0])
        budget_s = self._budget_s()
        for variant in ("gradient", *RIVALS):
            if wanted and variant not in wanted:
                continue
            if variant == "gradient":
                self._record(variant, self.planner, seed)
            else:
                self._record(variant, RIVALS[variant](self.planner, budget_s), seed)

    def _budget_s(self) -> float:
        spent_s = json.loads(self._file("gradient", SEEDS[0]).read_text())["plan_cpu_s"]
        return round(min(spent_s, QUICK_S) if self.quick else spent_s, 2)

    def _record(self, variant: str, planner: Planner, seed: int) -> None:
        """Plan, judge and write, unless that has been done."""
        path = self._file(variant, seed)
        settings = asdict(planner)  # type: ignore[call-overload]
        definition = json.loads(
            readable_text(json_values({"instance": self.quality.digest, "settings": settings, "seed": seed}))
        )
        if path.exists() and json.loads(path.read_text())["definition"] == definition:
            return
        self._build()
        assert self.problem is not None
        bound_s = self.fact()["bound_s"]
        result, record, cpu_s = planned(planner, self.problem, bound_s, self.seeds, seed)
        found = provenance(seed=seed, command_line=())
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, readable_text(json_values(record | {
            "instance": self.name,
            "variant": variant,
            "seed": seed,
            "start_step_s": min((known.step_s for known in self.seeds), default=None),
            "plan_cpu_s": cpu_s,
            "compile_s": result.compile_s if result is not None else 0.0,
            "definition": definition,
            "commit": found["git_commit"],
            "machine": {"cpu_count": found["cpu_count"], "platform": found["platform"], **found["versions"]},
            "date": f"{datetime.now(UTC):%Y-%m-%d}",
        })))  # fmt: skip
        outcome = f"{100 * (record['step_s'] / bound_s - 1):.2f} %" if record["valid"] else record["status"]
        print(f"{self.name}, {variant}, seed {seed}: {outcome}, {cpu_s:.1f} s", file=sys.stderr, flush=True)

    def _build(self) -> None:
        if self.problem is not None:
            return
        begin = time.process_time()
        self.problem = build_problem(self.quality.config).problem
        for rival in HEURISTICS:  # in their order: each may start from those before
            found = rival.planner(None).plan(self.problem, seed=SEEDS[0], seeds=self.seeds)
            self.seeds += (found,) if found.status.has_plan else ()
        print(f"{self.name}: heuristics, {time.process_time() - begin:.1f} s", file=sys.stderr, flush=True)

    def _file(self, variant: str, seed: int) -> Path:
        return self.out / "runs" / self.name / f"{variant}-{seed}.json"


if __name__ == "__main__":
    exit_with(main)
