"""Explicit transfer orders of links (semantics 7): complete, and part of the graph that must have no cycle."""

from __future__ import annotations

import numpy as np

from tmojax.check.graph import Clocks, Graph
from tmojax.check.rules import START, WHOLE, Findings, Rule
from tmojax.check.static import TRANSFERS, Static
from tmojax.problem.schedule import FIRST_ENGINE_STREAM, LinkPolicyKind, Schedule

LinkOrder = tuple[int, list[tuple[int, int]]]  # slots, and the transfers as (device, instruction)
Edges = tuple[np.ndarray, np.ndarray]  # sources, targets


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


def check_links(static: Static, schedule: Schedule, findings: Findings) -> list[LinkOrder]:
    """Check what `order` and `priority` policies name. Returns every order, without entries that are wrong."""
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
        orders.append((policy.slots, usable))
    return orders


def order_edges(graph: Graph, orders: list[LinkOrder], edges: Edges) -> Edges:
    """The edges of the schedule with those of `order` policies added.

    With one slot a transfer starts after the end of the one before it. With s slots it starts after the start of the
    one before it and after the end of the one s places before it; such a transfer gets a second node for its start, at
    which all its other edges arrive.
    """
    sequences = [(slots, [graph.first[d] + index for d, index in sequence]) for slots, sequence in orders]
    for slots, nodes in sequences:
        for node in nodes if slots > 1 else ():
            graph.split_start(node)
    source, target = edges
    extra = [(start, node) for node, start in graph.starts.items()]
    for slots, nodes in sequences:
        starts = [graph.starts.get(node, node) for node in nodes]
        for place in range(1, len(nodes)):
            if slots > 1:
                extra.append((starts[place - 1], starts[place]))
            if place >= slots:
                extra.append((nodes[place - slots], starts[place]))
    names = np.arange(graph.node_count)
    names[list(graph.starts)] = list(graph.starts.values())
    target = names[target]
    if extra:
        added = np.array(extra, dtype=np.int64)
        source, target = np.concatenate((source, added[:, 0])), np.concatenate((target, added[:, 1]))
    return source, target


def check_shared_engines(
    static: Static, schedule: Schedule, graph: Graph, orders: list[LinkOrder], edges: Edges, all_edges: Edges,
    order: list[int], findings: Findings,
) -> None:  # fmt: skip
    """A transfer holds its engines while it waits for its turn on an `order` link (section 7).

    So if an engine serves several lists, whatever must have used it before a transfer's turn comes has to be ordered
    before that transfer by signals as well; otherwise the transfer may take the engine first and wait for ever.
    `edges`, `all_edges`: without and with those of the orders.
    """
    users: dict[int, list[int]] = {}  # engine stream -> chains of the lists that use it
    for place, (_, stream) in enumerate(graph.chains):
        if stream >= FIRST_ENGINE_STREAM:
            users.setdefault(stream, []).append(place)
    shared = {stream: places for stream, places in users.items() if len(places) > 1}
    if not orders or not shared:
        return
    plain = Clocks(graph, order, *edges)
    turned = Clocks(graph, order, *all_edges, started=True)
    chains = list(graph.chains.items())
    for stream, places in shared.items():
        for place in places:
            (device, _), nodes = chains[place]
            for node in nodes:
                index = node - graph.first[device]
                others = [other for other in places if other != place]
                behind = [o for o in others if turned.count(o, node) > plain.count(o, node)]
                if behind and int(schedule.lists[device]["kind"][index]) in TRANSFERS:
                    text = static.describe(device, index, schedule.lists[device][index])
                    names = ", ".join(static.device_name(chains[other][0][0]) for other in behind)
                    findings.add(
                        Rule.DEADLOCK, device, index,
                        f"{text}: may hold {static.stream_name(stream)} while its turn on a link waits for a transfer "
                        f"of {names} on that engine; order them by a signal",
                    )  # fmt: skip
