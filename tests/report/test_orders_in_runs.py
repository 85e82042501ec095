"""A run whose fastest plan follows an offered order: report, files and the checker's command say so."""

import json
import subprocess
import sys

import pytest
from offered_orders import layers_with_weights, offering

from tmojax.check import check
from tmojax.importers.micro_batch_orders import BreadthFirst
from tmojax.planners.simple import KeepAll
from tmojax.problem.in_order import in_order
from tmojax.problem.io import read_plan, read_problem, write_problem
from tmojax.report.decisions import read_decisions
from tmojax.run import main

CONFIG = """
[workload]
kind = "file"
path = "problem.json"

[[micro_batch_orders]]

[[planners]]
kind = "ratio-sweep"

[[planners]]
kind = "local-search"
search = { evaluations = 40 }
"""


def test_the_order_is_named_everywhere(tmp_path, capsys):
    problem = layers_with_weights(4)
    write_problem(tmp_path / "problem.json", problem)
    (tmp_path / "orders.toml").write_text(CONFIG)
    assert main([str(tmp_path / "orders.toml"), "--out", str(tmp_path / "runs")]) == 0
    printed = capsys.readouterr().out
    assert "micro-batches in the order breadth-first." in printed
    assert "Decisions (" in printed and ", micro-batches in the order breadth-first; number and bytes" in printed
    (folder,) = (tmp_path / "runs").iterdir()
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["gap"] >= 0
    for planner in summary["planners"]:
        assert planner["valid"] and planner["details"]["order"] == "breadth-first"
    offered = read_problem(folder / "problem.json")
    plan = read_plan(folder / "plans" / "ratio-sweep.json")
    assert plan.schedule.order == "breadth-first" and check(offered, plan.schedule).valid
    checked = subprocess.run(
        [sys.executable, "-m", "tmojax.check", str(folder / "plans" / "ratio-sweep.json")],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_idle_times_are_those_of_the_order():
    """From the forward of h1 to its backward, of one micro-batch. Micro-batch after micro-batch: three forwards, the
    loss and three backwards. Breadth-first: three forwards of h1 and four of h2 and h3 each; forward, loss and backward
    of h4 for four micro-batches; four backwards of h3 and h2 each. Ops take 1 s, and 1 ms to launch."""
    problem = offering(layers_with_weights(4), BreadthFirst()).with_device_capacity(10**6)
    for order, ops in (("default", 7), ("breadth-first", 31)):
        written = in_order(problem, order)
        kept = KeepAll().plan(written.problem)
        assert kept.schedule is not None
        (row,) = [row for row in read_decisions(problem, written.back(kept.schedule)) if row.name == "y*"]
        assert (row.action, row.share, row.most) == ("keep", 1.0, 5)
        assert row.idle_s == pytest.approx(1.001 * ops)
