"""From a problem to the arrays of the periodic model."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import jax.numpy as jnp
import numpy as np

from tmojax.cost.chains import NEVER, Chains, can_be_dropped, find_chains, shared_producers
from tmojax.cost.model import GB, PEER, PeriodicModel
from tmojax.cost.slots import FluidSlots, merge_slots
from tmojax.cost.state import find_state_gaps
from tmojax.cost.tail import collective_slot_s, step_collectives
from tmojax.cost.ways import allow_further, best_codec, check_lenders, coding_arrays, peer_arrays, peer_routes, width
from tmojax.errors import InputError
from tmojax.problem import Action, Lifetime, Problem
from tmojax.problem.step_view import StepView

MOST_SLOTS = 160


def can_relax(view: StepView) -> bool:
    """Whether there is a model of a step: two ops of a micro-batch to choose between, and time that they take."""
    return len(view.slot_s) >= 2 and float(view.slot_s.sum()) > 0


def relax_problem(
    problem: Problem, views: Sequence[StepView], *, most_slots: int = MOST_SLOTS, dtype=jnp.float32,
    lenders: Sequence[int] = ()
) -> PeriodicModel:  # fmt: skip
    """Build the model of a problem; `views[g]`: the step of device g, or of one that runs the same in as much memory.

    `most_slots`: fluid slots of one micro-batch. `lenders`: who may lend memory to each device (-1: nobody; by default
    nobody does). With one micro-batch per step the model does not wrap around. Raises
    InputError for a device without slots or when there are no views.
    """
    if len(views) != problem.workload.device_count:
        raise InputError(f"views: {len(views)} given for {problem.workload.device_count} devices; give one for each")
    if most_slots < 4:
        raise InputError(f"most_slots: {most_slots} is too few to tell forward from backward; give at least 4")
    for view in views:
        if not can_relax(view):
            raise InputError(f"device {view.device}: a micro-batch needs at least two ops and some compute time")
    lenders, codec = check_lenders(problem, lenders), best_codec(problem)
    choices = width(problem, lenders)
    parts: dict[int, tuple[dict[str, np.ndarray], Chains]] = {}
    state: dict[int, tuple[tuple[int, int, int], ...]] = {}
    for view in views:
        if id(view) not in parts:
            slots = merge_slots(view, most_slots)
            arrays, chains = _device_arrays(problem, view, slots, choices)
            if choices > 3:
                allow_further(problem, view, slots, arrays["allowed"])
            arrays |= coding_arrays(problem, view, slots, codec)
            arrays, state[id(view)] = _with_state(problem, view, slots, arrays)
            parts[id(view)] = arrays, chains
    per_gpu = [parts[id(view)][0] for view in views]
    stacked = {name: _stack([part[name] for part in per_gpu], name) for name in per_gpu[0]}
    if choices > 3:
        stacked["allowed"][np.array(lenders) < 0, :, PEER] = False
    paths = _path_arrays([parts[id(view)][1] for view in views], stacked)
    candidates = [len(view.size_bytes) for view in views]
    lane, links, link_use = _host_paths(problem, views, lenders)
    link_names = tuple(problem.machine.links[link].name for link in links)
    interference = problem.machine.interference
    resting = [float(view.state_bytes[view.state_resting].sum()) / GB for view in views]
    may_offload = Action.OFFLOAD in problem.actions
    groups = stacked.pop("group")
    turns = zip(views, groups, strict=True)
    others, padded = stacked["other_outputs"], stacked["size_gb"].shape[1]
    stacked["other_outputs"] = np.where(others == NEVER, padded, others)
    for name in ("own_use", "again_s"):
        del stacked[name]
    host_gb, host_use = _host_memory(problem, views)
    arrays = dict(
        {**stacked, **{name: value for name, value in paths.items() if not name.startswith("level")}},
        capacity_gb=np.array([problem.capacity_bytes(view.device) / GB for view in views]),
        lane_gb_per_s=lane,
        link_gb_per_s=np.array([problem.machine.links[link].bandwidth_bytes_per_s / GB for link in links]),
        link_use=link_use,
        **peer_arrays(problem, views, lenders, links, lambda g, route: _lane(problem, views[g], route)),
        coded_share=np.array(_coded_share(problem, codec)),
        resting_gb=np.array(resting if may_offload else [0.0] * len(views)),
        host_gb=host_gb,
        host_use=host_use,
        update_s=np.array([float(view.step_s.sum()) for view in views]),
        turn_slot=np.array([merged[min(view.forward_end, len(view.slot_op) - 1)] for view, merged in turns]),
        **_collectives(problem, views, groups, link_names),
        compute_slowdown=np.array([interference.compute_during_copy_out, interference.compute_during_copy_in]),
        copy_slowdown=np.array(interference.copy_during_compute),
        unit_s=np.array(max(float(part["slot_s"].sum()) for part in per_gpu)),
    )
    kinds = {"f": dtype, "i": jnp.int32, "b": jnp.bool_}
    return PeriodicModel(
        **{name: jnp.asarray(value, kinds[np.asarray(value).dtype.kind]) for name, value in arrays.items()},
        level_first=tuple(jnp.asarray(level, jnp.int32) for level in paths["level_first"]),
        level_rest=tuple(jnp.asarray(level, jnp.int32) for level in paths["level_rest"]),
        micro_batches=problem.workload.micro_batches,
        wraps=problem.workload.micro_batches > 1,
        link_names=link_names,
        candidates=tuple(candidates),
        state=tuple(state[id(view)] for view in views),
        merged=tuple(tuple(int(g) for g in row) for row in groups),
        codec=codec,
        lenders=lenders,
    )


def _device_arrays(
    problem: Problem, view: StepView, slots: FluidSlots, choices: int
) -> tuple[dict[str, np.ndarray], Chains]:
    """Arrays of one device by field name, in the units of the model, and its recompute chains."""
    count, size = len(view.size_bytes), view.size_bytes / GB
    possible = can_be_dropped(view) & (Action.RECOMPUTE in problem.actions)
    slot_s = slots.slot_s + np.bincount(slots.group, collective_slot_s(problem, view), len(slots.slot_s))
    places = np.arange(len(slot_s))[:, None]
    own_use = np.where(view.needed, slots.idle_to, slots.idle_to + 1)
    allowed = np.zeros((count, choices), bool)
    allowed[:, 0] = True
    allowed[:, 1] = view.may_offload & (slots.idle_to - slots.idle_from > 1) & (Action.OFFLOAD in problem.actions)
    allowed[:, 2] = possible | ~view.needed
    wanted = np.array([any(possible[d] for d in dependents) for dependents in view.dependents], bool)
    allowed[~view.needed & ~wanted, :2] = False  # nothing can ask for it: it is dropped
    again_s = np.where(possible, view.recompute_s, 0.0)
    return {
        "slot_s": slot_s,
        "base_gb": slots.base_bytes / GB,
        "size_gb": size,
        "produced_gb": (places > slots.idle_from) * size,
        "absorbed_gb": (places >= np.maximum(own_use, slots.idle_from + 1)) * size,
        "due_gb": (places >= slots.idle_to) * size,
        "use_s": (places == slots.idle_to) * np.where(view.needed, again_s, 0.0),
        "needed": view.needed,
        "allowed": allowed,
        "clean": np.zeros(count, bool),
        "around_gb": np.zeros(count),
        "other_outputs": shared_producers(view),
        "group": slots.group,
        "own_use": own_use,
        "again_s": again_s,
    }, find_chains(view, slots, possible)


def _with_state(
    problem: Problem, view: StepView, slots: FluidSlots, arrays: dict[str, np.ndarray]
) -> tuple[dict[str, np.ndarray], tuple[tuple[int, int, int], ...]]:
    """The arrays with state that may leave within the step behind the candidates, and `PeriodicModel.state`."""
    gaps = find_state_gaps(problem, view)
    if Action.OFFLOAD not in problem.actions or not len(gaps.state):
        return arrays, ()
    size, places = view.state_bytes[gaps.state] / GB, np.arange(len(slots.slot_s))[:, None]
    left, back = slots.group[gaps.last_use], slots.group[gaps.next_use]
    around = gaps.next_use <= gaps.last_use
    inside = np.where(around, (places > left) | (places < back), (places > left) & (places < back))
    shape = (len(slots.slot_s), len(size))
    columns = {
        "size_gb": size,
        "produced_gb": (places > left) * size,
        "absorbed_gb": (places >= back) * size,
        "due_gb": (places >= back) * size,
        "use_s": np.zeros(shape),
        "needed": np.ones(len(size), bool),
        "allowed": np.tile(np.arange(arrays["allowed"].shape[1]) < 2, (len(size), 1)),
        "clean": gaps.clean,
        "around_gb": around * size,
        "other_outputs": np.full((len(size), arrays["other_outputs"].shape[1]), NEVER),
        "own_use": back,
        "again_s": np.zeros(len(size)),
        "coding_s": np.zeros(shape),
        "coding_gb": np.zeros(shape),
    }
    joined = {
        name: np.concatenate([arrays[name], column], axis=0 if name in ("allowed", "other_outputs") else -1)
        for name, column in columns.items()
    }
    joined["base_gb"] = arrays["base_gb"] - (inside * size).sum(axis=1)
    rows = zip(gaps.state.tolist(), gaps.last_use.tolist(), gaps.next_use.tolist(), strict=True)
    return arrays | joined, tuple(rows)


def _collectives(
    problem: Problem, views: Sequence[StepView], merged: np.ndarray, link_names: tuple[str, ...]
) -> dict[str, np.ndarray]:
    """The fields of the model about the step's collectives; those that a GPU has fewer of are padded with 0."""
    found = [step_collectives(problem, view) for view in views]
    links = [[link.name for link in problem.machine.links].index(name) for name in link_names]
    count = max(len(item.before) for item in found)
    slot = np.zeros((len(views), count), np.int64)
    left_s, left_gb = np.zeros((len(views), count)), np.zeros((len(views), len(links), count))
    for g, item in enumerate(found):
        own = len(item.before)
        slot[g, :own] = np.where(item.before < 0, -1, merged[g][np.maximum(item.before, 0)])
        left_s[g, :own], left_gb[g, :, :own] = item.left_s, item.left_gb[links]
    return {"sync_slot": slot, "sync_left_s": left_s, "sync_left_gb": left_gb}


