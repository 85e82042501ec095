"""Steps whose ops are joined between transfer points: fewer programs, the same numbers, the planned bytes."""

import json
from dataclasses import replace

import jax
import numpy as np
import pytest
from steps import identical, largest_difference, perceptron, plan, planned

from tmojax import InputError
from tmojax.execute import MeasuredTimes, PlannedStep, compare, segments_text, write_measured_trace
from tmojax.problem import PLAIN, Kind
from tmojax.simulate import simulate

# Float32: what is fused across ops is rounded less often, and sums are taken in another order.
TOLERANCE = 2e-5
PLANS = [("keep-all",), ("offload-all",), ("recompute-all",), ("offload-all", "keep-all", "sqrt-n", "recompute-all")]


@pytest.fixture(scope="module")
def case():
    return perceptron()


@pytest.fixture(scope="module")
def op_by_op(case):
    step = planned(case, case.problem(), plan(case.problem(), "keep-all"))
    result = step.step(case.batches(), gradients=True)
    return result, step.state()


def unmoved(case, step, batches):
    """The state after a step by the same programs, one after another, on device 0 alone, with nothing moved or freed.

    Collectives are left out: all devices get the same batches, and the mean of equal numbers is the number.
    """
    functions = case.compiled.functions[0]
    values = {copy[1:3]: np.array(array) for copy, array in step._table.items() if copy[0] == 0}
    inputs = functions.traced.state_tree.num_leaves
    for micro_batch, batch in enumerate(batches):
        for position, leaf in enumerate(jax.tree.leaves(batch), inputs):
            tensor = functions.tensor_of[functions.graph.arguments[position]]
            values[tensor, micro_batch] = leaf
    for segment in step.segments[0]:
        program = segment.compiled
        operands = [jax.device_put(values[i], jax.devices()[0]) for i in program.inputs]
        outputs = program.executable(*operands)
        values.update(zip((*program.updates, *program.writes), map(np.array, outputs), strict=False))
    return values


@pytest.mark.parametrize("names", PLANS, ids="+".join)
def test_joined_ops_give_the_numbers_of_the_ops(case, op_by_op, names):
    expected, state = op_by_op
    problem = case.problem()
    step = planned(case, problem, plan(problem, *names), "joined")
    result = step.step(case.batches(), gradients=True)
    assert largest_difference(step.state()[:2], state[:2]) < TOLERANCE
    for device, segments in enumerate(step.segments):
        assert largest_difference(result.gradients[device], expected.gradients[0]) < TOLERANCE
        rows = problem.workload.program(device)
        computed = [node.index for segment in segments for node in segment.nodes]
        assert computed == [n.index for n in step._lists[device].nodes.values() if n.kind is Kind.COMPUTE]
        assert len(segments) < len(computed) and len(rows.ops) > 0
    assert result.loss == pytest.approx(expected.loss, rel=1e-6)


@pytest.mark.parametrize("name", ["keep-all", "offload-all", "recompute-all", "ratio-sweep"])
def test_the_same_programs_with_nothing_moved_give_the_same_bits(case, name):
    problem = case.problem()
    step = planned(case, problem, plan(problem, name), "joined")
    batches = [case.batches()[0]] * 4
    expected = unmoved(case, step, batches[0])
    step.step(batches)
    found = {copy[1:3]: array for copy, array in step._table.items() if copy[0] == 0 and copy[4] == PLAIN}
    assert len(found) > 12
    assert all(np.array(array).tobytes() == expected[place].tobytes() for place, array in found.items())


def test_equal_segments_are_one_program(case):
    """Micro-batches and devices share what is traced; a second plan of the same step compiles nothing that is there."""
    problem = case.problem()
    first = planned(case, problem, plan(problem, "keep-all"), "joined")
    compiled = len(case.compiled.compiler(0)._executables)
    again = planned(case, problem, plan(problem, "keep-all"), "joined")
    assert len(case.compiled.compiler(0)._executables) == compiled
    executables = [segment.compiled.executable for own in first.segments for segment in own]
    assert {id(e) for e in executables} == {id(s.compiled.executable) for own in again.segments for s in own}
    assert len({id(e) for e in executables}) < len(executables) * 3 / 4


def test_a_joined_step_is_measured_traced_and_described(case, tmp_path):
    problem = case.problem()
    schedule = plan(problem, "keep-all")
    step = planned(case, problem, schedule, "joined")
    result = step.step(case.batches(), measure=True)
    times = MeasuredTimes(problem, schedule, result)
    found = {row.category: row for row in compare(problem, schedule, simulate(problem, schedule), times)}
    assert all(found[category].measured_s > 0 for category in ("forward", "backward", "optimizer", "step"))
    longest = max(step.segments[0], key=lambda segment: len(segment.nodes))
    starts, ends = (times.start_s[0][list(longest.instructions)], times.end_s[0][list(longest.instructions)])
    assert (starts[1:] == ends[:-1]).all() and starts[0] < ends[-1]
    write_measured_trace(tmp_path / "trace.json", problem, schedule, times)
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    joined = [e for e in events if e.get("cat") == "segment" and e["pid"] == 1]
    assert len(joined) == sum(len(segment.nodes) > 1 for segment in step.segments[0])
    assert max(len(e["args"]["ops"]) for e in joined) == len(longest.nodes)
    assert all(e["args"]["temporary_bytes"] >= 0 for e in joined)
    text = segments_text(problem, step.segments)
    assert f"gpu0: {len(step.segments[0])} programs for " in text and len(text.splitlines()) == 4


def test_room_joins_more_ops_and_is_planned(case, op_by_op):
    """An op of a plan with room may be joined with others whose tensors the plan has freed by then."""
    counts = []
    for room_bytes in (0, case.footprint_bytes // 4):
        problem = replace(case.problem(1.3), workload=case.compiled.workload_with_room(room_bytes))
        step = planned(case, problem, plan(problem, "keep-all"), "joined")
        result = step.step(case.batches(), gradients=True)
        assert largest_difference(result.gradients[3], op_by_op[0].gradients[0]) < TOLERANCE
        for memories in result.memory:
            assert all(
                size <= count.planned_bytes[at] for count in memories for at, size in count.counted_bytes.items()
            )
        counts.append(len(step.segments[0]))
    assert counts[1] < counts[0] / 2
    with pytest.raises(InputError, match="room_bytes: -1 must be at least 0"):
        case.compiled.workload_with_room(-1)


def test_an_unknown_setting(case):
    problem = case.problem()
    with pytest.raises(InputError, match='segments: \'layers\' must be "joined" or "ops"'):
        PlannedStep(case.compiled, problem, plan(problem, "keep-all"), segments="layers")


def test_a_failing_joined_step_leaves_no_half_state(case):
    problem = case.problem()
    step = planned(case, problem, plan(problem, "keep-all"), "joined")
    before = step.state()
    batches = case.batches()
    with pytest.raises(InputError):
        step.step(batches[:1])
    assert identical(step.state(), before)
