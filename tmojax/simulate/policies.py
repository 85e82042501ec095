"""Link policies of a schedule as arrays for the event loop (docs/semantics.md, 8.3)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from tmojax.errors import InputError
from tmojax.problem import LinkPolicy, LinkPolicyKind, Problem
from tmojax.simulate.arrays import Rules
from tmojax.simulate.kernel import FAIR, FCFS, ORDER, PRIORITY
from tmojax.simulate.lower import Lowered
from tmojax.simulate.tables import MachineTable

CODE = {
    LinkPolicyKind.FAIR: FAIR,
    LinkPolicyKind.FCFS: FCFS,
    LinkPolicyKind.PRIORITY: PRIORITY,
    LinkPolicyKind.ORDER: ORDER,
}


def rules_of(problem: Problem, machine: MachineTable, lowered: Lowered, policies: Sequence[LinkPolicy]) -> Rules:
    """Arrays for one set of policies, one per link or none at all (all fair). Raises InputError."""
    links = len(problem.machine.links)
    devices = problem.workload.device_count
    if policies and len(policies) != links:
        raise InputError(
            f"link_policies: {len(policies)} given for {links} links; give one per link, or none for all fair"
        )
    policy = np.full(links, FAIR, np.int8)
    slots = np.ones(links, np.int32)
    rank = np.zeros((machine.link_ptr.size - 1, devices), np.int32)
    sequences: list[NDArray] = [np.zeros(0, np.int64)] * links
    for link, spec in enumerate(policies):
        name = problem.machine.links[link].name
        policy[link] = CODE[spec.kind]
        if spec.kind is LinkPolicyKind.FAIR:
            continue
        if spec.slots < 1:
            raise InputError(f"link_policies[{link}] ({name}): slots {spec.slots} must be at least 1")
        slots[link] = spec.slots
        if spec.kind is LinkPolicyKind.PRIORITY:
            places = np.full(devices, len(spec.device_rank), np.int32)  # devices that are not named come last
            for place, device in enumerate(spec.device_rank):
                if not 0 <= device < devices:
                    raise InputError(f"link_policies[{link}] ({name}): device_rank names device {device} of {devices}")
                places[device] = place
            for route in machine.classes_of_link[link]:
                rank[route] = np.maximum(rank[route], places)
        elif spec.kind is LinkPolicyKind.ORDER:
            sequences[link] = _sequence(machine, lowered, link, name, spec)
    order_ptr = np.concatenate(([0], np.cumsum([sequence.size for sequence in sequences]))).astype(np.int32)
    order = np.concatenate([*sequences, [-1]]).astype(np.int32)  # the last entry ends the last sequence
    return Rules(machine.bandwidth, policy, slots, rank, order_ptr, order, machine.interference)


def _sequence(machine: MachineTable, lowered: Lowered, link: int, name: str, spec: LinkPolicy) -> NDArray:
    """Nodes of an `order` sequence, repeated for every step. It must name the transfers of the link, each once."""
    where = f"link_policies[{link}] ({name})"
    pairs = np.array(spec.sequence, np.int64).reshape(-1, 2)
    device, index = pairs.T
    known = (device >= 0) & (device < lowered.length.size) & (index >= 0)
    known[known] = index[known] < lowered.length[device[known]]
    if not known.all():
        raise InputError(f"{where}: sequence names {tuple(pairs[~known][0].tolist())}, which is no instruction")
    first_step = lowered.first_node[device] + index
    users = np.isin(lowered.graph.flow_class, machine.classes_of_link[link])
    expected = np.concatenate(
        [
            np.flatnonzero(users[first : first + n]) + first
            for first, n in zip(lowered.first_node, lowered.length, strict=False)
        ]
    )
    if not np.array_equal(np.sort(first_step), expected):
        unknown = np.setdiff1d(first_step, expected)
        missing = np.setdiff1d(expected, first_step)
        node, problem = (unknown[0], "does not use the link") if unknown.size else (missing[:1], "is missing")
        if not unknown.size and not missing.size:
            raise InputError(f"{where}: sequence names a transfer twice")
        place = int(np.searchsorted(lowered.first_node, node, side="right").item()) - 1
        number = int(np.asarray(node).item() - lowered.first_node[place])
        raise InputError(
            f"{where}: transfer ({place}, {number}) {problem}; the sequence names every transfer of the link once"
        )
    repeat = np.arange(lowered.steps)[:, None] * lowered.length[device]
    return (first_step + repeat).ravel()
