"""What the network sees of a candidate: its size, cost and idle interval, its place among the others, and the step that
it belongs to. NumPy only, and only ratios, so that a step in other units looks the same."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from jaxtyping import Float

from tmojax.problem import Problem
from tmojax.problem.step_view import StepView
from tmojax.relax.coordinate import host_links

LIMIT = 8.0  # of a logarithm: what is beyond, e.g. of links without limit, looks alike
FEATURES = 31
STEEP = 10.0  # how fast the logit of recompute falls over the shares of the bytes, cheapest first
KEPT = -2.0  # logit of keep: what need not leave stays anyway, since the decode does not move it


class Surroundings(NamedTuple):
    """What a device's view does not say. Rates of its host path, bytes per second: out, in, and on links that both
    directions use (inf: none), alone and as an equal share. taken_bytes: of the step's collectives on its share of the
    fullest link. devices: how many GPUs the step has."""

    capacity_bytes: float
    alone_out: float
    alone_in: float
    alone_joint: float
    share_out: float
    share_in: float
    share_joint: float
    taken_bytes: float
    devices: float


def surroundings_of(problem: Problem, device: int) -> Surroundings:
    """The surroundings of a device, in a step of `problem`."""
    machine = problem.machine
    spec = machine.devices[device]
    out = set(machine.route(spec.memory, spec.host_memory).links)
    into = set(machine.route(spec.host_memory, spec.memory).links)
    users = [host_links(machine, other) for other in range(len(machine.devices))]
    sharing = {link: max(1, sum(link in used for used in users)) for link in out | into}

    def rate(links: set[int], shared: bool) -> float:
        return min(
            (machine.links[link].bandwidth_bytes_per_s / (sharing[link] if shared else 1) for link in links),
            default=float("inf"),
        )

    taken: dict[int, float] = {}
    for collective in problem.workload.collectives:
        for link, load in machine.collective_loads(collective.kind, collective.devices).items():
            taken[link] = taken.get(link, 0.0) + load * collective.size_bytes
    both = out & into
    return Surroundings(
        float(problem.capacity_bytes(device)),
        rate(out, False), rate(into, False), rate(both, False), rate(out, True), rate(into, True), rate(both, True),
        max((taken.get(link, 0.0) / sharing[link] for link in out | into), default=0.0),
        float(len(machine.devices)),
    )  # fmt: skip


def interval_features(view: StepView, around: Surroundings) -> Float[np.ndarray, "candidate {FEATURES}"]:
    """One row for each candidate of the view, of order one."""
    size = np.maximum(view.size_bytes.astype(float), 1.0)
    period_s = max(float(view.slot_s.sum()), 1e-12)
    clock = np.concatenate([[0.0], np.cumsum(view.slot_s)]) / period_s
    slots = len(view.slot_s)
    idle_to = np.minimum(view.idle_to, slots)
    begin, end = clock[np.minimum(view.idle_from + 1, slots)], clock[idle_to]
    # What recomputing costs: the op alone, with what nobody keeps anyway, and with everything before it.
    alone_s = np.maximum(view.recompute_s, 1e-9)
    chain_s, whole_s = alone_s.copy(), alone_s.copy()
    for index in np.argsort(view.producer_slot, kind="stable").tolist():
        for source in view.recompute_inputs[index]:
            chain_s[index] += 0.0 if view.needed[source] else chain_s[source]
            whole_s[index] += whole_s[source]
        whole_s[index] = min(whole_s[index], period_s)
    freed_bytes = _freed_bytes(view)
    total = max(float(size[view.needed].sum()), 1.0)
    cheaper, border = cheapest_first(view, around)
    # Bytes that must leave, that could come back in time, each way.
    over = max(float((view.keep_bytes - around.capacity_bytes).max()), 0.0) / total
    base_over = float((view.base_bytes - around.capacity_bytes).max()) / total

    def time_share(out: float, into: float, joint: float) -> float:
        """To move everything out and in again, in periods."""
        return total * max(1 / out, 1 / into, 2 / joint) / period_s

    alone, share = time_share(*around[1:4]), time_share(*around[4:7])
    taken = around.taken_bytes / max(view.micro_batches, 1) / around.share_out / period_s
    per_byte = 1 / (total / period_s)
    inputs = np.array([len(item) for item in view.recompute_inputs], float)
    kept_inputs = np.array([sum(view.needed[list(item)]) for item in view.recompute_inputs], float)
    users = np.array([len(item) for item in view.dependents], float)
    input_bytes = np.array([size[list(item)].sum() for item in view.recompute_inputs])
    rank = np.argsort(np.argsort(size, kind="stable"), kind="stable") / max(len(size), 1)
    columns = [
        _log(size / total * 100),
        rank,
        _log(alone_s / freed_bytes / per_byte),
        _log(chain_s / freed_bytes / per_byte),
        _log(whole_s / freed_bytes / per_byte),
        _log(alone_s / freed_bytes / per_byte / share),
        _log(chain_s / freed_bytes / per_byte / alone),
        cheaper,
        cheaper - border,
        cheaper - over,
        _log(freed_bytes / size),
        begin,
        end,
        end - begin,
        (end - begin) / max(share, 1e-3),
        view.needed,
        view.may_offload,
        view.may_recompute,
        np.log1p(inputs),
        np.log1p(kept_inputs),
        np.log1p(users),
        _log((input_bytes + size) / size),
        view.producer_slot < view.forward_end,
        np.log1p(np.maximum(view.idle_from - view.producer_slot, 0)),
        over,
        np.clip(base_over, -2, 2),
        _log(share),
        _log(alone),
        min(taken, 4.0),
        view.micro_batches == 1,
        np.log(around.devices),
    ]
    return np.stack([np.broadcast_to(np.asarray(column, float), len(size)) for column in columns], axis=1)


def cheapest_first(view: StepView, around: Surroundings) -> tuple[Float[np.ndarray, " candidate"], float]:
    """(where a candidate stands when the cheapest seconds per byte are recomputed first, where to stop so that the rest
    can be moved on the device's share of its links in the time of the computation), both as shares of the bytes that
    backward uses: what the heuristic `ratio-sweep` orders by, and its threshold at load 1."""
    size = np.maximum(view.size_bytes.astype(float), 1.0)
    total = max(float(size[view.needed].sum()), 1.0)
    droppable = np.where(view.may_recompute & view.needed, size, 0.0)
    order = np.argsort(view.recompute_s / _freed_bytes(view), kind="stable")
    cheaper = np.empty(len(size))
    cheaper[order] = np.cumsum(droppable[order]) / total
    rate = min(around.share_out, around.share_in, around.share_joint)
    return cheaper, float(droppable.sum() - min(rate * float(view.slot_s.sum()), droppable.sum())) / total


def prior_logits(view: StepView, around: Surroundings) -> Float[np.ndarray, "candidate 3"]:
    """Logits of keep, offload and recompute that say what the heuristic would do; the network adds to them."""
    cheaper, border = cheapest_first(view, around)
    recompute = np.where(view.needed, np.clip(STEEP * (border - cheaper), -LIMIT, LIMIT), LIMIT)
    return np.stack([np.full(len(cheaper), KEPT), np.zeros(len(cheaper)), recompute], axis=1)


def _freed_bytes(view: StepView) -> np.ndarray:
    """[I] bytes that backward would keep of all outputs of a candidate's op; its own size at least."""
    size = np.maximum(view.size_bytes.astype(float), 1.0)
    freed = np.zeros(len(view.slot_s))
    droppable = view.may_recompute & view.needed
    np.add.at(freed, view.producer_slot[droppable], size[droppable])
    return np.maximum(freed[view.producer_slot], size)


def _log(values: np.ndarray | float) -> np.ndarray:
    return np.clip(np.log(np.maximum(values, 1e-9)), -LIMIT, LIMIT)
