"""Small problems of different kinds, and every planner with settings that suit them."""

from dataclasses import replace

from further_steps import further_problem
from random_steps import random_problem

from tmojax.importers.machine_build import load_machine
from tmojax.importers.synthetic import SyntheticTransformer, synthetic_transformer
from tmojax.planners.base import Planner
from tmojax.planners.local_search import SearchSettings
from tmojax.planners.registry import PLANNERS
from tmojax.problem import Action, Problem, keep_all_footprint_bytes, validate_problem

BOTH = frozenset({Action.OFFLOAD, Action.RECOMPUTE})
SMALL_TRANSFORMER = SyntheticTransformer(layers=3, tokens=1024, width=256, compute_s=0.002, parameters=10**6)


def transformer(preset: str, *, factor: float, micro_batches: int = 3, actions: frozenset[Action] = BOTH,
                spec: SyntheticTransformer = SMALL_TRANSFORMER) -> Problem:  # fmt: skip
    """The synthetic transformer on a preset, with capacity = footprint / `factor`."""
    machine = load_machine(preset)
    workload = synthetic_transformer(spec, len(machine.devices), micro_batches)
    problem = Problem(f"transformer on {preset}", workload, machine, actions)
    problem = problem.with_device_capacity(int(keep_all_footprint_bytes(workload, 0) / factor))
    validate_problem(problem)
    return problem


def cases() -> dict[str, Problem]:
    """Forks, workspace, state, collectives, one to six GPUs, uneven and half-duplex paths, one action or two, or peers
    and codecs as well."""
    found = {f"random-{seed}": random_problem(seed, factor=1.15) for seed in (1, 4, 7)}
    found["peers-and-codecs"] = further_problem(1, 1.25)
    found["offload-only"] = random_problem(11, factor=1.1, actions=(Action.OFFLOAD,))
    found["recompute-only"] = random_problem(12, factor=1.05, actions=(Action.RECOMPUTE,))
    found["roomy"] = random_problem(2, factor=0.9)
    found["shared-path"] = transformer("prototype-4gpu-12.5", factor=1.4)
    found["half-duplex"] = transformer("prototype-4gpu-12.5-half-duplex", factor=1.4, micro_batches=1)
    found["uneven"] = transformer("uneven-risers-x6", factor=1.3, micro_batches=2)
    return found


def light(kind: str) -> Planner:
    """A planner with little effort: what it finds may be poor, but has to be right."""
    planner = PLANNERS[kind]()
    if kind == "local-search":
        return replace(planner, search=SearchSettings(evaluations=30))
    if kind in ("checkmate", "checkmate-lp", "poet"):
        return replace(planner, most_stages=8, gap=0.1)
    if kind == "tmo-milp":
        return replace(planner, groups=4, gap=0.5)
    if kind == "time-indexed-milp":
        return replace(planner, groups=4, buckets=8)
    if kind == "cp-sat":
        return replace(planner, workers=1, deterministic_limit=0.02)
    if kind == "improve":
        return replace(planner, iterations=3, free=10, sub_limit=0.02)
    if kind == "exhaustive":
        return replace(planner, most_partial=4000, most_simulations=500)
    if kind == "gradient":
        return replace(planner, restarts=2, steps=40, roundings=6, search=SearchSettings(evaluations=10))
    return planner
