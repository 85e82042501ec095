"""Selections for the timing of a relaxed plan: what each GPU may use of the links, and decisions that fit."""

from types import SimpleNamespace

import numpy as np
import pytest
from planner_cases import BOTH, cases, transformer

from tmojax.cost import relax_problem
from tmojax.planners.gradient import steps_for
from tmojax.planners.selection import guide_of, link_limits, select, selections
from tmojax.planners.workbench import Workbench
from tmojax.problem import Action
from tmojax.relax.decisions import Choice, Rest
from tmojax.relax.decode import DoesNotFit

GB = 1e9


def relaxed(model, *, moved_gb=None, phase=None):
    """The end of one restart in which no GPU stalls; moved_gb [gpu]: goes out evenly in the first half of the time."""
    gpus, slots = np.asarray(model.slot_s).shape
    end_s = np.cumsum(np.asarray(model.slot_s), axis=1)
    out = np.zeros((1, gpus, slots))
    if moved_gb is not None:
        out[0] = np.minimum(2 * end_s / end_s[:, -1:], 1.0) * np.asarray(moved_gb)[:, None]
    count = np.asarray(model.size_gb).shape[1]
    return SimpleNamespace(
        slot_end_s=end_s[None], out_gb=out, in_gb=np.zeros((1, gpus, slots)),
        phase=np.zeros((1, gpus)) if phase is None else np.asarray(phase)[None], start_share=np.zeros((1, gpus)),
        step_s=np.ones(1), memory_price_s_per_byte=np.ones((1, gpus, slots)) * 1e-12,
        choice=np.full((1, gpus, count, 3), 1 / 3),
    )  # fmt: skip


def shared(limits):
    """The limits on links that several GPUs share: those behind the GPU's own way out and in."""
    return limits[2:]


def test_a_link_that_nobody_uses_is_divided_equally():
    problem = transformer("prototype-4gpu-12.5", factor=1.4)
    bench = Workbench(problem)
    model = relax_problem(problem, [bench.view(d) for d in range(4)])
    found = link_limits(model, relaxed(model), 0)
    assert len(found) == 4
    for limits in found:
        assert [limit.uses for limit in limits] == [(True, False), (False, True)] * 2
        for limit in shared(limits):
            np.testing.assert_allclose(limit.rate, 12.5 * GB / 4, rtol=1e-4)
            assert limit.rate.shape == bench.view(0).slot_s.shape


def test_what_others_move_is_taken_and_own_copies_stay():
    problem = transformer("prototype-4gpu-12.5", factor=1.4)
    bench = Workbench(problem)
    model = relax_problem(problem, [bench.view(d) for d in range(4)])
    period_s = float(np.asarray(model.slot_s)[0].sum())
    moved_gb = np.array([0.25 * 12.5 * period_s, 0.0, 0.0, 0.0])
    found = link_limits(model, relaxed(model, moved_gb=moved_gb), 0)
    for direction in range(2):
        mean = [np.average(shared(limits)[direction].rate, weights=bench.view(0).slot_s) for limits in found]
        # Out: a quarter of the link goes to the first GPU, and everybody has a quarter of the rest. In: all is free.
        expected = [(0.25 + 0.75 / 4) * 12.5, *[0.75 / 4 * 12.5] * 3] if direction == 0 else [12.5 / 4] * 4
        np.testing.assert_allclose(np.array(mean) / GB, expected, rtol=0.02)


def test_a_gpu_that_starts_later_has_what_is_left_then():
    problem = transformer("prototype-4gpu-12.5", factor=1.4)
    bench = Workbench(problem)
    model = relax_problem(problem, [bench.view(d) for d in range(4)])
    period_s = float(np.asarray(model.slot_s)[0].sum())
    moved_gb = np.array([0.25 * 12.5 * period_s, 0.0, 0.0, 0.0])
    solution = relaxed(model, moved_gb=moved_gb, phase=[0.0, 0.0, 0.5, 1.0])
    at_once, later, after_one = (shared(link_limits(model, solution, 0)[gpu])[0].rate for gpu in (1, 2, 3))
    assert not np.allclose(at_once, later, rtol=0.01)
    np.testing.assert_allclose(at_once, after_one, rtol=1e-3)  # a whole period later


