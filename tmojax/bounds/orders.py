"""The bound of a problem in all orders of micro-batches that it offers (docs/bounds.md, section 5)."""

from __future__ import annotations

from dataclasses import replace

from tmojax.bounds.bound import BoundReport, BoundStatus, bound_in_default_order
from tmojax.problem import Problem
from tmojax.problem.in_order import in_order, offered_orders


def bound(problem: Problem, *, order: str | None = None, time_limit_s: float = 20.0, threads: int = 1) -> BoundReport:
    """Lower bounds of the step time of every valid schedule of `problem` that uses its actions, and the largest of
    them; the schedule may follow any order that the problem offers, or only `order`.

    The linear program covers keeping, offloading, copies to peers, recomputing and compressing; where
    `problem.actions` allow sharding, only the compute bound is claimed. `time_limit_s` is for each order. `details` has
    the bound of each, where there are several. Raises InputError for an unknown order.
    """
    names = offered_orders(problem.workload) if order is None else (order,)
    if not any(program.orders for program in problem.workload.programs) and names == ("default",):
        return bound_in_default_order(problem, time_limit_s=time_limit_s, threads=threads)
    reports = {name: _bound_in(problem, name, time_limit_s, threads) for name in names}
    if len(reports) == 1:
        return reports[names[0]]
    least = min(reports, key=lambda name: reports[name].bound_s)
    report = reports[least]
    limited = any(found.status is BoundStatus.TIME_LIMIT for found in reports.values())
    return replace(
        report,
        repeated_s=min(found.repeated_s for found in reports.values()),
        status=BoundStatus.TIME_LIMIT if limited else report.status,
        message=f"order '{least}': {report.message}",
        solve_s=sum(found.solve_s for found in reports.values()),
        details={
            **report.details, "order": least,
            **{f"{name}_bound_s": found.bound_s for name, found in reports.items()},
        },
    )  # fmt: skip


def _bound_in(problem: Problem, order: str, time_limit_s: float, threads: int) -> BoundReport:
    """The bound of the problem whose default order this is; per micro-batch of `problem`."""
    found = bound_in_default_order(in_order(problem, order).problem, time_limit_s=time_limit_s, threads=threads)
    count = problem.workload.micro_batches
    parts = tuple(replace(part, micro_batch_s=part.step_s / count) for part in found.parts)
    return replace(found, micro_batches=count, parts=parts)
