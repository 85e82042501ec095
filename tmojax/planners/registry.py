"""All planners by the `kind` that a configuration names."""

from __future__ import annotations

from tmojax.planners.base import Planner
from tmojax.planners.by_name import ByName
from tmojax.planners.checkmate import Checkmate, CheckmateRounding
from tmojax.planners.cp_sat import CpSat
from tmojax.planners.exhaustive import Exhaustive
from tmojax.planners.fluid import BudgetMilp, LockstepMilp, Oblivious
from tmojax.planners.gradient import Gradient, LocalSearch
from tmojax.planners.improve import Improve
from tmojax.planners.learned import Learned
from tmojax.planners.offmate import OffMate
from tmojax.planners.outer_lp import OuterLp
from tmojax.planners.peers_and_codecs import CompressAll, PeerOffload
from tmojax.planners.poet import Poet
from tmojax.planners.ratio import RatioSweep
from tmojax.planners.simple import KeepAll, OffloadAll, RecomputeAll, SqrtCheckpointing
from tmojax.planners.time_indexed import TimeIndexedMilp
from tmojax.planners.tmo import TmoMilp
from tmojax.planners.tmo_heuristics import Tmo, TmoDisjoint, TmoOrdered

PLANNERS: dict[str, type[Planner]] = {
    "keep-all": KeepAll,
    "offload-all": OffloadAll,
    "recompute-all": RecomputeAll,
    "sqrt-n": SqrtCheckpointing,
    "peer-offload": PeerOffload,
    "compress-all": CompressAll,
    "ratio-sweep": RatioSweep,
    "learned": Learned,
    "oblivious": Oblivious,
    "tmo-disjoint": TmoDisjoint,
    "tmo-ordered": TmoOrdered,
    "tmo": Tmo,
    "lockstep-milp": LockstepMilp,
    "budget-milp": BudgetMilp,
    "tmo-milp": TmoMilp,
    "time-indexed-milp": TimeIndexedMilp,
    "checkmate": Checkmate,
    "checkmate-lp": CheckmateRounding,
    "poet": Poet,
    "outer-lp": OuterLp,
    "offmate": OffMate,
    "local-search": LocalSearch,
    "cp-sat": CpSat,
    "improve": Improve,
    "gradient": Gradient,
    "exhaustive": Exhaustive,
    "by-name": ByName,
}