def _path_arrays(chains: Sequence[Chains], stacked: dict[str, np.ndarray]) -> dict[str, Any]:
    """Paths of all GPUs, padded level by level (a level: paths of one length), with place P for "no path"."""
    gpus, slots, candidates = stacked["produced_gb"].shape
    longest = max((int(chain.length.max(initial=0)) for chain in chains), default=0)
    sizes = [max(int((chain.length == n).sum()) for chain in chains) for n in range(1, longest + 1)]
    offsets = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
    count = int(offsets[-1])
    width = max((int(np.bincount(chain.owner).max(initial=0)) for chain in chains if len(chain.owner)), default=0)
    first = np.full((gpus, count), candidates, np.int64)
    rest = np.full((gpus, count), count, np.int64)
    owner = np.zeros((gpus, count), np.int64)
    place = np.zeros((gpus, count), np.int64)
    grid = np.full((gpus, candidates, width), count, np.int64)
    early = np.zeros((gpus, slots, count))
    shift = np.zeros((gpus, slots, count))
    for g, chain in enumerate(chains):
        number = np.arange(len(chain.length)) - np.searchsorted(chain.length, chain.length)
        at = offsets[chain.length - 1] + number
        first[g, at], owner[g, at] = chain.first, chain.owner
        rest[g, at] = np.where(chain.rest >= 0, at[chain.rest] if len(at) else 0, count)
        order = np.lexsort((chain.slot, chain.owner))
        column = np.arange(len(order)) - np.searchsorted(chain.owner[order], chain.owner[order])
        grid[g, chain.owner[order], column] = at[order]
        place[g, at[order]] = chain.owner[order] * width + column
        own_use, when = stacked["own_use"][g, chain.owner], np.arange(slots)[:, None]
        early[g][:, at] = ((when >= chain.slot) & (when < own_use)) * stacked["size_gb"][g, chain.owner]
        leaves = (when == own_use) & stacked["needed"][g, chain.owner]
        shift[g][:, at] = ((when == chain.slot) * 1.0 - leaves) * stacked["again_s"][g, chain.owner]
    bounds = list(pairwise(offsets))
    return {
        "level_first": [first[:, low:high] for low, high in bounds],
        "level_rest": [rest[:, low:high] for low, high in bounds[1:]],
        "path_owner": owner,
        "path_place": place,
        "path_grid": grid,
        "early_gb": early,
        "shift_s": shift,
    }


