"""The coordination experiment on a tiny transformer: every planner, resumed, and its tables."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CASES = ("prototype-all-1.33-k1-full", "prototype-all-3-k1-full")


def run(out: Path, *more: str) -> subprocess.CompletedProcess[str]:
    config = tomllib.loads((ROOT / "configs/runs/coordination.toml").read_text())
    place = {planner["kind"]: number for number, planner in enumerate(config["planners"])}
    small = (
        "workload.layers=2",
        f"planners.{place['local-search']}.search={{evaluations=6}}",
        f"planners.{place['gradient']}.search={{evaluations=6}}",
        f"planners.{place['gradient']}.steps=40",
        f"planners.{place['gradient']}.roundings=2",
    )
    command = [sys.executable, "experiments/coordination/run.py", "--out", str(out)]
    for name in CASES:
        command += ["--case", name]
    for override in small:
        command += ["-o", override]
    return subprocess.run([*command, *more], cwd=ROOT, capture_output=True, text=True, timeout=500)


@pytest.mark.long
def test_every_planner_on_a_tiny_step_and_resumption(tmp_path: Path) -> None:
    done = run(tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = {name: json.loads((tmp_path / "rows" / f"{name}.json").read_text()) for name in CASES}
    for row in rows.values():
        assert not row["mistakes"]
        plans = {plan["planner"]: plan for plan in row["plans"]}
        assert {"oblivious-fair", "budget-milp", "ratio-sweep", "local-search", "gradient"} <= plans.keys()
        best_s = min(plan["step_s"] for plan in row["plans"] if plan["valid"] and not plan["search"])
        for plan in row["plans"]:
            if plan["valid"]:
                assert plan["step_s"] >= row["bound"]["step_s"] * (1 - 1e-9)
            if plan["search"]:
                assert plan["valid"] and plan["step_s"] <= best_s * (1 + 1e-12)
    table = (tmp_path / "table.md").read_text()
    assert table.count("| prototype | all | 1.33 | 1 | full |") >= 3
    assert (tmp_path / "table.svg").read_text().startswith("<?xml")

    # A run that was stopped after the first row makes only the second one.
    first, second = (tmp_path / "rows" / f"{name}.json" for name in CASES)
    kept, again = first.read_bytes(), second.read_bytes()
    second.unlink()
    resumed = run(tmp_path)
    assert resumed.returncode == 0, resumed.stderr
    assert f"{CASES[0]}: done before" in resumed.stderr and f"{CASES[1]}: done before" not in resumed.stderr
    assert first.read_bytes() == kept
    before, after = json.loads(again), json.loads(second.read_text())
    assert [p["step_s"] for p in before["plans"]] == [p["step_s"] for p in after["plans"]]


@pytest.mark.long
def test_unknown_case_and_bad_override(tmp_path: Path) -> None:
    unknown = run(tmp_path, "--case", "no-such-row")
    assert unknown.returncode == 2 and "no-such-row" in unknown.stderr and "Traceback" not in unknown.stderr
    wrong = run(tmp_path, "-o", "workload.layerz=3")
    assert wrong.returncode == 2 and "workload.layerz" in wrong.stderr and "Traceback" not in wrong.stderr
