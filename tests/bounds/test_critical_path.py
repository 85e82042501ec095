"""Longest paths over all devices: pipelines by hand, and never above what unlimited memory takes."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from shared_path_machine import shared_path

from tmojax.bounds import bound
from tmojax.bounds.critical_path import critical_paths, shortest
from tmojax.errors import InputError
from tmojax.importers.pipeline import pipeline_workload
from tmojax.importers.synthetic import SyntheticTransformer, synthetic_transformer
from tmojax.planners.simple import KeepAll
from tmojax.problem import Action, Collective, CollectiveKind, Op, Phase, Problem, Program, Tensor, TensorKind, Workload

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
