"""Who is compared: heuristics, searches, and every model of the registry that solves an integer programme."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import Any

from tmojax.planners.base import Planner
from tmojax.planners.local_search import SearchSettings
from tmojax.planners.registry import PLANNERS


@dataclass(frozen=True)
class Rival:
    """A planner of the registry with settings; `name` in tables."""

    name: str
    kind: str
    settings: dict[str, Any] = field(default_factory=dict)

    def planner(self, limit_s: float | None) -> Planner:
        """With that time limit, where it has one."""
        made = PLANNERS[self.kind](**self.settings)
        has_limit = limit_s is not None and any(spec.name == "time_limit_s" for spec in fields(made))  # type: ignore[arg-type]
        return replace(made, time_limit_s=limit_s) if has_limit else made  # type: ignore[type-var]


# Before anything else, one after the other; the plans of all of them are offered to everybody below.
HEURISTICS = (
    Rival("keep-all", "keep-all"),
    Rival("offload-all", "offload-all"),
    Rival("recompute-all", "recompute-all"),
    Rival("sqrt-n", "sqrt-n"),
    Rival("ratio-sweep", "ratio-sweep"),
    Rival("oblivious-fair", "oblivious"),
    Rival("oblivious-fcfs", "oblivious", {"name": "oblivious-fcfs", "policy": "fcfs"}),
    Rival("oblivious-priority", "oblivious", {"name": "oblivious-priority", "policy": "priority"}),
    Rival("oblivious-stagger", "oblivious", {"name": "oblivious-stagger", "policy": "fcfs", "stagger_share": 1.0}),
)
SEARCHES = (Rival("local-search", "local-search"), Rival("gradient", "gradient"))
_MODELS = (
    Rival("lockstep-milp", "lockstep-milp"),
    Rival("lockstep-milp, warm", "lockstep-milp", {"warm_start": True}),
    Rival("budget-milp", "budget-milp"),
    Rival("budget-milp, warm", "budget-milp", {"warm_start": True}),
    Rival("cp-sat", "cp-sat"),
    Rival("improve", "improve", {"iterations": 100_000}),  # the time limit ends it
    Rival("tmo-milp", "tmo-milp"),
    Rival("tmo-milp, not disjoint", "tmo-milp", {"disjoint": False}),
    Rival("time-indexed-milp", "time-indexed-milp"),
    Rival("checkmate", "checkmate"),
    Rival("checkmate-lp", "checkmate-lp"),
    Rival("poet", "poet"),
    Rival("poet, equal share", "poet", {"rates": "equal-share"}),
    Rival("outer-lp", "outer-lp"),
    Rival("offmate", "offmate"),
    Rival("offmate, equal share", "offmate", {"rates": "equal-share"}),
)
MODELS = tuple(rival for rival in _MODELS if rival.kind in PLANNERS)


def quick(rivals: tuple[Rival, ...]) -> tuple[Rival, ...]:
    """The same with little effort, to try the experiment itself."""
    little = {
        "local-search": {"search": SearchSettings(evaluations=6)},
        "gradient": {"restarts": 1, "steps": 40, "roundings": 2, "search": SearchSettings(evaluations=6)},
    }
    return tuple(replace(rival, settings=rival.settings | little.get(rival.kind, {})) for rival in rivals)
