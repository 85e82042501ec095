"""The exact checker: proves a schedule valid under docs/semantics.md, or reports every violation.

Integers only. It shares no code with the simulator, the cost model or the planners, so that none of their
mistakes can hide behind it. `check` is the entry; the phases are `shape`, `quick` (compiled; proves the usual kind of
schedule valid, and where it cannot, the others decide and say what is wrong), `walk` (one list at a time: residency,
versions, memory), `between` (collectives, events, loans, shared copies) and `graph` (deadlock).
"""

from tmojax.check.checker import check
from tmojax.check.rules import PARAGRAPHS, CheckReport, Rule, Violation

__all__ = ["PARAGRAPHS", "CheckReport", "Rule", "Violation", "check"]
