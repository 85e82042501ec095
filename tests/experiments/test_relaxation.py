"""The relaxation experiment on a tiny transformer: plans are drawn, estimated, compared, and not drawn again."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROBLEM = "prototype-all-2-k1-half"


def run(out: Path) -> subprocess.CompletedProcess[str]:
    config = tomllib.loads((ROOT / "configs/runs/coordination.toml").read_text())
    place = {planner["kind"]: number for number, planner in enumerate(config["planners"])}
    command = [sys.executable, "experiments/relaxation/run.py", "--out", str(out), "--problem", PROBLEM, "--plans", "3"]
    for override in ("workload.layers=2", f"planners.{place['local-search']}.search={{evaluations=6}}"):
        command += ["-o", override]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=500)


@pytest.mark.long
def test_plans_are_estimated_and_kept(tmp_path: Path) -> None:
    done = run(tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    sampled = tmp_path / "plans" / f"{PROBLEM}.json"
    plans = json.loads(sampled.read_text())
    kinds = [plan["kind"] for plan in plans["plans"]]
    assert kinds == sorted(kinds, reverse=True) and set(kinds) == {"near", "contended"}
    for plan in plans["plans"]:
        if plan["kind"] == "near":
            assert plan["step_s"] <= 1.1 * plans["best_known_s"]
        else:
            assert plan["step_s"] > 1.1 * plan["alone_s"]
    relaxed = tmp_path / "estimates" / f"{PROBLEM}-relaxed.json"
    assert len(json.loads(relaxed.read_text())["step_s"]) == len(kinds)
    assert "rank correlation" in (tmp_path / "comparison.md").read_text()

    kept, estimate = sampled.read_bytes(), json.loads(relaxed.read_text())["step_s"]
    relaxed.unlink()
    assert run(tmp_path).returncode == 0
    assert sampled.read_bytes() == kept
    assert json.loads(relaxed.read_text())["step_s"] == pytest.approx(estimate, rel=1e-6)