def _coded_share(problem: Problem, codec: int) -> float:
    if not problem.machine.codecs:
        return 1.0
    return problem.machine.codecs[codec].numerator / problem.machine.codecs[codec].denominator


def _lane(problem: Problem, view: StepView, route: Sequence[int]) -> float:
    """GB/s of one GPU's copies over a route alone.

    A copy holds its engine during set-up and latency, in which nothing moves; the lane is slower by the share of that
    time in a copy of mean size.
    """
    machine = problem.machine
    movable = view.size_bytes[view.may_offload & (view.size_bytes > 0)]
    mean_bytes = float((movable.astype(float) ** 2).sum() / movable.sum()) if len(movable) else 1.0
    rate = min(machine.links[link].bandwidth_bytes_per_s for link in route)
    idle_s = machine.overheads.transfer_setup_s + sum(machine.links[link].latency_s for link in route)
    return mean_bytes / (mean_bytes / rate + idle_s) / GB


def _host_paths(
    problem: Problem, views: Sequence[StepView], lenders: Sequence[int]
) -> tuple[np.ndarray, list[int], np.ndarray]:
    """(lane rate [gpu, 2] in GB/s, links that are shared, which of the host copies cross them [link, gpu, 2])."""
    machine = problem.machine
    use = np.zeros((len(machine.links), len(views), 2))
    lane = np.zeros((len(views), 2))
    for g, view in enumerate(views):
        device = machine.devices[g]
        ways = ((device.memory, device.host_memory), (device.host_memory, device.memory))
        for direction, way in enumerate(ways):
            links = machine.route(*way).links
            use[list(links), g, direction] = 1
            lane[g, direction] = _lane(problem, view, links)
    users = use.sum(axis=(1, 2))
    for _, _, links in peer_routes(machine, lenders):
        users[list(links)] += 1
    shared = np.flatnonzero(users > 1)
    return lane, shared.tolist(), use[shared]


