"""Explicit transfer orders of links (semantics 7): complete, and part of the graph that must have no cycle."""

from __future__ import annotations

import numpy as np

from tmojax.check.graph import Graph
from tmojax.check.rules import START, WHOLE, Findings, Rule
from tmojax.check.static import TRANSFERS, Static
from tmojax.problem.schedule import LinkPolicyKind, Schedule


def _transfers(static: Static, schedule: Schedule) -> dict[int, list[tuple[int, int]]]:
    """Link -> every transfer over it as (device, instruction)."""
    machine = static.machine
    found: dict[int, list[tuple[int, int]]] = {link: [] for link in range(len(machine.links))}
    for device, rows in enumerate(schedule.lists):
        for index in np.flatnonzero(np.isin(rows["kind"], TRANSFERS)).tolist():
            source, target = int(rows["memory"][index]), int(rows["to_memory"][index])
            if machine.has_route(source, target):
                for link in machine.route(source, target).links:
                    found[link].append((device, index))
    return found


def check_links(static: Static, schedule: Schedule, findings: Findings) -> list[tuple[str, int, list[tuple[int, int]]]]:
    """Check what `order` and `priority` policies name. Returns (link, slots, sequence) of every usable order."""
    policies = schedule.link_policies
    if all(policy.kind in (LinkPolicyKind.FAIR, LinkPolicyKind.FCFS) for policy in policies):
        return []
    transfers = _transfers(static, schedule)
    orders = []
    for link, policy in enumerate(policies):
        name = static.machine.links[link].name
        if policy.kind is LinkPolicyKind.PRIORITY:
            unranked = {device for device, _ in transfers[link]} - set(policy.device_rank)
            for device in sorted(unranked):
                findings.add(
                    Rule.MALFORMED, device, START,
                    f"link_policies of {name}: device_rank lacks {static.device_name(device)}, which uses the link",
                )  # fmt: skip
        if policy.kind is not LinkPolicyKind.ORDER:
            continue
        wanted, usable, seen = set(transfers[link]), [], set()
        for device, index in policy.sequence:
            if (device, index) in seen:
                findings.add(Rule.LINK_ORDER, WHOLE, START, f"{name}: the sequence names ({device}, {index}) twice")
            elif (device, index) not in wanted:
                findings.add(
                    Rule.LINK_ORDER, WHOLE, START, f"{name}: ({device}, {index}) in the sequence is no transfer over it"
                )
            else:
                usable.append((device, index))
            seen.add((device, index))
        for device, index in sorted(wanted - seen):
            text = static.describe(device, index, schedule.lists[device][index])
            findings.add(Rule.LINK_ORDER, device, index, f"{name}: the sequence lacks {text}")
        orders.append((name, policy.slots, usable))
    return orders


def order_edges(
    graph: Graph, orders: list[tuple[str, int, list[tuple[int, int]]]], source: np.ndarray, target: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """The edges of the schedule with those of `order` policies added.

    With one slot a transfer starts after the end of the one before it. With s slots it starts after the start of the
    one before it and after the end of the one s places before it; such a transfer gets a second node for its start, at
    which all its other edges arrive.
    """
    start_of: dict[int, int] = {}
    extra: list[tuple[int, int]] = []
    for name, slots, sequence in orders:
        nodes = [graph.first[device] + index for device, index in sequence]
        if slots > 1:
            for node, (device, index) in zip(nodes, sequence, strict=True):
                if node not in start_of:
                    start_of[node] = graph.extra_node(device, f"start of #{index} on {name}")
    for _, slots, sequence in orders:
        nodes = [graph.first[device] + index for device, index in sequence]
        starts = [start_of.get(node, node) for node in nodes]
        for place in range(1, len(nodes)):
            if slots > 1:
                extra.append((starts[place - 1], starts[place]))
            if place >= slots:
                extra.append((nodes[place - slots], starts[place]))
    names = np.arange(graph.node_count)
    if start_of:
        names[list(start_of)] = list(start_of.values())
    target = names[target]
    extra += [(start, node) for node, start in start_of.items()]
    if extra:
        added = np.array(extra, dtype=np.int64)
        source, target = np.concatenate((source, added[:, 0])), np.concatenate((target, added[:, 1]))
    return source, target
