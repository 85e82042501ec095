"""`--sweep`: one run for each value; what is taken over is said, and more memory is never slower."""

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from tmojax.check import check
from tmojax.errors import InputError
from tmojax.planners.base import PlanResult, Status
from tmojax.planners.simple import OffloadAll
from tmojax.problem.io import read_plan, read_problem
from tmojax.run import main
from tmojax.sweep import read_sweep

CONFIG = """
seed = 3
micro_batches = 2
actions = ["offload", "recompute"]
[workload]
kind = "synthetic"
layers = 3
[machine]
preset = "prototype-4gpu-12.5"
[capacity]
footprint_factor = 1.3
[output]
jitter_samples = 5
[[planners]]
kind = "offload-all"
[[planners]]
kind = "local-search"
search = {evaluations = 5}
"""


@pytest.fixture
def sweep(tmp_path, capfd, monkeypatch):
    monkeypatch.setattr("tmojax.session.draw", lambda report: {})  # figures are most of the time of so small a run

    def call(*arguments):
        config = tmp_path / "small.toml"
        config.write_text(CONFIG)
        code = main([str(config), "--out", str(tmp_path / "runs"), *arguments])
        out, err = capfd.readouterr()
        folder = Path(out.splitlines()[-1]) if out else None
        found = json.loads((folder / "sweep.json").read_text()) if folder else None
        return code, out, err, folder, found

    return call


def test_every_point_is_a_run_of_its_own_and_more_memory_is_never_slower(sweep):
    code, out, _, folder, found = sweep("--sweep", "capacity.footprint_factor=1.1,1.6,1.3,1000")
    assert code == 0 and found["schema"] == "tmojax-sweep-1" and found["key"] == "capacity.footprint_factor"
    points = found["points"]
    assert [point["value"] for point in points] == ["1.1", "1.6", "1.3", "1000"]  # as given
    assert "no schedule fits: op" in points[3]["failure"] and points[3]["step_s"] is None
    by_memory = sorted(points[:3], key=lambda point: point["capacity_bytes"])
    assert all(more["step_s"] <= less["step_s"] for less, more in pairwise(by_memory))
    for point in points[:3]:
        run = folder / point["run"]
        summary = json.loads((run / "summary.json").read_text())
        assert summary["step_s"] == point["step_s"] and (run / "report.html").is_file()
        problem = read_problem(run / "problem.json")
        assert problem.capacity_bytes(0) == point["capacity_bytes"][0]
        for plan in (run / "plans").iterdir():
            assert check(problem, read_plan(plan).schedule).valid
    assert out.splitlines()[0].startswith("  The best plan") or out.startswith("The best plan")
    assert (folder / "sweep.txt").read_text().strip() == "\n".join(out.splitlines()[:-1]).strip()


def test_what_a_point_has_not_found_itself_it_takes_over_and_says_so(sweep, monkeypatch):
    plan = OffloadAll.plan

    def only_in_little_memory(self, problem, *, seed=0, seeds=()):
        if problem.capacity_bytes(0) > 1.0e9:
            return PlanResult(self.name, Status.NOT_FOUND, message="too easy")
        return plan(self, problem, seed=seed, seeds=seeds)

    monkeypatch.setattr(OffloadAll, "plan", only_in_little_memory)
    one = 'planners=[{kind="offload-all"}]'
    code, out, err, folder, found = sweep("-o", one, "--sweep", "capacity.footprint_factor=1.1,1.2,1.6")
    assert code == 0
    roomy, middle, tight = found["points"]
    assert tight["taken_over_from"] is None
    for point in (roomy, middle):
        assert point["taken_over_from"] == "capacity.footprint_factor=1.6" and point["planner"] == "offload-all"
        assert point["step_s"] == tight["step_s"]
        run = folder / point["run"]
        assert (run / "plans" / "offload-all@1.6.json").is_file()
        best = json.loads((run / "summary.json").read_text())
        assert best["best"] == "offload-all@1.6"
        row = next(row for row in best["planners"] if row["planner"] == best["best"])
        assert row["message"] == "the plan of offload-all for capacity.footprint_factor=1.6"
        assert "taken over: the plan of offload-all" in (run / "report.html").read_text()
    assert "taken over: the plan of offload-all for capacity.footprint_factor=1.6" in err
    assert out.count("taken over from capacity.footprint_factor=1.6") == 2


