"""The comparison of integer programmes on its tiny instance: files, tables, resumption, wrong names."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RIVALS = ("ratio-sweep", "offload-all", "lockstep-milp", "tmo-milp")


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "experiments.ilp.run", *arguments]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, env=environment)


@pytest.mark.long
def test_tiny_instance_and_resumption(tmp_path: Path) -> None:
    quick = ("--quick", "--out", str(tmp_path), *(word for name in RIVALS for word in ("--rival", name)))
    done = run(*quick)
    assert done.returncode == 0, done.stdout + done.stderr
    files = {path.stem: path for path in (tmp_path / "runs" / "tiny").iterdir()}
    assert {"ratio-sweep", "offload-all", "lockstep-milp-1s", "tmo-milp-1s"} <= files.keys()
    for path in files.values():
        found = json.loads(path.read_text())
        assert not found["mistakes"] and found["valid"] and found["step_s"] >= found["bound_s"] * (1 - 1e-6)
    solve = json.loads(files["lockstep-milp-1s"].read_text())["details"]["solves"][0]
    assert solve["rows"] > 0 and solve["first_incumbent_s"] <= solve["solve_s"] and solve["time_limit_s"] == 1.0
    table = (tmp_path / "table.md").read_text()
    assert "| tiny | tmo-milp | 1 |" in table and "time limit of 1 s" in table
    assert (tmp_path / "table.svg").read_text().startswith("<?xml")

    kept = {name: path.read_bytes() for name, path in files.items()}
    files["tmo-milp-1s"].unlink()
    again = run(*quick)
    assert again.returncode == 0, again.stderr
    assert "tiny, tmo-milp (1 s)" in again.stderr and "tiny, lockstep-milp" not in again.stderr
    assert all(path.read_bytes() == kept[name] for name, path in files.items() if not name.startswith("tmo"))


@pytest.mark.long
def test_unknown_names(tmp_path: Path) -> None:
    for option in ("--instance", "--rival"):
        wrong = run(option, "nobody", "--out", str(tmp_path))
        assert wrong.returncode == 2 and "nobody" in wrong.stderr and "Traceback" not in wrong.stderr
    assert run("--quick").returncode == 2  # would replace the committed results
