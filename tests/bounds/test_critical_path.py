"""Longest paths over all devices: pipelines by hand, and never above what unlimited memory takes."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from shared_path_machine import shared_path

from tmojax.bounds import bound
from tmojax.bounds.critical_path import critical_paths, joint_paths, least_until, shortest
from tmojax.bounds.inputs import last_input_s, mean_first_input_s
from tmojax.errors import InputError
from tmojax.importers.pipeline import pipeline_workload
from tmojax.importers.synthetic import SyntheticTransformer, synthetic_transformer
from tmojax.planners.ratio import RatioSweep
from tmojax.planners.simple import KeepAll, OffloadAll, RecomputeAll
from tmojax.problem import (
    Action,
    Collective,
    CollectiveKind,
    Op,
    Phase,
    Problem,
    Program,
    Tensor,
    TensorKind,
    Workload,
    keep_all_footprint_bytes,
)

ACTIONS = frozenset({Action.OFFLOAD, Action.RECOMPUTE})


def passed_on(second_reads_first: bool = True) -> Problem:
    """GPU 0: a (2 s), then send 100 B, then b (3 s). GPU 1: c (1 s), receive, d (4 s) that reads what came. 50 B/s."""
    tensors = (Tensor("x", 100, TensorKind.ACTIVATION), Tensor("y", 10, TensorKind.ACTIVATION))
    first = Program("first", tensors, (
        Op("a", Phase.FORWARD, 2.0, writes=(0,)),
        Op("send", Phase.FORWARD, 0.0, reads=(0,), collective="send", recomputable=False),
        Op("b", Phase.BACKWARD, 3.0, reads=(0,), writes=(1,)),
    ))  # fmt: skip
    second = Program("second", tensors, (
        Op("c", Phase.FORWARD, 1.0, writes=(1,)),
        Op("receive", Phase.FORWARD, 0.0, writes=(0,), collective="send", recomputable=False),
        Op("d", Phase.BACKWARD, 4.0, reads=(0,) if second_reads_first else (1,)),
    ))  # fmt: skip
    sends = (Collective("send", CollectiveKind.BROADCAST, 100, (0, 1)),)
    workload = Workload("two stages", (first, second), (0, 1), 1, "synthetic", sends)
    return Problem("two stages", workload, shared_path(2, 10**6, 50.0, peers=True), ACTIONS)


def test_a_receiver_waits_for_the_sender():
    """a ends at 2 s, 100 bytes cross out and in at 50 B/s by 4 s, d ends at 8 s."""
    first, second = critical_paths(passed_on())
    assert first.before[0].tolist() == [0.0, 2.0] and first.after[0].tolist() == [8.0, 3.0]
    assert second.before[0].tolist() == [0.0, 4.0] and second.after[0].tolist() == [5.0, 4.0]
    assert first.total_s == second.total_s == 8.0
    assert bound(passed_on()).bound_s == pytest.approx(8.0)


def test_what_devices_wait_for_on_each_other_by_hand():
    """`send` starts 2 s after `a` does, and waits for nothing on GPU 1; `d` starts when it has ended, 2 s later, and
    `b` need not wait for it."""
    (paths,) = joint_paths(passed_on(), 4)
    assert paths.devices == (0, 1) and paths.later_s == (("send", 0.0),)
    assert paths.until_s[0].tolist() == [2.0, -np.inf] and paths.since_s[0].tolist() == [-np.inf, -np.inf]
    assert paths.until_s[1].tolist() == [-np.inf, -np.inf] and paths.since_s[1].tolist() == [-np.inf, 2.0]
    assert least_until(passed_on(), (1,), 2).tolist() == [5.0, 4.0]


def test_what_nobody_waits_for_is_not_on_the_path():
    """c and d need 5 s, a and the transfer 4 s, a and b 5 s."""
    first, second = critical_paths(passed_on(second_reads_first=False))
    assert max(first.total_s, second.total_s) == 5.0
    assert second.before[0].tolist() == [0.0, 1.0]


@settings(max_examples=20, deadline=None)
@given(st.sampled_from(["gpipe", "1f1b"]), st.integers(1, 4), st.integers(1, 5), st.floats(1e8, 1e12))
def test_no_path_is_longer_than_a_step_without_limits(order, stages, micro_batches, rate):
    spec = SyntheticTransformer(layers=4, tokens=64, sequence=64, width=64, parameters=0)
    workload = pipeline_workload(synthetic_transformer(spec, 1, micro_batches), stages, order)
    problem = Problem("pipeline", workload, shared_path(stages, 10**12, rate, peers=True), ACTIONS)
    step_s = KeepAll().plan(problem).step_s
    paths = critical_paths(problem)
    longest_s = max(path.total_s for path in paths)
    assert longest_s <= step_s * (1 + 1e-9)
    for path in paths:
        assert (path.before + path.after <= longest_s * (1 + 1e-9)).all()
        assert (np.diff(path.before, axis=1) > 0).all() and (np.diff(path.after, axis=1) < 0).all()
    if rate > 1e11:  # transfers take nearly nothing: the path is the step
        assert longest_s >= step_s * (1 - 1e-2)


def test_members_of_a_class_share_what_holds_for_all():
    first, second = critical_paths(passed_on())
    both = shortest([first, second])
    assert both.before[0].tolist() == [0.0, 2.0] and both.after[0].tolist() == [5.0, 3.0]


def test_a_circle_of_waits_is_told():
    tensors = (Tensor("x", 100, TensorKind.ACTIVATION),)

    def program(name, order):
        return Program(name, tensors, tuple(
            Op(c, Phase.FORWARD, 0.0, recomputable=False, collective=c) for c in order
        ))  # fmt: skip

    both = tuple(Collective(name, CollectiveKind.ALL_REDUCE, 100, (0, 1)) for name in "pq")
    workload = Workload("circle", (program("first", "pq"), program("second", "qp")), (0, 1), 1, "synthetic", both)
    problem = Problem("circle", workload, shared_path(2, 10**6, 50.0, peers=True), ACTIONS)
    with pytest.raises(InputError, match="wait for each other in a circle at"):
        critical_paths(problem)


@settings(max_examples=25, deadline=None)
@given(st.sampled_from(["gpipe", "1f1b"]), st.integers(2, 3), st.integers(1, 4), st.floats(1.05, 1.8),
       st.sampled_from([1e8, 1e9, 1e10]))  # fmt: skip
def test_plans_of_short_memory_are_not_below_the_bound(order, stages, micro_batches, factor, rate):
    """A stage that waits for another one may bring in its state meanwhile: the two times do not add up."""
    spec = SyntheticTransformer(layers=4, tokens=64, sequence=64, width=64, parameters=400_000, compute_s=1e-4)
    workload = pipeline_workload(synthetic_transformer(spec, 1, micro_batches), stages, order)
    capacity = int(max(keep_all_footprint_bytes(workload, device) for device in range(stages)) / factor)
    problem = Problem("pipeline", workload, shared_path(stages, capacity, rate, peers=True), ACTIONS)
    proved_s = bound(problem).bound_s
    for planner in (OffloadAll(), RecomputeAll(), RatioSweep()):
        result = planner.plan(problem)
        if result.schedule is not None:
            assert result.step_s >= proved_s * (1 - 1e-9)


def fed(gpus: int, **machine) -> Problem:
    """Every GPU: a (1 s) reads 100 B of input, b (2 s) another 50 B. 50 B/s from the host for all."""
    tensors = (Tensor("x", 100, TensorKind.INPUT), Tensor("y", 50, TensorKind.INPUT),
               Tensor("z", 10, TensorKind.ACTIVATION))  # fmt: skip
    program = Program("fed", tensors, (
        Op("a", Phase.FORWARD, 1.0, reads=(0,), writes=(2,)), Op("b", Phase.FORWARD, 2.0, reads=(1, 2)),
    ))  # fmt: skip
    workload = Workload("fed", (program,), (0,) * gpus, 1, "synthetic")
    return Problem("fed", workload, shared_path(gpus, 1000, 50.0, **machine), ACTIONS)


@pytest.mark.parametrize(("gpus", "step_s"), [(1, 5.0), (3, 11.0)])
def test_inputs_come_one_after_the_other(gpus, step_s):
    """x of all GPUs: 2 s each, then a and b, 3 s (5 s with one GPU, 9 s with three); all inputs, 3 s each, then b (5 s,
    11 s)."""
    problem = fed(gpus)
    paths = critical_paths(problem)
    assert max(path.total_s for path in paths) == 3.0
    assert last_input_s(problem, paths) == step_s
    assert bound(problem).bound_s == pytest.approx(step_s)
    assert mean_first_input_s(problem, tuple(range(gpus))) == pytest.approx(2.0 * (gpus + 1) / 2)
    plan = RatioSweep().plan(problem)
    assert plan.step_s >= step_s * (1 - 1e-9)


def test_inputs_that_could_come_another_way_do_not_count():
    problem = replace(fed(2, peers=True), actions=ACTIONS | {Action.PEER})
    assert last_input_s(problem, critical_paths(problem)) == 0.0 == mean_first_input_s(problem, (0, 1))
