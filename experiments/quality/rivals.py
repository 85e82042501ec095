"""Who is compared on the benchmark suite: heuristics, searches and, where asked for, integer programmes."""

from __future__ import annotations

from experiments.ilp.rivals import HEURISTICS as COMMON
from experiments.ilp.rivals import MODELS, SEARCHES, Rival, quick

# Before anything else, one after the other; the plans of all of them are offered to everybody below.
HEURISTICS = (
    *COMMON,
    Rival("tmo-disjoint", "tmo-disjoint"),
    Rival("tmo-ordered", "tmo-ordered"),
    Rival("tmo", "tmo"),
)

__all__ = ["HEURISTICS", "MODELS", "SEARCHES", "Rival", "quick"]