def _host_memory(problem: Problem, views: Sequence[StepView]) -> tuple[np.ndarray, np.ndarray]:
    """(GB left beside the inputs [host], host_use [host, gpu]) of the memories that the GPUs offload to."""
    machine, workload = problem.machine, problem.workload
    hosts = sorted({machine.devices[g].host_memory for g in range(len(views))})
    use = np.zeros((len(hosts), len(views)))
    left = np.zeros(len(hosts))
    for h, host in enumerate(hosts):
        memory = machine.memories[host]
        limit = memory.capacity_bytes - memory.reserve_bytes
        left[h] = min(limit, memory.pinned_limit_bytes) if memory.pinned_limit_bytes >= 0 else limit
    for g, view in enumerate(views):
        h = hosts.index(machine.devices[g].host_memory)
        use[h, g] = 1
        program = workload.program(view.device)
        for tensor in program.inputs:
            instances = workload.micro_batches if program.tensors[tensor].lifetime is Lifetime.MICRO_BATCH else 1
            left[h] -= instances * program.tensors[tensor].size_bytes
    return left / GB, use


def _stack(parts: list[np.ndarray], name: str) -> np.ndarray:
    """Stack per-device arrays along a new first axis; shorter ones are padded behind."""
    shape = np.max([part.shape for part in parts], axis=0)
    padding = {"other_outputs": NEVER, "group": -1}.get(name, 0)

    def padded(part: np.ndarray) -> np.ndarray:
        behind = [(0, int(full - own)) for full, own in zip(shape, part.shape, strict=True)]
        return np.pad(part, behind, constant_values=padding)

    return np.stack([padded(part) for part in parts])