def test_a_plan_found_here_counts_before_one_taken_over_that_is_as_fast(sweep, monkeypatch):
    plan = OffloadAll.plan

    def the_same_everywhere(self, problem, *, seed=0, seeds=()):
        tight = problem.with_device_capacity(min(problem.capacity_bytes(0), 10**9))
        return plan(self, tight, seed=seed, seeds=seeds)

    monkeypatch.setattr(OffloadAll, "plan", the_same_everywhere)
    one = 'planners=[{kind="offload-all"}]'
    code, out, _, folder, found = sweep("-o", one, "--sweep", "capacity.footprint_factor=1.1,1.2")
    assert code == 0 and "taken over from" not in out
    assert len({point["step_s"] for point in found["points"]}) == 1
    roomy = json.loads((folder / found["points"][0]["run"] / "summary.json").read_text())
    assert [row["planner"] for row in roomy["planners"]] == ["offload-all@1.2", "offload-all"]
    assert roomy["best"] == "offload-all"


def test_neighbours_of_other_bandwidths_exchange_their_plans(sweep, monkeypatch):
    plan, calls = OffloadAll.plan, []

    def only_at_the_last_point(self, problem, *, seed=0, seeds=()):
        calls.append(problem)
        if len(calls) < 3:
            return PlanResult(self.name, Status.NOT_FOUND)
        return replace(plan(self, problem, seed=seed, seeds=seeds), candidate=None)

    monkeypatch.setattr(OffloadAll, "plan", only_at_the_last_point)
    monkeypatch.setattr("tmojax.session.find_shortfall", lambda *_: None)
    one = 'planners=[{kind="offload-all"}]'
    rates = "machine.uplinks.path.rate=12.5 GB/s,25 GB/s,50 GB/s"
    code, _, _, folder, found = sweep("-o", one, "--sweep", rates)
    assert code == 0
    slow, middle, fast = found["points"]
    assert fast["taken_over_from"] is None
    for point in (slow, middle):
        assert point["taken_over_from"] == "machine.uplinks.path.rate=50 GB/s"
        # Its folder was written again.
        summary = json.loads((folder / point["run"] / "summary.json").read_text())
        assert summary["step_s"] == point["step_s"] and summary["best"] == "offload-all@50GBs"
    assert slow["step_s"] > middle["step_s"] > fast["step_s"]


def test_an_interrupted_sweep_writes_the_points_that_are_done(sweep, monkeypatch):
    plan = OffloadAll.plan

    def stop(self, problem, *, seed=0, seeds=()):
        if seeds:  # the second point starts with what is taken over
            raise KeyboardInterrupt
        return plan(self, problem, seed=seed, seeds=seeds)

    monkeypatch.setattr(OffloadAll, "plan", stop)
    code, _, _, _, found = sweep("--sweep", "capacity.footprint_factor=1.1,1.3,1.6")
    assert code == 130
    last, second, first = found["points"]
    assert first["step_s"] and not first["failure"]
    assert second["taken_over_from"] == "capacity.footprint_factor=1.6"
    assert last["failure"] == "not run" and last["run"] is None


def test_nothing_can_fit_anywhere(sweep):
    code, out, _, _, found = sweep("--sweep", "capacity.footprint_factor=900,1000")
    assert code == 3 and out.count("no schedule fits") == 2
    assert all("alone needs" in point["failure"] for point in found["points"])


@pytest.mark.parametrize(
    "text", ["micro_batches=two,3", "capacity.footprint_factor=0,1", "micro_batches=4", "seed", ""]
)
def test_mistakes_are_exit_2_before_anything_is_made(sweep, tmp_path, text):
    code, out, err, _, _ = sweep("--sweep", text)
    assert code == 2 and err.startswith("error: ") and not out
    assert not (tmp_path / "runs").exists()


def test_dry_run_is_for_one_problem(sweep):
    code, _, err, _, _ = sweep("--dry-run", "--sweep", "micro_batches=1,2")
    assert code == 2 and "--dry-run" in err


def test_values_are_toml_or_text():
    assert read_sweep("capacity.footprint_factor=1, 2.5") == ("capacity.footprint_factor", ["1", "2.5"])
    assert read_sweep("capacity.bytes=20 GiB, 24 GiB") == ("capacity.bytes", ["20 GiB", "24 GiB"])
    assert read_sweep('machine.preset="gh200","dgx1-v100x8"') == ("machine.preset", ["gh200", "dgx1-v100x8"])
    for wrong in ("seed=1,1", "seed=[1],[2]", "=1,2", "seed=1,,2"):
        with pytest.raises(InputError, match="--sweep"):
            read_sweep(wrong)
