"""Planner of tensor movement in multi-GPU training.

The names below are loaded when they are first used, so `import tmojax` is fast and imports no JAX. A short programme:

    problem = build_problem(load_config("configs/runs/prototype.toml")).problem
    result = PLANNERS["budget-milp"]().plan(problem)
    bound(problem).gap(result.step_s)

The judge and the clock are packages of their own: `tmojax.check.check(problem, schedule)` proves a schedule valid,
`tmojax.simulate.simulate(problem, schedule)` says how long it takes.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tmojax.bounds import bound
    from tmojax.build import build_problem
    from tmojax.config import load_config
    from tmojax.errors import InfeasibleError, InputError
    from tmojax.importers.jax_importer import import_train_step
    from tmojax.importers.machine_build import load_machine
    from tmojax.importers.synthetic import SyntheticTransformer, synthetic_transformer
    from tmojax.models import build_model
    from tmojax.planners.base import Planner, PlanResult, Status
    from tmojax.planners.registry import PLANNERS
    from tmojax.problem import Action, Machine, Problem, Schedule, Workload
    from tmojax.problem.io import read_plan, read_problem, write_plan, write_problem

__all__ = [
    "PLANNERS",
    "Action",
    "InfeasibleError",
    "InputError",
    "Machine",
    "PlanResult",
    "Planner",
    "Problem",
    "Schedule",
    "Status",
    "SyntheticTransformer",
    "Workload",
    "bound",
    "build_model",
    "build_problem",
    "import_train_step",
    "load_config",
    "load_machine",
    "read_plan",
    "read_problem",
    "synthetic_transformer",
    "write_plan",
    "write_problem",
]

_HOME = {
    "PLANNERS": "tmojax.planners.registry",
    "Action": "tmojax.problem",
    "InfeasibleError": "tmojax.errors",
    "InputError": "tmojax.errors",
    "Machine": "tmojax.problem",
    "PlanResult": "tmojax.planners.base",
    "Planner": "tmojax.planners.base",
    "Problem": "tmojax.problem",
    "Schedule": "tmojax.problem",
    "Status": "tmojax.planners.base",
    "SyntheticTransformer": "tmojax.importers.synthetic",
    "Workload": "tmojax.problem",
    "bound": "tmojax.bounds",
    "build_model": "tmojax.models",
    "build_problem": "tmojax.build",
    "import_train_step": "tmojax.importers.jax_importer",
    "load_config": "tmojax.config",
    "load_machine": "tmojax.importers.machine_build",
    "read_plan": "tmojax.problem.io",
    "read_problem": "tmojax.problem.io",
    "synthetic_transformer": "tmojax.importers.synthetic",
    "write_plan": "tmojax.problem.io",
    "write_problem": "tmojax.problem.io",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'tmojax' has no attribute {name!r}")
    value = getattr(import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