CASES = cases()


@pytest.mark.parametrize("name", sorted(CASES))
def test_selections_fit_and_are_the_same_every_time(name):
    problem = CASES[name]
    bench = Workbench(problem)
    views = [bench.view(d) for d in range(bench.device_count)]
    model = relax_problem(problem, views)
    found, limited = selections(bench, model, relaxed(model), None)
    assert not limited and found
    for decisions, starts in found:
        assert starts == (0.0,) * bench.device_count
        assert not isinstance(bench.lists(decisions), DoesNotFit) or bench.lists(decisions).host_memory >= 0
        for view, decision in zip(views, decisions, strict=True):
            again = decision.choice == Choice.RECOMPUTE
            assert (view.may_recompute | ~view.needed)[again].all()
            assert view.may_offload[decision.choice == Choice.OFFLOAD].all()
            if Action.RECOMPUTE not in problem.actions:
                assert not again[view.needed].any()
            if Action.OFFLOAD not in problem.actions:
                assert not (decision.choice == Choice.OFFLOAD).any()
    repeated, _ = selections(Workbench(problem), model, relaxed(model), None)
    assert len(repeated) == len(found)
    for (first, _), (second, _) in zip(found, repeated, strict=True):
        assert all(a.same_as(b) for a, b in zip(first, second, strict=True))


def test_where_everything_fits_nothing_moves():
    problem = transformer("prototype-4gpu-12.5", factor=0.9)
    bench = Workbench(problem)
    model = relax_problem(problem, [bench.view(d) for d in range(4)])
    decision = select(bench, 0, link_limits(model, relaxed(model), 0)[0], None).decision
    assert decision is not None
    assert (decision.choice[bench.view(0).needed] == Choice.KEEP).all()
    assert (decision.state_out == Rest.ON_DEVICE).all()


def test_there_is_none_where_nothing_fits():
    problem = transformer("prototype-4gpu-12.5", factor=30.0)
    bench = Workbench(problem)
    model = relax_problem(problem, [bench.view(d) for d in range(4)])
    assert selections(bench, model, relaxed(model), None) == ([], False)


def test_faster_links_are_used_for_less_recomputation():
    problem = transformer("prototype-4gpu-12.5", factor=2.0, actions=BOTH)
    bench = Workbench(problem)
    model, view = relax_problem(problem, [bench.view(d) for d in range(4)]), bench.view(0)
    limits = link_limits(model, relaxed(model), 0)[0]
    again = []
    for factor in (0.01, 1.0, 100.0):
        decision = select(bench, 0, limits, None, rate_factor=factor).decision
        assert decision is not None
        dropped = (decision.choice == Choice.RECOMPUTE) & view.needed
        again.append(float(view.recompute_s[dropped].sum()))
    assert again[0] >= again[1] >= again[2] and again[0] > again[2]


def test_a_guide_weighs_candidates_by_price_and_doubt():
    problem = transformer("prototype-4gpu-12.5", factor=1.4)
    bench = Workbench(problem)
    model = relax_problem(problem, [bench.view(d) for d in range(4)])
    guide = guide_of(bench, model, relaxed(model), [])
    view = bench.view(0)
    assert guide.plans == () and list(guide.weight) == [0]
    assert guide.weight[0].shape == view.tensor.shape and (guide.weight[0] >= 0).all()
    # All prices alike and all choices open: what is larger and idle for longer weighs more.
    product = view.size_bytes * (view.idle_to - view.idle_from)
    assert np.argmax(guide.weight[0]) in np.flatnonzero(product >= 0.5 * product.max())


def test_large_models_take_fewer_steps():
    def model(gpus, slots, candidates):
        return SimpleNamespace(gpus=gpus, slots=slots, size_gb=np.zeros((gpus, candidates)))

    assert steps_for(model(4, 160, 500), 1500) == 1500
    assert 600 <= steps_for(model(4, 160, 1800), 1500) < 1500
    assert steps_for(model(8, 160, 5000), 1500) == 600
    assert steps_for(model(8, 160, 5000), 40) == 40  # never more than asked for
    assert steps_for(model(1, 10, 0), 1500) == 1500
