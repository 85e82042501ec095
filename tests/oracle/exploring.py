"""What goes wrong with a short schedule in some order of events that docs/semantics.md allows: the oracle's answer."""

from __future__ import annotations

from dataclasses import replace

from playing import Outcome, Play, limits
from unrolled import Fault, Unrolled, need

from tmojax.problem import Kind, LinkPolicyKind, Problem, Schedule


def explore(problem: Problem, schedule: Schedule, most_states: int = 20_000) -> Outcome:
    """What can happen to a well-formed schedule.

    Lists that share nothing but host memory are played one by one, and a release or `retire` of theirs may take effect
    at any time after what it waits for, as in a runtime that frees when its issuing thread comes to it: then the most
    that was in a memory is the exact peak of 5.2. Where lists use each other's copies or memory, it takes effect at
    once (4.2).
    """
    try:
        lists = [Unrolled(problem, schedule, device) for device in range(len(schedule.lists))]
        signals = [event for unrolled in lists for event in unrolled.signals]
        need(len(signals) == len(set(signals)), "signal", "two lists signal one event")
        _sequences_are_complete(problem, schedule)
    except Fault as fault:
        return Outcome(*fault.args)
    if _independent(problem, schedule, lists):
        outcomes = [Play(problem, schedule, [unrolled], True).search(most_states) for unrolled in lists]
        total = tuple(sum(o.peak_bytes[m] for o in outcomes) for m in range(len(problem.machine.memories)))
        states, complete = sum(o.states for o in outcomes), all(o.complete for o in outcomes)
        for outcome in outcomes:
            if outcome.fault:
                return replace(outcome, apart=True)
        # Lists that share nothing but room: each can be at its own worst at the same moment.
        for memory, limit in enumerate(limits(problem)):
            if total[memory] > limit:
                return Outcome("memory full", memory, states, complete, total, True)
        return Outcome("", "", states, complete, total, True)
    return Play(problem, schedule, lists, False).search(most_states)


def _sequences_are_complete(problem: Problem, schedule: Schedule) -> None:
    for link, policy in enumerate(schedule.link_policies):
        if policy.kind is LinkPolicyKind.ORDER:
            users = [
                (d, i)
                for d, rows in enumerate(schedule.lists)
                for i, row in enumerate(rows)
                if row["kind"] in (Kind.OFFLOAD, Kind.PREFETCH)
                and link in problem.machine.route(int(row["memory"]), int(row["to_memory"])).links
            ]
            need(sorted(policy.sequence) == sorted(users), "sequence of a link", link)


def _independent(problem: Problem, schedule: Schedule, lists: list[Unrolled]) -> bool:
    """Do lists touch nothing in common but host memory?"""
    if any(policy.kind is LinkPolicyKind.ORDER for policy in schedule.link_policies):
        return False
    engines: list[object] = []
    for unrolled in lists:
        engines += {stream for step in unrolled.steps for stream in step.streams}
        for step in unrolled.steps:
            if step.collective or step.loan or step.event >= 0:
                return False
            copies = [c for c, *_ in step.reads] + [c for c, _ in step.writes] + step.vanish
            devices = [m.memory for d, m in enumerate(problem.machine.devices) if d != unrolled.device]
            if any(c[0] != unrolled.device or c[3] in devices for c in copies):
                return False
    return len(engines) == len(set(engines))
