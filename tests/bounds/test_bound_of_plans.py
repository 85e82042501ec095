"""The bound against coordinated plans of random synthetic transformers, where it is often reached."""

import numpy as np
import pytest
from shared_path_machine import shared_path

from tmojax.bounds import bound
from tmojax.ilp.fluid import PathRates, solve_fluid
from tmojax.ilp.solver import SolverSettings
from tmojax.importers.synthetic import SyntheticTransformer, synthetic_transformer
from tmojax.planners.simple import KeepAll
from tmojax.problem import Action, LinkPolicyKind, Problem, keep_all_footprint_bytes, largest_op_bytes
from tmojax.problem.step_view import view_step
from tmojax.relax.coordinate import assemble, staggered, together
from tmojax.relax.decode import DeviceList, decode
from tmojax.simulate import simulate, steady_state

RATE = 12.5e9


def random_transformer(seed: int) -> Problem:
    rng = np.random.default_rng(seed)
    gpus, micro_batches = int(rng.integers(1, 5)), int(rng.integers(1, 5))
    spec = SyntheticTransformer(
        layers=int(rng.integers(1, 5)), compute_s=float(rng.choice([0.03, 0.1, 0.2])),
        gradient_scale=float(rng.choice([0, 0.5, 1])), elementwise_share=float(rng.choice([0.03, 0.3])),
        parameters=int(rng.choice([0, 10**8])),
    )  # fmt: skip
    workload = synthetic_transformer(spec, gpus, micro_batches)
    most, least = keep_all_footprint_bytes(workload, 0), largest_op_bytes(workload, 0)[1]
    capacity = int(most - (most - least) * rng.uniform(0.1, 0.75))
    lane = float(rng.choice([0.0, RATE]))
    machine = shared_path(gpus, capacity, RATE, duplex=bool(rng.integers(2)), lane_bytes_per_s=lane, peers=True)
    actions = {Action.OFFLOAD} | ({Action.RECOMPUTE} if rng.integers(2) else set())
    return Problem("random transformer", workload, machine, frozenset(actions))


def plans(problem: Problem, shares, staggers):
    """Schedules of fluid selections with the given shares of the path, coordinated in several ways."""
    views = [view_step(problem, device) for device in range(problem.workload.device_count)]
    joint = any(link.name == "both" for link in problem.machine.links)
    for share in shares:
        rate = RATE / share
        found = solve_fluid(
            views[0], capacity_bytes=problem.capacity_bytes(0), settings=SolverSettings(5.0),
            rates=PathRates(rate, rate, rate if joint else float("inf")),
            allow_recompute=Action.RECOMPUTE in problem.actions,
        )  # fmt: skip
        lists = [decode(problem, view, found.decision) for view in views] if found.decision else []
        if not lists or not all(isinstance(one, DeviceList) for one in lists):
            continue
        for stagger in staggers:
            for policy in (LinkPolicyKind.FAIR, LinkPolicyKind.FCFS, LinkPolicyKind.PRIORITY):
                together_or_not = staggered(problem, stagger, policy) if stagger else together(problem, policy)
                yield assemble(problem, lists, together_or_not)


def best_plan_s(problem: Problem, shares, staggers) -> float:
    times = [simulate(problem, schedule).step_s for schedule in plans(problem, shares, staggers)]
    return min(times, default=float("inf"))


@pytest.mark.parametrize("seed", range(6))
def test_no_plan_beats_the_bound(seed):
    problem = random_transformer(seed)
    assert bound(problem).bound_s <= best_plan_s(problem, (1.0, 2.0), (0.0, 0.25)) * (1 + 1e-9)


@pytest.mark.parametrize("seed", range(6, 12))
def test_no_period_of_repeated_steps_beats_its_bound(seed):
    problem = random_transformer(seed)
    least_s = bound(problem).repeated_s * (1 - 1e-9)
    for schedule in plans(problem, (1.0, 2.0), (0.0, 0.25)):
        assert steady_state(problem, schedule, 12).period_s >= least_s


@pytest.mark.long
def test_bound_is_often_reached(capsys):
    ratios = []
    for seed in range(40):
        problem = random_transformer(seed)
        plan_s = best_plan_s(problem, (1.0, 1.3, 2.0, 4.0), (0.0, 0.1, 0.25, 0.33, 0.5))
        if plan_s < float("inf"):
            ratios.append(plan_s / bound(problem).bound_s)
    ratios.sort()
    with capsys.disabled():
        print(f"\n{len(ratios)} plans; plan / bound: least {ratios[0]:.4f}, median {ratios[len(ratios) // 2]:.4f}")
    assert ratios[0] >= 1 - 1e-9 and ratios[len(ratios) // 2] <= 1.06


@pytest.mark.parametrize("micro_batches", [1, 3, 16])
def test_a_plan_that_attains_the_bound_is_not_below_it_by_rounding(micro_batches):
    """Keeping everything takes the compute time; both are sums of the same numbers in different orders."""
    workload = synthetic_transformer(SyntheticTransformer(layers=3), 2, micro_batches)
    problem = Problem(
        "kept", workload, shared_path(2, keep_all_footprint_bytes(workload, 0), RATE), frozenset({Action.OFFLOAD})
    )
    assert bound(problem).bound_s <= KeepAll().plan(problem).step_s
