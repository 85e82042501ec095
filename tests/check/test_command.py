"""`python -m tmojax.check`."""

from __future__ import annotations

import subprocess
import sys

import pytest
from small_plans import KEEP, SWAP
from two_gpu_plans import LOAN, VALID

from tmojax.check import PARAGRAPHS, Rule, check
from tmojax.check.__main__ import main
from tmojax.problem.io import PlanFile, problem_hash, write_plan, write_problem


def write_run(folder, plan, problem=None):
    """A run folder as `tmojax.run` lays it out; returns the plan's path."""
    (folder / "plans").mkdir()
    write_problem(folder / "problem.json", problem or plan.problem)
    path = folder / "plans" / "by-hand.json"
    write_plan(path, PlanFile(plan.schedule(), problem_hash(plan.problem), "by hand", "feasible"))
    return path


@pytest.mark.parametrize("name", VALID)
def test_a_valid_plan_exits_with_0(tmp_path, capsys, name):
    assert main([str(write_run(tmp_path, VALID[name]))]) == 0
    assert capsys.readouterr().out.startswith("valid: ")


def test_an_invalid_plan_exits_with_5_and_prints_every_violation(tmp_path, capsys):
    plan = KEEP
    for line in ("release a gpu0", "release b gpu0", "release x gpu0", "compute step"):
        plan = plan.replace(line)
    assert main([str(write_run(tmp_path, plan))]) == 5
    printed = capsys.readouterr().out
    violations = check(plan.problem, plan.schedule()).violations
    assert len(violations) == 4
    assert all(str(violation) in printed for violation in violations)


def test_a_reader_that_closes_the_pipe_is_no_error(tmp_path):
    command = [sys.executable, "-m", "tmojax.check", str(write_run(tmp_path, KEEP))]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        process.stdout.close()
        assert process.stderr.read() == "" and process.wait() == 0


def test_the_problem_may_be_named(tmp_path):
    path = write_run(tmp_path, SWAP)
    moved = (tmp_path / "problem.json").rename(tmp_path / "plans" / "other.json")
    assert main([str(path)]) == 2
    assert main([str(path), "--problem", str(moved)]) == 0


def test_a_plan_of_another_problem_exits_with_2(tmp_path, capsys):
    assert main([str(write_run(tmp_path, KEEP, problem=LOAN.problem))]) == 2
    assert "hash" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["", "{}", "[1]", "\x00"])
def test_an_unreadable_plan_exits_with_2(tmp_path, capsys, text):
    path = write_run(tmp_path, KEEP)
    path.write_text(text)
    assert main([str(path)]) == 2
    assert capsys.readouterr().err.startswith("error: ")


def test_a_missing_plan_exits_with_2(tmp_path):
    assert main([str(tmp_path / "nothing.json")]) == 2


def test_every_rule_has_its_paragraph():
    assert set(PARAGRAPHS) == set(Rule)


def test_long_reports_are_cut_for_people_and_complete_as_data():
    report = check(KEEP.problem, KEEP.replace("prefetch x host gpu0").schedule())
    count = len(report.violations)
    assert count >= 2
    assert f"and {count - 1} more" in report.text(limit=1)
    assert len(report.as_dict()["violations"]) == count
