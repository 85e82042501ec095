"""The script for GPUs runs on a CPU from end to end, in all its forms."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.long
def test_the_script_runs_and_records(tmp_path):
    environment = os.environ | {"PYTHON": sys.executable}
    command = ["sh", "experiments/gpu/run.sh", "--out", str(tmp_path), "--steps", "2", "--planners", "offload-all"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "results.json").read_text())
    runtime, jitted, ordinary = found["rows"]
    assert [row["form"] for row in found["rows"]] == ["runtime", "jitted", "ordinary"]
    assert runtime["loss"] == pytest.approx(ordinary["loss"], rel=1e-3)
    assert jitted["loss"] == pytest.approx(ordinary["loss"], rel=1e-3)
    assert 0 < runtime["counted_bytes"] <= runtime["planned_bytes"] <= runtime["capacity_bytes"]
    assert any("compiled for" in line for line in jitted["verification"])  # or why it is not
    assert all(row["step_s"] > 0 for row in found["rows"])
    assert runtime["predicted_s"] > 0 and "backward" in runtime["categories"]
    assert done.stdout == (tmp_path / "table.md").read_text()
    assert {"measured.json", "predicted.json", "problem.measured.json"} <= {path.name for path in tmp_path.iterdir()}
