"""The command line plans and runs a model, measures it, and names mistakes."""

import json
import re
import shlex
from pathlib import Path

import pytest

from tmojax import read_plan, read_problem
from tmojax.check import check
from tmojax.execute.__main__ import main
from tmojax.problem.io import problem_hash

ROOT = Path(__file__).parents[3]


def command_of_the_document() -> list[str]:
    """The arguments that docs/run-a-plan.md shows."""
    text = (ROOT / "docs" / "run-a-plan.md").read_text()
    (block,) = re.findall(r"^```sh\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    return shlex.split(block.replace("\\\n", ""))[4:]


@pytest.mark.long
def test_the_command_of_the_document_runs_measures_and_writes(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    assert main([*command_of_the_document(), "--out", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert printed.count("step ") >= 2 and "predicted ms" in printed
    assert printed.splitlines()[-1] == str(tmp_path)
    for counted, planned in re.findall(r": (\d+) bytes at most, planned (\d+)", printed):
        assert 0 < int(counted) <= int(planned)
    problem, plan = read_problem(tmp_path / "problem.json"), read_plan(tmp_path / "plan.json")
    assert plan.problem_hash == problem_hash(problem) and check(problem, plan.schedule).valid
    traces = [json.loads((tmp_path / f"{name}.json").read_text())["traceEvents"] for name in ("predicted", "measured")]
    slices = [[e for e in events if e["ph"] == "X" and e["pid"] <= 4] for events in traces]
    rows = [{(e["pid"], e["tid"], e["name"]) for e in found if e["cat"] != "segment"} for found in slices]
    assert rows[0] == rows[1] and rows[0]
    assert any(e["cat"] == "segment" for e in slices[1]) and "gpu0: " in printed and " programs for " in printed
    assert all((tmp_path / f"{name}.svg").stat().st_size > 1000 for name in ("predicted", "measured"))
    # Durations were measured on this computer, so the prediction is of this computer's size.
    (step_line,) = re.findall(r"^step +([\d.]+) +([\d.]+) ", printed, re.MULTILINE)
    assert 0.01 < float(step_line[0]) / float(step_line[1]) < 10
    measured = read_problem(tmp_path / "problem.measured.json")
    assert measured.workload.duration_source.startswith("measured")


def test_mistakes_have_exit_code_2(tmp_path, capsys):
    quickstart = str(ROOT / "configs" / "runs" / "quickstart.toml")
    assert main([quickstart, "--steps", "0"]) == 2
    assert "--steps: 0 must be at least 1" in capsys.readouterr().err
    assert main([str(ROOT / "configs" / "runs" / "prototype.toml")]) == 2
    assert 'workload.kind: only a "model" can be executed' in capsys.readouterr().err
