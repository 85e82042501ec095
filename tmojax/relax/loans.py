"""Memory of one GPU in which another one keeps tensors, for a whole step (semantics 3.6).

A lender's list begins with its loans and ends by taking them back; the borrower's first copy to it waits for the
start, and its last copy from there signals the end. So what is lent is missing in the lender's memory throughout.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tmojax.errors import InputError
from tmojax.problem import COMMUNICATION_STREAM, COMPUTE_STREAM, FIRST_ENGINE_STREAM, Kind, ListBuilder, Problem
from tmojax.relax.decisions import DeviceDecision


@dataclass(frozen=True)
class Loan:
    borrower: int
    lender: int
    size_bytes: int


def check_lenders(decisions: Sequence[DeviceDecision]) -> None:
    """Raises InputError where a device that borrows lends as well: neither list could be fitted first."""
    for device, decision in enumerate(decisions):
        others = decision.borrows and 0 <= decision.lender < len(decisions) and decision.lender != device
        if others and decisions[decision.lender].borrows:
            raise InputError(
                f"device {device}: its lender, device {decision.lender}, borrows itself; give it one that does not"
            )


def with_loans(problem: Problem, lists: Sequence[np.ndarray], loans: Sequence[Loan]) -> list[np.ndarray]:
    """The lists [N] of all devices with the instructions of the loans added. Events are numbered on from those that
    the lists signal already."""
    built = list(lists)
    event = 1 + max((int(rows["event"].max(initial=-1)) for rows in lists), default=-1)
    heads = [ListBuilder() for _ in built]
    tails = [ListBuilder() for _ in built]
    for number, loan in enumerate(loans):
        out, back = event + 2 * number, event + 2 * number + 1
        heads[loan.lender].lend(loan.size_bytes, loan.borrower, number)
        heads[loan.lender].signal(out, len(heads[loan.lender]) - 1)
        heads[loan.borrower].wait(out, _stream_to(problem, loan))
        tails[loan.borrower].signal(back, _last_back(problem, built[loan.borrower], loan))
        tails[loan.lender].wait(back, COMMUNICATION_STREAM)
        tails[loan.lender].reclaim(number)
    for device, (head, tail) in enumerate(zip(heads, tails, strict=True)):
        if len(head):
            rows = np.concatenate([built[device], tail.build()])
            rows["after"][rows["after"] >= 0] += len(head)
            built[device] = np.concatenate([head.build(), rows])
    return built


def _stream_to(problem: Problem, loan: Loan) -> int:
    """The stream on which the borrower's copies to the lender run."""
    machine = problem.machine
    ends = (machine.devices[loan.borrower].memory, machine.devices[loan.lender].memory)
    engines = machine.route(*ends).engines
    return FIRST_ENGINE_STREAM + engines[0] if engines else COMPUTE_STREAM


def _last_back(problem: Problem, rows: np.ndarray, loan: Loan) -> int:
    """The release of the copy that comes back last: its engine has done all others before."""
    memory = problem.machine.devices[loan.lender].memory
    back = np.flatnonzero((rows["kind"] == Kind.PREFETCH) & (rows["memory"] == memory))[-1]
    same = (rows["kind"] == Kind.RELEASE) & (rows["memory"] == memory)
    for name in ("tensor", "micro_batch"):
        same &= rows[name] == rows[name][back]
    return int(np.flatnonzero(same)[-1])
