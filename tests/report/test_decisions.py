"""Decisions read from lists are those that the example's schedules were written with."""

import pytest
import report_example as example

from tmojax.report.decisions import KEEP, OFFLOAD, RECOMPUTE, count_actions, read_decisions
from tmojax.report.wording import counted, listing, percent, ranges


def test_offload_and_recompute_are_found_and_layers_merged():
    problem = example.problem(2, 5, 3)
    rows = {(row.name, row.action): row for row in read_decisions(problem, example.schedule(problem))}
    assert set(rows) == {("h*.y", RECOMPUTE), ("h*.z", OFFLOAD), ("h*.y", KEEP), ("h*.z", KEEP)}
    offloaded = rows["h*.z", OFFLOAD]
    assert (offloaded.layers, offloaded.fewest, offloaded.most, offloaded.size_bytes) == ("0-3", 4, 4, 10_000_000)
    assert offloaded.devices == "all"
    assert offloaded.total_bytes == 40_000_000
    # Two GPUs share 10 GB/s: 10 MB take 2 ms each way; the gelu takes 0.3 ms again.
    assert offloaded.copy_s == pytest.approx(2e-3) and offloaded.again_s == pytest.approx(2e-3)
    # h0.z: last read by gelu of layer 0, next by its backward: eight forward and four backward ops in between.
    assert offloaded.idle_s == pytest.approx(4 * 2.3e-3 + 4 * 4e-3)
    assert offloaded.reason == "its copies fit into its idle time"
    recomputed = rows["h*.y", RECOMPUTE]
    assert recomputed.again_s == pytest.approx(0.3e-3) and recomputed.reason == "faster than its copies"
    assert rows["h*.z", KEEP].layers == "4" and rows["h*.z", KEEP].reason == "used again at once"


@pytest.mark.parametrize(
    ("offload", "recompute", "expected"),
    [
        (True, True, {RECOMPUTE: 2, OFFLOAD: 2, KEEP: 2}),
        (True, False, {OFFLOAD: 2, KEEP: 4}),
        (False, False, {KEEP: 6}),
    ],
)
def test_counts(offload, recompute, expected):
    problem = example.problem()
    assert count_actions(problem, example.schedule(problem, offload, recompute)) == expected


def test_words():
    assert [percent(x) for x in (0, 0.031, 0.0996, 0.42, 1.5)] == ["0 %", "3.1 %", "10 %", "42 %", "150 %"]
    assert [percent(x) for x in (-1e-12, 2e-4, -0.02)] == ["0 %", "0 %", "-2.0 %"]
    assert [listing(x) for x in ([], ["a"], ["a", "b"], ["a", "b", "c"])] == ["", "a", "a and b", "a, b and c"]
    assert [counted(n, "op") for n in (0, 1, 2)] == ["0 ops", "1 op", "2 ops"]
    assert ranges(["h0", "h2", "h1", "h5", "wte", "h1"]) == "h0-h2, h5, wte"
    assert ranges([""]) == ""
