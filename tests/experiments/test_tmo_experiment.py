"""The experiment on TMO's mechanisms on a tiny network: every planner, resumed, and its tables."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CASES = ("gpt2-medium-1.33-k1", "gpt2-medium-1.33-k4", "gpt2-medium-2-k1")


def run(out: Path, *more: str) -> subprocess.CompletedProcess[str]:
    planners = tomllib.loads((ROOT / "configs/runs/tmo.toml").read_text())["planners"]
    place = {planner.get("name", planner["kind"]): number for number, planner in enumerate(planners)}
    small = (
        "workload.sizes={layers=2, width=64, heads=2, sequence=64, vocabulary=256}",
        f"planners.{place['local-search']}.search={{evaluations=6}}",
        f"planners.{place['gradient']}.search={{evaluations=6}}",
        f"planners.{place['gradient']}.restarts=1",
        f"planners.{place['gradient']}.steps=40",
        f"planners.{place['gradient']}.roundings=2",
    )
    command = [sys.executable, "experiments/tmo/run.py", "--out", str(out)]
    for override in small:
        command += ["-o", override]
    return subprocess.run([*command, *more], cwd=ROOT, capture_output=True, text=True, timeout=500)


@pytest.mark.long
def test_every_planner_on_a_tiny_network_and_resumption(tmp_path: Path) -> None:
    done = run(tmp_path, "--case", CASES[0], "--case", CASES[1])
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [json.loads((tmp_path / "rows" / f"{name}.json").read_text()) for name in CASES[:2]]
    for row in rows:
        assert not row["mistakes"]
        plans = {plan["planner"]: plan for plan in row["plans"]}
        assert {"oblivious-fair", "tmo-disjoint", "tmo-ordered", "tmo", "gradient"} <= plans.keys()
        assert all(plan["step_s"] >= row["bound_s"] * (1 - 1e-9) for plan in plans.values() if plan["valid"])
        assert plans["gradient"]["valid"]
    table = (tmp_path / "table.md").read_text()
    assert "2 of 45 rows" in table and "| gpt2-medium | 1.33 x | 4 |" in table and "| 1.33 x | 1 | 1 |" in table
    assert (tmp_path / "table.svg").read_text().startswith("<?xml")

    # Without the searches a complete row stays, a missing one is made without them and completed later.
    quick = run(tmp_path, "--case", CASES[0], "--case", CASES[2], "--no-search")
    assert quick.returncode == 0 and f"{CASES[0]}: done before" in quick.stderr
    third = tmp_path / "rows" / f"{CASES[2]}.json"
    assert "gradient" not in {plan["planner"] for plan in json.loads(third.read_text())["plans"]}
    assert "| gpt2-medium | 2 x | 1 |" in (tmp_path / "table.md").read_text()
    assert run(tmp_path, "--case", CASES[2]).returncode == 0
    assert "gradient" in {plan["planner"] for plan in json.loads(third.read_text())["plans"]}

    # A run that was stopped after the first row makes only the second one.
    first, second = (tmp_path / "rows" / f"{name}.json" for name in CASES[:2])
    kept = first.read_bytes()
    second.unlink()
    resumed = run(tmp_path, "--footprint", "1.33", "--micro-batches", "1", "--case", CASES[0])
    assert resumed.returncode == 0, resumed.stderr
    assert f"{CASES[0]}: done before" in resumed.stderr and not second.exists()
    assert first.read_bytes() == kept


@pytest.mark.long
def test_no_row_left_and_bad_override(tmp_path: Path) -> None:
    none = run(tmp_path, "--case", "no-such-row")
    assert none.returncode == 2 and "gpt2-medium-1.33-k1" in none.stderr and "Traceback" not in none.stderr
    wrong = run(tmp_path, "--case", CASES[0], "-o", "workload.batchh=3")
    assert wrong.returncode == 2 and "workload.batchh" in wrong.stderr and "Traceback" not in wrong.stderr
