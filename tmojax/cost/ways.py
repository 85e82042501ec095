"""Peers and codecs in the relaxed model: what a GPU borrows over which links, and what encoding costs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tmojax.cost.model import COMPRESS, GB, KEEP, OFFLOAD_COMPRESSED, PEER
from tmojax.cost.slots import FluidSlots
from tmojax.errors import InputError
from tmojax.problem import Action, Machine, Problem
from tmojax.problem.step_view import StepView


def width(problem: Problem, lenders: Sequence[int]) -> int:
    """How many choices a candidate has: three, or all where somebody may borrow or encode."""
    encodes = Action.COMPRESS in problem.actions and len(problem.machine.codecs) > 0
    return OFFLOAD_COMPRESSED + 1 if encodes or any(lender >= 0 for lender in lenders) else 3


def best_codec(problem: Problem) -> int:
    """The codec with which a byte is on the host and back soonest, from the first GPU alone; 0 if there is none."""
    machine = problem.machine
    spec = machine.devices[0]
    lane = sum(
        1 / min(machine.links[link].bandwidth_bytes_per_s for link in machine.route(*way).links)
        for way in ((spec.memory, spec.host_memory), (spec.host_memory, spec.memory))
    )
    seconds = [
        lane * codec.numerator / codec.denominator + 1 / codec.encode_bytes_per_s + 1 / codec.decode_bytes_per_s
        for codec in machine.codecs
    ]
    return int(np.argmin(seconds)) if seconds else 0


def allow_further(problem: Problem, view: StepView, slots: FluidSlots, allowed: np.ndarray) -> None:
    """Set the columns of `allowed` [I, 6] behind the first three, with a lender for granted. Only what backward uses is
    encoded."""
    idle = view.may_offload & (slots.idle_to - slots.idle_from > 1)
    encodes = Action.COMPRESS in problem.actions and len(problem.machine.codecs) > 0
    allowed[:, PEER] = idle & allowed[:, KEEP]
    allowed[:, COMPRESS] = idle & view.needed & encodes
    allowed[:, OFFLOAD_COMPRESSED] = allowed[:, COMPRESS] & (Action.OFFLOAD in problem.actions)


def coding_arrays(problem: Problem, view: StepView, slots: FluidSlots, codec: int) -> dict[str, np.ndarray]:
    """coding_s [Q, I]: seconds of encoding behind the last use before the gap and of decoding before the next one.
    coding_gb [Q, I]: encoded bytes that are there in those two slots beside the plain ones."""
    shape = (len(slots.slot_s), len(view.size_bytes))
    seconds, extra = np.zeros(shape), np.zeros(shape)
    if len(problem.machine.codecs):
        spec, launch_s, size = problem.machine.codecs[codec], problem.machine.overheads.launch_s, view.size_bytes
        for place, rate in ((slots.idle_from, spec.encode_bytes_per_s), (slots.idle_to, spec.decode_bytes_per_s)):
            np.add.at(seconds, (place, np.arange(len(size))), size / rate + launch_s)
            extra[place, np.arange(len(size))] = size / GB * spec.numerator / spec.denominator
    return {"coding_s": seconds, "coding_gb": extra}


def peer_routes(machine: Machine, lenders: Sequence[int]) -> list[tuple[int, int, tuple[int, ...]]]:
    """(GPU, direction, links) of all copies to lenders (direction 0) and back."""
    found = []
    for gpu, lender in enumerate(lenders):
        if lender >= 0:
            ends = (machine.devices[gpu].memory, machine.devices[lender].memory)
            found += [(gpu, way, machine.route(*ends[:: 1 - 2 * way]).links) for way in (0, 1)]
    return found


def peer_arrays(problem: Problem, views: Sequence[StepView], lenders: Sequence[int], links: Sequence[int],
                lane_gb_per_s: Any) -> dict[str, np.ndarray]:  # fmt: skip
    """The fields of the model about lenders. links: those that the model has. `lane_gb_per_s(gpu, links)`: rate of one
    GPU's copies over links, set-up included."""
    gpus, place = len(views), {link: row for row, link in enumerate(links)}
    lane, use, lent = np.ones((gpus, 2)), np.zeros((len(links), gpus, 2)), np.zeros((gpus, gpus))
    for gpu, way, route in peer_routes(problem.machine, lenders):
        lane[gpu, way] = lane_gb_per_s(gpu, route)
        use[[place[link] for link in route if link in place], gpu, way] = 1
        lent[lenders[gpu], gpu] = 1
    return {"peer_lane_gb_per_s": lane, "peer_link_use": use, "lent_use": lent}


def check_lenders(problem: Problem, lenders: Sequence[int]) -> tuple[int, ...]:
    """One lender for every GPU, -1 for none; raises InputError for another number of them, or one that borrows."""
    if not lenders:
        return (-1,) * problem.workload.device_count
    if len(lenders) != problem.workload.device_count:
        raise InputError(f"lenders: {len(lenders)} given for {problem.workload.device_count} devices")
    for gpu, lender in enumerate(lenders):
        if lender >= 0 and lenders[lender] >= 0:
            raise InputError(f"lenders: device {lender} lends to device {gpu} and borrows itself")
    return tuple(lenders)
