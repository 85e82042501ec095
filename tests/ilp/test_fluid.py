"""The fluid selection model: what it claims is what the simulator measures where its assumptions hold."""

import numpy as np
import pytest
from random_steps import random_problem

from tmojax.bounds.highs import SolverStatus
from tmojax.ilp.fluid import PathRates, solve_fluid
from tmojax.ilp.solver import SolverSettings
from tmojax.importers.synthetic import SyntheticTransformer, synthetic_transformer
from tmojax.problem import Action, Device, Link, Machine, Memory, MemoryKind, Problem, Route, keep_all_footprint_bytes
from tmojax.problem.step_view import view_step
from tmojax.relax.coordinate import assemble, together
from tmojax.relax.decisions import Choice
from tmojax.relax.decode import DeviceList, DoesNotFit, decode
from tmojax.simulate import simulate

RATE, GPUS = 12.5e9, 4
FULL, SHARE = PathRates(RATE, RATE), PathRates(RATE / GPUS, RATE / GPUS)


def transformer(micro_batches: int, factor: float) -> Problem:
    workload = synthetic_transformer(SyntheticTransformer(), GPUS, micro_batches)
    memories = [
        Memory(f"gpu{g}", MemoryKind.DEVICE, int(keep_all_footprint_bytes(workload, 0) / factor)) for g in range(GPUS)
    ]
    memories.append(Memory("host", MemoryKind.HOST, 10**13))
    routes = [Route(g, GPUS, (0,), (2 * g,)) for g in range(GPUS)] + [
        Route(GPUS, g, (1,), (2 * g + 1,)) for g in range(GPUS)
    ]
    machine = Machine(
        "shared path", tuple(memories), (Link("out", RATE), Link("in", RATE)),
        tuple(f"{way}{g}" for g in range(GPUS) for way in ("out", "in")), tuple(routes),
        tuple(Device(f"gpu{g}", "gpu", g, GPUS) for g in range(GPUS)),
    )  # fmt: skip
    return Problem("synthetic", workload, machine, frozenset({Action.OFFLOAD, Action.RECOMPUTE}))


def solve(problem: Problem, **options):
    return solve_fluid(view_step(problem, 0), capacity_bytes=problem.capacity_bytes(0), **options)


def in_lock_step_s(problem: Problem, decision) -> float:
    lists = [decode(problem, view_step(problem, device), decision) for device in range(GPUS)]
    assert all(isinstance(found, DeviceList) for found in lists)
    return simulate(problem, assemble(problem, lists, together(problem))).step_s


def test_lock_step_model_predicts_the_simulation():
    problem = transformer(8, 3.0)
    found = solve(problem, rates=SHARE)
    assert found.answer.status in (SolverStatus.OPTIMAL, SolverStatus.GAP_REACHED)
    assert in_lock_step_s(problem, found.decision) == pytest.approx(found.objective_s, rel=0.02)


def test_offload_only_in_lock_step_is_the_published_case():
    # Design section 6: every GPU alone, in lock-step, takes 0.821 s a micro-batch.
    problem = transformer(1, 1.33)
    found = solve(problem, rates=SHARE, allow_recompute=False)
    assert found.objective_s == pytest.approx(0.821, rel=0.01)
    assert in_lock_step_s(problem, found.decision) == pytest.approx(0.821, rel=0.01)


def test_planners_order_and_bounds():
    problem = transformer(8, 3.0)
    alone = solve(problem, rates=FULL)
    budget = solve(problem, rates=FULL, budget=SHARE)
    lock_step = solve(problem, rates=SHARE)
    assert alone.objective_s <= budget.objective_s <= lock_step.objective_s
    for found, options in (
        (alone, dict(rates=FULL)),
        (budget, dict(rates=FULL, budget=SHARE)),
        (lock_step, dict(rates=SHARE)),
    ):
        relaxed = solve(problem, **options, relax=True)
        assert relaxed.bound_s <= found.objective_s * (1 + 1e-6) and found.bound_s <= found.objective_s * (1 + 1e-9)
        assert relaxed.answer.status is SolverStatus.OPTIMAL and found.answer.gap <= 5e-3
    view = view_step(problem, 0)
    moved = view.micro_batches * view.size_bytes[budget.decision.choice == Choice.OFFLOAD].sum()
    assert moved * GPUS <= RATE * budget.objective_s * (1 + 1e-6)


