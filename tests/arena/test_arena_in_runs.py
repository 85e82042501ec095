"""What a run says about arenas: summary and table, against a placement that is checked."""

from __future__ import annotations

import json

import pytest

from tmojax.arena import find_faults, place
from tmojax.check import check
from tmojax.problem.io import read_plan, read_problem
from tmojax.run import main

CONFIG = """
seed = 0
micro_batches = 2
actions = ["offload", "recompute"]
[workload]
kind = "synthetic"
layers = 3
tokens = 1024
width = 256
compute_s = 0.002
parameters = 1000000
[machine]
preset = "prototype-4gpu-12.5"
[capacity]
footprint_factor = 1.4
[[planners]]
kind = "keep-all"
[[planners]]
kind = "offload-all"
[[planners]]
kind = "oblivious"
[output]
jitter_samples = 2
jitter = 0.05
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    config = folder / "small.toml"
    config.write_text(CONFIG)
    assert main([str(config), "--out", str(folder / "runs")]) == 0
    return next((folder / "runs").iterdir())


def test_the_summary_has_the_arena_of_every_valid_plan(run):
    problem = read_problem(run / "problem.json")
    planners = {entry["planner"]: entry for entry in json.loads((run / "summary.json").read_text())["planners"]}
    assert planners["keep-all"]["arena_bytes"] == {} and planners["keep-all"]["arena_over_peak"] is None
    for name in ("offload-all", "oblivious-fair"):
        entry, schedule = planners[name], read_plan(run / "plans" / f"{name}.json").schedule
        peaks = check(problem, schedule).peak_bytes
        assert set(entry["arena_bytes"]) == {"gpu0", "gpu1", "gpu2", "gpu3"}
        for memory, arena in place(problem, schedule).items():
            assert find_faults(arena.blocks, arena.offsets, alignment_bytes=arena.alignment_bytes) == []
            assert peaks[memory] <= entry["arena_bytes"][memory]
            assert arena.bound_bytes <= entry["arena_bytes"][memory] <= 1.03 * peaks[memory]
        shares = [size / peaks[memory] - 1 for memory, size in entry["arena_bytes"].items()]
        assert entry["arena_over_peak"] == max(shares)


def test_the_report_shows_the_arena_beside_the_peak(run):
    page = (run / "report.html").read_text()
    assert "over peak" in page and "arena" in page
    phases = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    assert any(entry.get("phase") == "arena" for entry in phases)
