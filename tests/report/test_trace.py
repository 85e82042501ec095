"""The trace is well-formed, and its numbers are those of the simulation."""

import itertools
import json
from collections import defaultdict

import pytest
import report_example as example

from tmojax.errors import InputError
from tmojax.problem import Kind, keep_all_footprint_bytes
from tmojax.report.memory_use import peak_by_kind, read_memory_use
from tmojax.report.trace import trace, write_trace
from tmojax.simulate import simulate


@pytest.fixture(scope="module", params=[(1, 3, 1), (2, 3, 2), (4, 5, 3, 170_000_000)], ids=str)
def simulated(request):
    problem = example.problem(*request.param)
    schedule = example.schedule(problem)
    return problem, schedule, simulate(problem, schedule, record=True)


def test_slices_of_a_row_never_overlap_and_every_instruction_is_there(simulated):
    problem, schedule, simulation = simulated
    events = trace(problem, schedule, simulation)["traceEvents"]
    rows = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            assert event["dur"] >= 0
            rows[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    for slices in rows.values():
        slices.sort()
        assert all(end <= start + 1e-9 for (_, end), (start, _) in itertools.pairwise(slices))
    names = {(e["pid"], e["tid"]) for e in events if e["name"] == "thread_name"}
    assert set(rows) <= names
    computed = ("forward", "backward", "optimizer", "recompute")
    computes = sum(int((instructions["kind"] == Kind.COMPUTE).sum()) for instructions in schedule.lists)
    assert sum(e["ph"] == "X" and e["cat"] in computed for e in events) == computes
    assert max(e["ts"] + e["dur"] for e in events if e["ph"] == "X") == pytest.approx(simulation.step_s * 1e6, abs=2e-3)


def test_counters_rise_in_time_and_stay_within_their_limits(simulated):
    events = trace(*simulated)["traceEvents"]
    counters = defaultdict(list)
    for event in events:
        if event["ph"] == "C":
            counters[event["name"]].append((event["ts"], event["args"]))
    assert {"memory gpu0", "memory host"} <= set(counters)
    for samples in counters.values():
        times = [ts for ts, _ in samples]
        assert times == sorted(set(times))
        for _, args in samples:
            if "used_bytes" in args:
                assert isinstance(args["used_bytes"], int)
                assert 0 <= args["used_bytes"] <= args["capacity_bytes"]
            else:
                assert args["rate_bytes_per_s"] <= args["bandwidth_bytes_per_s"] * (1 + 1e-9)


def test_recomputations_are_marked_and_names_are_readable(simulated):
    events = [e for e in trace(*simulated)["traceEvents"] if e["ph"] == "X"]
    assert any(e["name"] == "recompute h0.gelu #0" and e["cat"] == "recompute" for e in events)
    assert any(e["name"] == "fwd h1.mlp #0" for e in events)
    assert any(e["name"] == "out h0.z #0" and e["args"]["size_bytes"] == 10_000_000 for e in events)


def test_file_is_the_same_trace(simulated, tmp_path):
    write_trace(tmp_path / "trace.json", *simulated)
    assert json.loads((tmp_path / "trace.json").read_text()) == trace(*simulated)
    assert [p.name for p in tmp_path.iterdir()] == ["trace.json"]


def test_unrecorded_simulation_is_refused():
    problem = example.problem()
    schedule = example.schedule(problem)
    with pytest.raises(InputError, match="record=True"):
        trace(problem, schedule, simulate(problem, schedule))


def test_keep_all_peak_is_the_footprint():
    problem = example.problem()
    schedule = example.schedule(problem, offload=False, recompute=False)
    peak = peak_by_kind(problem, schedule)
    assert peak[0].sum() == keep_all_footprint_bytes(problem.workload, 0) == 128_000_000
    # Weights 3 x 8, optimizer state 3 x 8, sums 3 x 4 MB; at the top of backward all z and y, one dy and workspace.
    assert peak[0].tolist() == [24e6, 24e6, 17e6, 60e6, 0, 3e6, 0]
    assert peak[2].tolist() == [0, 0, 0, 0, 4e6, 0, 0]


def test_memory_over_time_never_exceeds_the_peak_by_position(simulated):
    problem, schedule, simulation = simulated
    peak = peak_by_kind(problem, schedule).sum(axis=1)
    for use in read_memory_use(problem, schedule, simulation):
        assert 0 <= use.total_bytes.min() and use.total_bytes.max() <= peak[use.memory]
        assert (use.bytes_by_kind >= 0).all()