def test_shares_and_decision_agree():
    problem = transformer(2, 2.0)
    found, view = solve(problem, rates=FULL), view_step(problem, 0)
    total = found.kept + found.offloaded + found.recomputed
    assert total[view.needed] == pytest.approx(1.0, abs=1e-5) and (total <= 1 + 1e-5).all()
    assert np.array_equal(found.offloaded > 0.5, found.decision.choice == Choice.OFFLOAD)
    assert found.answer.rows > 0 and found.figures["solver"].startswith("HiGHS") and found.figures["fluid_steps"] <= 160
    for i in np.flatnonzero(found.recomputed > 0.5):
        for source in view.recompute_inputs[i]:
            assert total[source] == pytest.approx(1.0, abs=1e-5)


def test_budget_counts_what_others_take():
    problem = transformer(1, 1.33)
    plain = solve(problem, rates=FULL, budget=SHARE, allow_recompute=False)
    taken = solve(problem, rates=FULL, budget=SHARE, budget_taken_bytes=1e9, allow_recompute=False)
    assert taken.objective_s == pytest.approx(plain.objective_s + 1e9 * GPUS / RATE, rel=1e-2)
    half_duplex = PathRates(float("inf"), float("inf"), RATE / GPUS)
    both = solve(problem, rates=FULL, budget=half_duplex, allow_recompute=False)
    assert both.objective_s == pytest.approx(2 * plain.objective_s, rel=1e-2)


def test_statuses_are_honest():
    problem = transformer(8, 3.0)
    nothing = solve(problem, rates=FULL, allow_offload=False, allow_recompute=False)
    assert nothing.answer.status is SolverStatus.INFEASIBLE and nothing.decision is None
    assert nothing.objective_s == float("inf")
    rushed = solve(problem, rates=FULL, settings=SolverSettings(time_limit_s=1e-3))
    assert rushed.answer.status is SolverStatus.TIME_LIMIT


@pytest.mark.parametrize("seed", range(12))
def test_decisions_of_random_steps_are_well_formed(seed):
    problem = random_problem(seed, factor=1.6)
    view = view_step(problem, 0)
    rate = min(link.bandwidth_bytes_per_s for link in problem.machine.links)
    found = solve(problem, rates=PathRates(rate, rate), settings=SolverSettings(time_limit_s=5.0))
    if found.decision is None:
        assert found.answer.status is SolverStatus.INFEASIBLE
        return
    assert not (found.decision.choice[~view.may_offload] == Choice.OFFLOAD).any()
    assert not (found.decision.choice[view.needed & ~view.may_recompute] == Choice.RECOMPUTE).any()
    assert not found.decision.state_out[~view.state_resting].any()
    assert isinstance(decode(problem, view, found.decision), DeviceList | DoesNotFit)


@pytest.mark.parametrize("seed", range(4))
def test_a_start_is_an_incumbent_of_the_same_claim(seed):
    """The optimum of a model is allowed in it: started from it, a search that stops at its first solution has it."""
    problem = random_problem(seed, factor=1.2)
    options = {"rates": PathRates(60.0, 60.0)}
    best = solve(problem, settings=SolverSettings(60.0, gap=0.0), **options)
    if best.decision is None:
        return
    again = solve(problem, settings=SolverSettings(60.0, gap=1e9), start=best.decision, **options)
    assert again.objective_s == pytest.approx(best.objective_s, rel=1e-5)
    assert again.decision.same_as(best.decision)
