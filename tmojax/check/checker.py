"""`check`: prove a schedule valid, or list everything that is wrong with it."""

from __future__ import annotations

from tmojax.check.between import SharedCopies, check_shared_memories, connect_events, fuse_collectives
from tmojax.check.graph import Clocks, Graph, cycles, topological_order
from tmojax.check.links import LinkOrder, check_links, check_shared_engines, order_edges
from tmojax.check.loans import check_loans
from tmojax.check.quick import quick_report
from tmojax.check.rules import START, WHOLE, CheckReport, Findings, Rule, TooComplex
from tmojax.check.shape import check_shape
from tmojax.check.shared import SharedLog
from tmojax.check.static import Static
from tmojax.check.walk import ListWalk
from tmojax.problem.problem import Problem
from tmojax.problem.schedule import Kind, Schedule

_SHOWN_STEPS = 8  # of a circle
_LISTED_OVERFLOWS = 100  # violations per list that name the largest copies; the others give the bytes only


def check(problem: Problem, schedule: Schedule) -> CheckReport:
    """Check a schedule against docs/semantics.md, sections 2 to 7. Nothing in it is trusted, and no schedule raises.

    The problem must be well formed (`validate_problem`). Phases: shape of the arrays; the quick path, which proves most
    valid schedules valid; else a walk of every list, order and memory between lists, deadlock. When the arrays are
    malformed the rest is skipped; when there is a deadlock, order between lists is; `CheckReport.notes` says so.
    What would take more memory or time than any plan needs is reported as malformed.
    """
    static, findings = Static(problem), Findings()
    notes: list[str] = []
    check_shape(static, schedule, findings)
    orders = [] if findings.violations else check_links(static, schedule, findings)
    if findings.rules() & {Rule.MALFORMED, Rule.INITIAL}:
        notes += ["the schedule is malformed, so its lists were not walked", *findings.notes()]
        return CheckReport(tuple(findings.violations), notes=tuple(notes))
    if not findings.violations:
        report = quick_report(static, schedule)
        if report is not None:
            return report
    try:
        return _detailed(static, schedule, orders, findings, notes)
    except TooComplex as error:
        findings.add(Rule.MALFORMED, WHOLE, START, f"too complex to be checked: {error}")
        return CheckReport(tuple(findings.violations), notes=(*notes, *findings.notes()))


def _detailed(
    static: Static, schedule: Schedule, orders: list[LinkOrder], findings: Findings, notes: list[str]
) -> CheckReport:
    """Walk every list on the whole semantics, and say all that is wrong."""
    problem = static.problem
    lengths = [len(rows) for rows in schedule.lists]
    graph, shared = Graph(lengths), SharedLog(static, schedule)
    walks = []
    for device, rows in enumerate(schedule.lists):
        sequence = static.sequence(device, schedule.order)
        walk = ListWalk(static, device, rows, schedule.initial[device], graph, shared, findings, sequence)
        walk.run()
        walks.append(walk)
    peaks = check_shared_memories(static, walks, findings)
    largest = tuple(_report_memory(static, walk) for walk in walks)
    fuse_collectives(static, walks, graph, findings)
    connect_events(walks, graph)

    edges = graph.edges()
    all_edges = order_edges(graph, orders, edges)
    order = topological_order(graph.node_count, *all_edges)
    if len(order) < graph.node_count:
        for cycle in cycles(graph.node_count, *all_edges):
            _report_cycle(static, schedule, graph, cycle, findings)
        if shared.active or any(walk.state.borrowed for walk in walks):
            notes.append("the schedule can deadlock, so loans and copies that several lists use were not checked")
    else:
        check_shared_engines(static, schedule, graph, orders, edges, all_edges, order, findings)
        if shared.active or any(walk.state.borrowed for walk in walks):
            clocks = Clocks(graph, order, *edges)
            check_loans(static, walks, graph, clocks)
            if shared.active:
                SharedCopies(static, walks, graph, clocks, order, shared).check()

    names = [memory.name for memory in problem.machine.memories]
    totals = [sum(walk.initial_bytes[memory] for walk in walks) for memory in range(len(names))]
    return CheckReport(
        violations=tuple(findings.violations),
        peak_bytes=dict(zip(names, peaks, strict=True)),
        peak_position=tuple(walk.state.ledger.peak_position[walk.table.memory] for walk in walks),
        largest_at_peak=largest,
        initial_bytes=dict(zip(names, totals, strict=True)),
        instructions=sum(lengths),
        notes=(*notes, *findings.notes()),
    )


def _report_memory(static: Static, walk: ListWalk) -> tuple[tuple[str, int], ...]:
    """Report where a device's memory is over its limit; returns the largest items at its fullest position."""
    state, memory = walk.state, walk.table.memory
    ledger = state.ledger
    listed = [overflow.instruction for overflow in ledger.overflows[:_LISTED_OVERFLOWS]]
    largest = ledger.largest(memory, [*listed, ledger.peak_position[memory]])
    for overflow in ledger.overflows:
        items = largest.get(overflow.instruction, [])
        there = "; largest: " + ", ".join(f"{state.item_name(i)} {b}" for i, b in items) if items else ""
        available = static.available_bytes(memory)
        state.report(
            Rule.CAPACITY, overflow.instruction,
            f"{available + overflow.bytes_over} bytes in {static.memory_name(memory)}, {overflow.bytes_over} over the "
            f"{available} available{there}",
            memory, overflow.bytes_over,
        )  # fmt: skip
    return tuple((state.item_name(item), size) for item, size in largest[ledger.peak_position[memory]])


def _report_cycle(static: Static, schedule: Schedule, graph: Graph, cycle: list[int], findings: Findings) -> None:
    # A fused node carries the name of its first member; a barrier stands between two instructions and adds nothing.
    named = [step for step in map(graph.instruction, cycle) if step is not None]
    steps = list(dict.fromkeys(named))
    texts = [static.describe(device, index, schedule.lists[device][index]) for device, index in steps]
    if len(texts) > _SHOWN_STEPS:
        # What leads from list to list explains a long circle best.
        kinds = [int(schedule.lists[device]["kind"][index]) for device, index in steps]
        turns = [kind in (Kind.SIGNAL, Kind.WAIT) or step[0] != steps[place - 1][0]
                 for place, (kind, step) in enumerate(zip(kinds, steps, strict=True))]  # fmt: skip
        kept = [place for place, turn in enumerate(turns) if turn or place == 0]
        texts = [texts[place] for place in kept[:_SHOWN_STEPS]] + [f"... of {len(steps)} in all"]
    device, index = steps[0]
    findings.add(Rule.DEADLOCK, device, index, "each waits for the one before it, in a circle: " + " | ".join(texts))
