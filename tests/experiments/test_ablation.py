"""The ablation: its figures on runs made up by hand, its searches on a small step, and a quick run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from tmojax.check import check
from tmojax.planners.gradient import Gradient, find_starts
from tmojax.planners.local_search import SearchSettings

ROOT = Path(__file__).parents[2]


@pytest.fixture
def ablation(monkeypatch):
    """The modules of the experiment, which stand outside of the package."""
    monkeypatch.syspath_prepend(str(ROOT))
    from experiments.ablation import evolution, plots, table, variants

    yield table, plots, variants, evolution
    for name in [name for name in sys.modules if name.split(".")[0] == "experiments"]:
        sys.modules.pop(name)


def fact(name: str, unlimited_s: float = 0.9) -> dict:
    return {"name": name, "definition": "d", "bound_s": 1.0, "unlimited_s": unlimited_s, "micro_batches": 4}


def run(instance: str, variant: str, step_s: float | None, seed: int = 0, definition: str = "d", **details) -> dict:
    if variant == "gradient":
        details = {"improvements_over_time": [[8.0, 40, 1.15], [20.0, 90, step_s]], "before_local_search_step_s": 1.15,
                   "after_local_search_step_s": step_s} | details  # fmt: skip
    else:
        details = {"curve": [[1.0, 1.18], [9.0, step_s]]} | details
    return {"instance": instance, "variant": variant, "seed": seed, "step_s": step_s, "valid": step_s is not None,
            "mistakes": [], "plan_s": 20.0, "plan_cpu_s": 10.0, "start_step_s": 1.2, "details": details,
            "definition": {"instance": definition}, "commit": "0123456789", "date": "2026-01-01",
            "machine": {"cpu_count": 2, "platform": "Linux x86_64", "python": "3"}}  # fmt: skip


FACTS = [fact("a"), fact("b", unlimited_s=1.19), fact("c")]
RUNS = [
    run("a", "gradient", 1.05), run("a", "no-gradient", 1.10),
    *(run("a", "evolution", step_s, seed) for seed, step_s in enumerate((1.2, 1.02, 1.04))),
    run("b", "gradient", 1.10), run("b", "no-gradient", 1.10), run("b", "annealing", 1.11),
    run("c", "gradient", 1.10),
    run("a", "annealing", 1.0, definition="earlier"),
]  # fmt: skip


def test_medians_and_duels(ablation):
    table, _, _, _ = ablation
    rows = table.rows_of(FACTS, RUNS)
    assert [row.name for row in rows] == ["a", "b"]  # nobody to compare with on c; the earlier run does not count
    a, b = rows
    assert (a.start, a.gap("gradient"), a.rounded) == tuple(pytest.approx(gap) for gap in (0.2, 0.05, 0.15))
    assert a.gap("evolution") == pytest.approx(0.04) and a.gap("annealing") is None
    assert a.closed("no-gradient") == pytest.approx(0.5)
    assert a.is_open and not b.is_open  # b: 1 % above the time with unlimited memory
    text = table.duel_table(rows)
    assert text[2] == "| no-gradient | 2 | 1 | 1 | 0 | 62 % | 50 % | 1, 1 | 75 % | 50 % |"
    assert text[4] == "| evolution | 1 | 0 | 0 | 1 | 75 % | 80 % | 1, 0 | 75 % | 80 % |"
    assert text[5] == "| annealing | 1 | 1 | 0 | 0 | 50 % | 45 % | 0, 0 | - | - |"
    assert table.mistakes_of(rows) == []


def test_the_fastest_plan_counts_not_the_most_robust(ablation):
    table, _, _, _ = ablation
    robust = {"fastest": {"step_s": 1.01}, "chosen": {"step_s": 1.02}}
    assert table.fastest_s(run("a", "gradient", 1.02, after_local_search_step_s=1.015, robust=robust)) == 1.01
    assert table.fastest_s(run("a", "gradient", 1.02, after_local_search_step_s=1.015, robust={"compared": 1})) == 1.015
    assert table.fastest_s(run("a", "evolution", 1.02)) == 1.02


def test_mistakes_are_told(ablation):
    table, _, _, _ = ablation
    wrong = [run("a", "gradient", 1.3), run("a", "evolution", 0.9), run("b", "gradient", 1.1),
             run("b", "annealing", 1.1) | {"mistakes": ["the checker rejects the plan"]}]  # fmt: skip
    told = table.mistakes_of(table.rows_of(FACTS, wrong))
    assert [text.split(":")[0] for text in told] == ["a, gradient", "a, evolution", "b, annealing, seed 0"]


def test_tables_and_figures(ablation, tmp_path):
    table, plots, _, _ = ablation
    readme = tmp_path / "README.md"
    readme.write_text("before\n<!-- written by run.py: begin -->\nold\n<!-- written by run.py: end -->\nafter\n")
    assert table.write_tables(FACTS, RUNS, tmp_path, readme) == []
    text = readme.read_text()
    assert text.startswith("before\n") and text.endswith("after\n") and "old" not in text
    assert r"| a \* | 4 | 10 | 20.00 % | 15.00 % | 5.00 % | 10.00 % |  | **4.00 %** |  | 1 to 3 |" in text
    assert "| b | 4 | 10 | 20.00 % | 15.00 % | **10.00 %** | **10.00 %** |  |  | 11.00 % | 1 |" in text
    assert (tmp_path / "gaps.svg").exists() and (tmp_path / "times.svg").exists()
    assert plots.progress(RUNS[0], 1.2) == [(0.0, 1.2), (4.0, 1.15), (10.0, 1.05)]
    assert plots.progress(run("a", "evolution", 1.19), 1.2) == [(0.0, 1.2), (1.0, 1.18), (9.0, 1.18)]
    assert table.write_tables([], [], tmp_path, None) == []


@pytest.fixture(scope="module")
def small():
    """A step with shared links and four GPUs, and where to start."""
    from planner_cases import transformer

    return transformer("prototype-4gpu-12.5", factor=1.4)


def test_variants_stop_by_the_clock_with_a_valid_plan(ablation, small):
    """Whatever little time there is: the plan of the start at least, and what was found is what is returned."""
    _, _, variants, _ = ablation
    little = Gradient(restarts=1, steps=20, roundings=2, finalists=1, search=SearchSettings(evaluations=4))
    for variant in (variants.NoGradient("no-gradient", 0.3, little), variants.Annealing("annealing", 0.3)):
        found = variant.plan(small)
        assert found.time_limited and check(small, found.schedule).valid
        curve = found.details["curve"]
        assert curve[-1][1] == found.step_s and all(a[1] > b[1] for a, b in pairwise(curve))


def test_vectors_of_the_evolution_strategy(ablation, small):
    """The vector of a plan stands for that plan, and any vector for some plan."""
    _, _, variants, evolution = ablation
    bench = variants.Watched(small)
    for start in find_starts(bench, (), most=9):
        space = evolution.Space(bench)
        vector = space.vector(start.candidate)
        decisions, starts = space.plan(vector)
        for decision, known in zip(decisions, start.candidate.decisions, strict=True):
            free = space.allowed[0, : len(decision.choice)][np.arange(len(known.choice)), known.choice]
            assert (decision.choice == known.choice)[free].all()
        assert starts == pytest.approx(start.candidate.coordination.start_share)
        decisions, starts = space.plan(np.random.default_rng(0).normal(0, 3, len(vector)))
        assert len(decisions) == len(starts) == bench.device_count and min(starts) >= 0


def test_evolution_finds_no_slower_plan(ablation, small):
    pytest.importorskip("cma")
    _, _, _, evolution = ablation
    found = evolution.Evolution("evolution", 0.5).plan(small)
    assert check(small, found.schedule).valid and found.step_s <= found.details["curve"][0][1]


def experiment(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "experiments.ablation.run", *arguments]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=500, env=environment)


@pytest.mark.long
def test_a_quick_run_and_resumption(tmp_path: Path) -> None:
    quick = ("--quick", "--out", str(tmp_path), "--variant", "no-gradient", "--variant", "annealing")
    done = experiment(*quick)
    assert done.returncode == 0, done.stdout + done.stderr
    (folder,) = (tmp_path / "runs").iterdir()
    files = {path.stem: path for path in folder.iterdir()}
    assert set(files) == {"gradient-0", "no-gradient-0", "annealing-0"}
    for path in files.values():
        found = json.loads(path.read_text())
        assert not found["mistakes"] and found["valid"]
    kept = {path: path.read_bytes() for path in files.values()}
    files["annealing-0"].unlink()
    again = experiment(*quick)
    assert again.returncode == 0, again.stderr
    assert "annealing, seed 0" in again.stderr and "no-gradient, seed 0" not in again.stderr
    assert all(path.read_bytes() == kept[path] for path in kept if path.stem != "annealing-0")


@pytest.mark.long
def test_unknown_names(tmp_path: Path) -> None:
    for option in ("--instance", "--variant"):
        wrong = experiment(option, "nobody", "--out", str(tmp_path))
        assert wrong.returncode == 2 and "nobody" in wrong.stderr and "Traceback" not in wrong.stderr
    assert experiment("--quick").returncode == 2  # would replace the committed results
