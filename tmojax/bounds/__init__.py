"""Proven lower bounds of the step time: `bound` is the entry, docs/bounds.md has the proofs."""

from tmojax.bounds.bound import BoundPart, BoundReport, BoundStatus
from tmojax.bounds.orders import bound

__all__ = ["BoundPart", "BoundReport", "BoundStatus", "bound"]
