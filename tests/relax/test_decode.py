"""Decoded lists are valid, fit, and fail only where nothing could fit."""

from dataclasses import replace

import numpy as np
import pytest
from random_steps import random_choice, random_problem, shared_path_machine

from tmojax.check import check
from tmojax.planners.simple import OffloadAll
from tmojax.problem import (
    Action,
    Kind,
    Lifetime,
    LinkPolicyKind,
    Op,
    Phase,
    Problem,
    Program,
    Tensor,
    TensorKind,
    Workload,
    keep_all_footprint_bytes,
)
from tmojax.problem.step_view import view_step
from tmojax.relax.coordinate import Coordination, assemble
from tmojax.relax.decisions import Choice, DeviceDecision, keep_everything
from tmojax.relax.decode import DeviceList, DoesNotFit, decode
from tmojax.simulate import simulate


def decoded(seed: int, factor: float, **options):
    """(problem, lists or None) of a random problem under random decisions, different on every device."""
    problem = random_problem(seed, factor=factor)
    rng = np.random.default_rng(seed)
    lists = []
    for device in range(problem.workload.device_count):
        view = view_step(problem, device)
        state_out = rng.choice([0, 1, 2], len(view.state_tensor)).astype(np.int8)
        decision = DeviceDecision(random_choice(view, rng), state_out)
        if seed % 3 == 0:
            decision = replace(decision, last_choice=random_choice(view, rng))
        if seed % 4 == 1:
            decision = replace(decision, first_choice=random_choice(view, rng))
        found = decode(problem, view, decision, **options)
        if isinstance(found, DoesNotFit):
            assert found.bytes_over > 0
            return problem, None
        lists.append(found)
    return problem, lists


@pytest.mark.parametrize("factor", [0.9, 1.0, 1.1, 1.25])
@pytest.mark.parametrize("options", [{}, {"release_at_once": True, "lookahead_runs": 3}], ids=["late", "at once"])
def test_decoded_lists_are_valid_and_do_not_deadlock(factor, options):
    decoded_any = 0
    for seed in range(30):
        problem, lists = decoded(seed, factor, **options)
        if lists is None:
            continue
        decoded_any += 1
        count = len(lists)
        for coordination in (
            Coordination((0.0,) * count),
            Coordination(tuple(0.3 * g for g in range(count)), LinkPolicyKind.FCFS),
            Coordination((0.0,) * count, LinkPolicyKind.PRIORITY, tuple(reversed(range(count)))),
        ):
            schedule = assemble(problem, lists, coordination)
            report = check(problem, schedule)
            assert report.valid, (seed, [v.message for v in report.violations[:3]])
            assert simulate(problem, schedule).step_s < float("inf"), seed
    assert decoded_any >= 2  # the test has substance at every factor


def test_what_fits_without_moving_is_not_moved():
    problem = random_problem(3, factor=0.5)
    view = view_step(problem, 0)
    decision = DeviceDecision(np.where(view.needed & view.may_offload, 1, 2 * ~view.needed).astype(np.int8),
                              np.zeros(len(view.state_tensor), bool))  # fmt: skip
    found = decode(problem, view, decision)
    assert not isinstance(found, DoesNotFit)
    assert found.moved_bytes[0] == 0
    assert not (found.rows["kind"] == Kind.OFFLOAD).any()


def test_does_not_fit_names_the_op_and_the_bytes_exactly():
    problem = random_problem(5, factor=1.0)
    view = view_step(problem, 0)
    decision = DeviceDecision(np.where(view.needed, 0, 2).astype(np.int8), np.zeros(len(view.state_tensor), bool))
    need = keep_all_footprint_bytes(problem.workload, 0)
    assert not isinstance(decode(problem, view, decision, capacity_bytes=need), DoesNotFit)
    failed = decode(problem, view, decision, capacity_bytes=need - 3)
    assert isinstance(failed, DoesNotFit)
    assert failed.bytes_over == 3


def test_the_first_micro_batch_may_decide_differently():
    """What is recomputed in the first one only runs twice in the first one only; a single one is the last one."""
    seen = 0
    for seed in range(20):
        problem = random_problem(seed, factor=0.5)
        view = view_step(problem, 0)
        keep = keep_everything(view)
        again = np.where(view.may_recompute & view.needed, Choice.RECOMPUTE, keep.choice).astype(np.int8)
        found = decode(problem, view, replace(keep, first_choice=again))
        assert isinstance(found, DeviceList)
        kept = decode(problem, view, keep)
        rows = [item.rows[item.rows["kind"] == Kind.COMPUTE]["micro_batch"] for item in (found, kept)]
        micro_batches = problem.workload.micro_batches
        counts, plain = (np.bincount(row, minlength=micro_batches) for row in rows)
        assert (counts[1:] == plain[1:]).all()
        if micro_batches == 1:
            assert (found.rows == kept.rows).all()
        elif (view.may_recompute & view.needed).any():
            seen += 1
            assert counts[0] > plain[0]
    assert seen >= 5


def test_what_comes_in_does_not_wait_for_all_that_leaves_by_hand():
    """Two updates of 60 and 40 bytes each, of which only one fits. As soon as `a` has left, at 3.602 s, there is room
    for `c`, 0.6 s; `b` leaves in the meantime; `d` has come at 4.602 s."""
    sizes = {"a": 60, "b": 40, "c": 60, "d": 40}
    tensors = tuple(Tensor(n, size, TensorKind.OPTIMIZER_STATE, Lifetime.STATE) for n, size in sizes.items())
    updates = tuple(
        Op(f"u{i}", Phase.OPTIMIZER, 1.0, updates=(i, i + 1), recomputable=False, step_op=True) for i in (0, 2)
    )
    forward = Op("f", Phase.FORWARD, 1.0, workspace_bytes=100, recomputable=False)
    workload = Workload("two", (Program("p", tensors, (forward, *updates)),), (0,), 1, "synthetic")
    problem = Problem("two", workload, shared_path_machine(1, 100), frozenset({Action.OFFLOAD}))
    plan = OffloadAll().plan(problem)
    rows = plan.schedule.lists[0]
    moved = [(Kind(row["kind"]), int(row["tensor"])) for row in rows if row["kind"] in (Kind.PREFETCH, Kind.RELEASE)]
    P, R = Kind.PREFETCH, Kind.RELEASE
    assert moved == [(P, 0), (P, 1), (R, 0), (P, 2), (R, 1), (P, 3), (R, 2), (R, 3)]
    assert check(problem, plan.schedule).valid
    assert plan.step_s == pytest.approx(4.602 + 1.001 + 1.0)
