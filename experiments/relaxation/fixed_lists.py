"""What the lists of a plan ask of the timing of the periodic model: one micro-batch in the middle of the step."""

from __future__ import annotations

from collections.abc import Sequence

import equinox as eqx
import numpy as np
from jaxtyping import Array, Float, Int

from tmojax.cost.tail import step_collectives
from tmojax.cost.timeline import Demand
from tmojax.planners.workbench import Workbench
from tmojax.problem import Kind
from tmojax.relax.coordinate import Coordination
from tmojax.relax.decisions import DeviceDecision, Rest
from tmojax.relax.decode import DoesNotFit
from tmojax.relax.replayed import RunList, read_list

MOST_SLOTS = 400

Plan = tuple[tuple[DeviceDecision, ...], Coordination]


class FixedLists(eqx.Module):
    """slot_s: compute of a slot, recomputation included. lane_gb_per_s: one GPU's copies alone, with set-up. sync_slot:
    as in `PeriodicModel`."""

    slot_s: Float[Array, "gpu slot"]
    lane_gb_per_s: Float[Array, "gpu 2"]
    sync_slot: Int[Array, "gpu collective"]
    demand: Demand


def read_plans(bench: Workbench, plans: Sequence[Plan]) -> FixedLists:
    """The lists of all plans, one leading axis; slots behind a list's last take no time and ask nothing."""
    devices = [
        [_read_device(bench, device, decision) for device, decision in enumerate(decisions)] for decisions, _ in plans
    ]
    width = max(len(one["slot_s"]) for plan in devices for one in plan)
    read = {}
    for name in devices[0][0]:
        mode = "constant" if name == "slot_s" else "edge"
        per_slot = name in ("slot_s", "ready", "due", "gone", "open")
        read[name] = np.array(
            [[np.pad(one[name], (0, width - len(one[name])), mode=mode) if per_slot else one[name] for one in plan]
             for plan in devices], np.float32,
        )  # fmt: skip
    nothing = np.zeros_like(read["slot_s"])
    asked = Demand(
        held_gb=nothing, ready_gb=read["ready"], absorbed_gb=nothing, due_gb=read["due"], recompute_s=nothing,
        total_gb=read["total"], state_gb=read["state"], gone_gb=read["gone"], open_gb=read["open"],
        uncopied_gb=nothing, state_away_gb=np.zeros_like(read["state"]),
    )  # fmt: skip
    return FixedLists(read["slot_s"], read["lane"], read["sync_slot"].astype(np.int32), asked)


def _read_device(bench: Workbench, device: int, decision: DeviceDecision) -> dict[str, np.ndarray | float]:
    """Cumulative GB before or in each slot (see `Demand`); a slot holds runs between which none of it changes."""
    found = bench.decode(device, decision)
    assert not isinstance(found, DoesNotFit)
    one = read_list(bench.problem, device, found.rows)
    runs = _middle_runs(bench, device, found.rows)
    first, end = int(runs[0]), int(runs[-1]) + 1
    out, into = (np.cumsum([0.0, *table[:, 0]]) for table in one.copies)
    needs = np.maximum.accumulate(one.needs, axis=0)
    issued_out, issued_in = (np.searchsorted(table[:, 1], runs, "right") for table in one.copies)
    before_out = int(np.searchsorted(one.copies[0][:, 1], first, "right"))
    before_in = int(needs[first - 1, 1]) if first else 0
    last_out = int(np.searchsorted(one.copies[0][:, 1], end, "left"))
    last_in = int(needs[end - 1, 1])
    total = into[last_in] - into[before_in]
    ready, gone = out[issued_out] - out[before_out], np.maximum(out[needs[runs, 0]] - out[before_out], 0.0)
    opened, due = np.clip(into[issued_in] - into[before_in], 0.0, total), into[needs[runs, 1]] - into[before_in]
    group = _slots(one.seconds[runs], (ready, gone, opened, due))
    begin = np.flatnonzero(np.diff(group, prepend=-1))
    stop = np.append(begin[1:], len(runs)) - 1
    view = bench.view(device)
    resting = view.state_resting & (decision.state_out == Rest.ON_HOST)
    return {
        "slot_s": np.bincount(group, one.seconds[runs]),
        "ready": ready[begin],
        "gone": gone[stop],
        "open": opened[begin],
        "due": due[stop],
        "total": total,
        "state": float(view.state_bytes[resting].sum()) / 1e9,
        "sync_slot": _sync_slots(bench, device, found.rows, runs, group),
        "lane": _lanes(bench, device, one, (slice(before_out, last_out), slice(before_in, last_in))),
    }


def _sync_slots(bench: Workbench, device: int, rows: np.ndarray, runs: np.ndarray, group: np.ndarray) -> np.ndarray:
    """Slot behind which each collective of the step may start: as in the last micro-batch, so in the middle one."""
    view = bench.view(device)
    ops = rows["op"][np.isin(rows["kind"], (Kind.COMPUTE, Kind.COLLECTIVE))][runs].tolist()
    before = step_collectives(bench.problem, view).before.tolist()
    return np.array([group[ops.index(view.slot_op[slot])] if slot >= 0 else -1 for slot in before], np.int64)


def _middle_runs(bench: Workbench, device: int, rows: np.ndarray) -> np.ndarray:
    """Runs of the middle micro-batch, without those of the step's own ops."""
    is_run = np.isin(rows["kind"], (Kind.COMPUTE, Kind.COLLECTIVE))
    is_step = np.array([op.step_op for op in bench.problem.workload.program(device).ops])[rows["op"][is_run]]
    middle = bench.view(device).micro_batches // 2
    return np.flatnonzero((rows["micro_batch"][is_run] == middle) & ~is_step)


def _slots(seconds: np.ndarray, cumulative: Sequence[np.ndarray]) -> np.ndarray:
    """[run] slot: a new one where something changes, or `MOST_SLOTS` of equal time if that would be more."""
    new = np.zeros(len(seconds), bool)
    for values in cumulative:
        new[1:] |= np.diff(values) > 0
    group = np.cumsum(new)
    if group[-1] >= MOST_SLOTS:
        share = np.cumsum(seconds) / seconds.sum()
        group = np.unique(np.minimum((share * MOST_SLOTS).astype(int), MOST_SLOTS - 1), return_inverse=True)[1]
    return group


def _lanes(bench: Workbench, device: int, one: RunList, copied: tuple[slice, slice]) -> np.ndarray:
    machine = bench.problem.machine
    spec = machine.devices[device]
    ways = ((spec.memory, spec.host_memory), (spec.host_memory, spec.memory))
    rates = []
    for way, table, part in zip(ways, one.copies, copied, strict=True):
        links = [machine.links[link] for link in machine.route(*way).links]
        rate = min(link.bandwidth_bytes_per_s for link in links) / 1e9
        setup_s = machine.overheads.transfer_setup_s + sum(link.latency_s for link in links)
        moved, count = float(table[part, 0].sum()), len(table[part])
        rates.append(moved / (moved / rate + count * setup_s) if moved else rate)
    return np.array(rates)
