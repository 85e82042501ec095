"""The quality experiment: its figures on runs made up by hand, and a quick run on a small instance."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def quality(monkeypatch):
    """The modules of the experiment, which stand outside of the package."""
    monkeypatch.syspath_prepend(str(ROOT))
    from experiments.quality import plots, rows, table

    yield rows, table, plots
    for name in [name for name in sys.modules if name.split(".")[0] == "experiments"]:
        sys.modules.pop(name)


def fact(micro_batches: int, unlimited_s: float = 0.9) -> dict:
    return {"definition": "d", "bound_s": 1.0, "unlimited_s": unlimited_s, "bound_status": "all parts solved",
            "gpus": 4, "micro_batches": micro_batches, "ops": [10], "footprint_bytes": 20,
            "capacity_bytes": 10, "commit": "0123456789"}  # fmt: skip


def run(instance: str, rival: str, step_s: float | None, definition: str = "d", **more) -> dict:
    return {"instance": instance, "rival": rival, "step_s": step_s, "valid": step_s is not None, "mistakes": [],
            "status": "feasible" if step_s else "no feasible plan found", "time_limited": False, "plan_s": 1.0,
            "plan_cpu_s": 1.0, "details": {}, "definition": {"instance": definition}, "commit": "0123456789",
            "date": "2026-01-01", "machine": {"cpu_count": 2, "platform": "Linux", "python": "3"}} | more  # fmt: skip


FACTS = {"a": fact(4), "b": fact(1), "c": fact(16), "d": fact(4)}
RUNS = [
    run("a", "keep-all", None), run("a", "ratio-sweep", 1.10), run("a", "tmo", 1.30), run("a", "gradient", 1.06),
    run("a", "cp-sat", 1.05), run("a", "improve", 1.07), run("a", "local-search", 1.10),
    run("b", "ratio-sweep", 1.20), run("b", "gradient", 1.20), run("b", "local-search", 1.15),
    run("c", "ratio-sweep", 1.02), run("c", "gradient", 1.01), run("c", "cp-sat", 1.01), run("c", "local-search", 1.02),
    run("d", "ratio-sweep", None), run("d", "gradient", None), run("d", "local-search", None),
]  # fmt: skip


def test_what_the_searches_have_to_show(quality):
    rows, _, _ = quality
    found = rows.rows_of(RUNS, FACTS, ["a", "b", "c", "d"])
    assert [row.best(rows.HEURISTIC_NAMES) for row in found] == ["ratio-sweep"] * 3 + [None]
    shown = rows.summarise(found, "gradient")
    assert (shown.planned, shown.valid, shown.slower, shown.open_ones) == (4, 3, 0, 2)
    assert shown.better == 0.5  # a, not b
    assert shown.closed == pytest.approx((0.04 / 0.10 + 0) / 2)
    assert shown.many == (pytest.approx((0.06 + 0.01) / 2), pytest.approx(0.06), "a")
    assert shown.one == (pytest.approx(0.2), pytest.approx(0.2), "b")
    assert shown.losses == pytest.approx({"a": 1.06 / 1.05 - 1, "c": 0.0}) and shown.as_good == 0.5
    assert rows.mistakes_of(found) == []


def test_a_weak_bound_is_no_headroom(quality):
    """10 % above the bound, but within 5 % of the time with unlimited memory."""
    rows, _, _ = quality
    (row,) = rows.rows_of(RUNS, {"a": fact(4, unlimited_s=1.06)}, ["a"])
    assert row.headroom == pytest.approx(0.10) and not row.is_open
    assert rows.summarise([row], "gradient").open_ones == 0


def test_nothing_was_run(quality):
    rows, table, _ = quality
    shown = rows.summarise(rows.rows_of([], FACTS, ["a"]), "gradient")
    assert (shown.better, shown.closed, shown.many, shown.losses, shown.as_good) == (None, None, None, {}, None)
    assert table.facts_line([], [], 4) == "No runs."


def test_mistakes_are_told(quality):
    rows, _, _ = quality
    wrong = [run("a", "ratio-sweep", 1.1), run("a", "gradient", 1.2), run("b", "local-search", 0.99),
             run("c", "tmo", None, mistakes=["the checker rejects the plan"])]  # fmt: skip
    told = rows.mistakes_of(rows.rows_of(wrong, FACTS, list(FACTS)))
    assert [text.split(":")[0] for text in told] == ["c, tmo", "a, gradient", "b, local-search"]
    assert "slower than ratio-sweep" in told[1] and "1.0000 % faster than the bound" in told[2]


def test_runs_of_an_earlier_definition_do_not_count(quality):
    rows, _, _ = quality
    old = [run("a", "ratio-sweep", 1.1, definition="earlier"), run("z", "ratio-sweep", 1.0)]
    (row,) = rows.rows_of(old, {"a": FACTS["a"]}, ["a", "b"])
    assert row.runs == {} and row.headroom is None


def test_tables(quality, tmp_path):
    _, table, _ = quality
    readme = tmp_path / "README.md"
    readme.write_text("before\n<!-- written by run.py: begin -->\nold\n<!-- written by run.py: end -->\nafter\n")
    assert table.write_tables(RUNS, FACTS, ["a", "b", "c", "d", "e"], tmp_path, readme) == []
    text = readme.read_text()
    assert text.startswith("before\n") and text.endswith("after\n") and "old" not in text
    assert "4 of 5 instances" in text and "above the bound on 2 of 4 instances, and on 2 of these" in text
    assert "| a | 10 | 2.00 x | 1 | -10.0 % | 10.0 % ratio-sweep | 10.0 % | 6.0 % | **5.0 %** cp-sat |" in text
    assert "| d | 10 | 2.00 x | 1 | -10.0 % |  | none | none |  |" in text
    assert (tmp_path / "gaps.svg").exists() and (tmp_path / "time.svg").exists()


def test_quality_over_time(quality):
    """Heuristics add up; a better plan counts only where it is the best so far, at its share of the CPU time."""
    rows, _, plots = quality
    runs = [run("a", "keep-all", None), run("a", "ratio-sweep", 1.5, plan_cpu_s=2.0), run("a", "tmo", 1.6),
            run("a", "gradient", 1.1, plan_s=20.0, plan_cpu_s=10.0, details={
                "improvements_over_time": [[4.0, 0, 1.55], [8.0, 32, 1.2], [16.0, 60, 1.15]]})]  # fmt: skip
    (row,) = rows.rows_of(runs, {"a": FACTS["a"]}, ["a"])
    seconds, gaps = zip(*plots.progress(row, "gradient"), strict=True)
    assert seconds == (3.0, 8.0, 12.0, 14.0)
    assert gaps == pytest.approx((0.5, 0.2, 0.15, 0.1))


def experiment(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "experiments.quality.run", *arguments]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=500, env=environment)


@pytest.mark.long
def test_an_instance_and_resumption(tmp_path: Path) -> None:
    name = "prototype-4gpu-k1-f1.33-offload"
    some = [word for rival in ("ratio-sweep", "gradient", "lockstep-milp") for word in ("--rival", rival)]
    quick = ("--quick", "--limit", "2", "--out", str(tmp_path), "--instance", name, *some)
    done = experiment(*quick)
    assert done.returncode == 0, done.stdout + done.stderr
    files = {path.stem: path for path in (tmp_path / "runs" / name).iterdir()}
    assert set(files) >= {"ratio-sweep", "gradient", "lockstep-milp"}
    fact = json.loads((tmp_path / "instances" / f"{name}.json").read_text())
    for path in files.values():
        found = json.loads(path.read_text())
        assert not found["mistakes"] and (not found["valid"] or found["step_s"] >= fact["bound_s"] * (1 - 1e-6))
    assert f"| {name} |" in (tmp_path / "table.md").read_text()

    kept = {path: path.read_bytes() for path in files.values()}
    files["ratio-sweep"].unlink()
    again = experiment(*quick)
    assert again.returncode == 0, again.stderr
    assert f"{name}, ratio-sweep" in again.stderr and f"{name}, gradient" not in again.stderr
    assert all(path.read_bytes() == kept[path] for path in kept if path.stem != "ratio-sweep")


@pytest.mark.long
def test_unknown_names(tmp_path: Path) -> None:
    for option in ("--instance", "--rival"):
        wrong = experiment(option, "nobody", "--out", str(tmp_path))
        assert wrong.returncode == 2 and "nobody" in wrong.stderr and "Traceback" not in wrong.stderr
    assert experiment("--quick").returncode == 2  # would replace the committed results
