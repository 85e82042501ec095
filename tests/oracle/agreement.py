"""Does the checker say what the oracle finds?

Both directions: what the checker accepts goes wrong in no order of events; what it rejects goes wrong in some order.
Three rules are stricter than any one run, on purpose, and are held to the first direction only:

- capacity of lists that use each other's copies or memory or wait for each other (5.2 counts positions of a list;
  a wait can keep two of them from being reached together, and a release can take effect before its place);
- order between lists that only the turns on a link give (4.3, 3.6: signals and collectives order lists, links do not);
- an engine that serves several lists, with turns on links (7: must be ordered without the turns).
"""

from __future__ import annotations

from unittest.mock import patch

from exploring import explore
from playing import Outcome

from tmojax.check import CheckReport, Rule, check, checker
from tmojax.problem import LinkPolicyKind, Problem, Schedule

FORM = {Rule.MALFORMED, Rule.INITIAL}  # no schedule at all: the oracle has nothing to play
ROOM = {Rule.CAPACITY, Rule.HOST_CAPACITY, Rule.PINNED_CAPACITY}
BETWEEN = {Rule.USE_BEFORE_ARRIVAL, Rule.CROSS_LIST_RACE, Rule.STALE_VERSION, Rule.LOAN}


def detailed_check(problem: Problem, schedule: Schedule) -> CheckReport:
    """The checker's report without its quick path."""
    with patch.object(checker, "quick_report", lambda static, schedule: None):
        return check(problem, schedule)


def verdict(problem: Problem, schedule: Schedule, most_states: int = 2000) -> str:
    """'valid' or 'invalid' where both agree. Raises AssertionError where they contradict each other.

    'form': not well-formed. 'stricter': rejected for one of the three rules only. 'valid so far', 'undecided': accepted
    or rejected, and the oracle visited `most_states` without a fault.
    """
    report = check(problem, schedule)  # by the quick path where that can tell
    assert report == detailed_check(problem, schedule), "the paths of the checker differ"
    if any(violation.rule in FORM for violation in report.violations):
        return "form"
    outcome = explore(problem, schedule, most_states)
    if report.valid:
        assert not outcome.fault, f"accepted, but {outcome.fault}: {outcome.where}"
        peaks = tuple(report.peak_bytes.values())
        assert all(found <= peak for found, peak in zip(outcome.peak_bytes, peaks, strict=True)), (outcome, peaks)
        assert not (outcome.apart and outcome.complete) or outcome.peak_bytes == peaks, (outcome, peaks)
        return "valid" if outcome.complete else "valid so far"
    if outcome.fault:
        return "invalid"
    if not outcome.complete:
        return "undecided"
    assert _only_stricter(schedule, report, outcome), f"nothing goes wrong, but {report.text()}"
    return "stricter"


def _only_stricter(schedule: Schedule, report: CheckReport, outcome: Outcome) -> bool:
    turns = any(policy.kind is LinkPolicyKind.ORDER for policy in schedule.link_policies)
    for violation in report.violations:
        engine = violation.rule is Rule.DEADLOCK and "may hold" in violation.message
        if violation.rule in ROOM and not outcome.apart:
            continue
        if turns and (violation.rule in BETWEEN or engine):
            continue
        return False
    return True
