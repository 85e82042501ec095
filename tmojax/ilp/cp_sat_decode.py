"""From a solution in time to a schedule: every list in the order of starts, and what keeps others' order.

Frees stand at their effect, before what starts at the same moment. An `order` policy repeats the turns on links where
all copies are equal; waits repeat them on other links and between copies and collectives. So every instruction of the
simulation starts no later than in the solution.
"""

from __future__ import annotations

from dataclasses import dataclass

from tmojax.ilp.cp_sat_links import IN, OUT, Limit
from tmojax.ilp.cp_sat_step import StoreKind
from tmojax.ilp.cp_sat_times import DeviceTimes, Model, Segment, segments
from tmojax.problem import (
    COMMUNICATION_STREAM,
    FIRST_ENGINE_STREAM,
    LinkPolicy,
    LinkPolicyKind,
    ListBuilder,
    Placement,
    Schedule,
)

FREES, STARTS = 0, 1
Key = tuple  # ("run", run), ("rerun", rerun), ("copy", gap, way)


@dataclass(frozen=True)
class _Moving:
    """A copy, or a collective (device -1): what takes turns. streams: (device, stream) that it runs on."""

    key: Key
    device: int
    start: int
    end: int
    links: frozenset[int]
    streams: tuple[tuple[int, int], ...]


def decode_times(model: Model, times: tuple[DeviceTimes, ...]) -> Schedule:
    """The schedule of a solution. It may be faster than the solution, where that was not shifted to the left."""
    waits, signals = _pins(model, times)
    lists, rows = [], []
    for device in range(len(model.steps)):
        built, row_of = _DeviceList(model, device, times[device], waits, signals).build()
        lists.append(built)
        rows.append(row_of)
    initial = tuple(_placements(model, device, mine) for device, mine in enumerate(times))
    return Schedule(tuple(lists), initial, _policies(model, times, rows))


def _placements(model: Model, device: int, times: DeviceTimes) -> tuple[Placement, ...]:
    memory, host = model.problem.machine.devices[device].memory, model.host_memory[device]
    found = []
    for number, store in enumerate(model.steps[device].stores):
        if store.kind is StoreKind.STATE:
            where = host if number in times.resting else memory
            found += [Placement(tensor, (where,)) for tensor in store.members]
    return tuple(sorted(found, key=lambda placement: placement.tensor))


def _policies(model: Model, times: tuple[DeviceTimes, ...], rows: list[dict[Key, int]]) -> tuple[LinkPolicy, ...]:
    policies = [LinkPolicy()] * len(model.problem.machine.links)
    for limit in model.network.limits:
        if limit.kind is not Limit.SLOTS:
            continue
        turns = []
        for device, mine in enumerate(times):
            for way, starts in ((OUT, mine.out), (IN, mine.into)):
                if len(limit.share) > 1 and (device, way) in limit.share:
                    setup = model.network.paths[device][way].setup_ticks
                    turns += [(start + setup, device, rows[device]["copy", gap, way]) for gap, start in starts.items()]
        sequence = tuple((device, row) for _, device, row in sorted(turns))
        if sequence:
            policies[limit.link] = LinkPolicy(LinkPolicyKind.ORDER, limit.slots, (), sequence)
    return tuple(policies)


def _moving(model: Model, times: tuple[DeviceTimes, ...]) -> list[_Moving]:
    found = []
    for device, mine in enumerate(times):
        for way, starts in ((OUT, mine.out), (IN, mine.into)):
            path = model.network.paths[device][way]
            streams = tuple((device, FIRST_ENGINE_STREAM + engine) for engine in path.engines)
            for gap, start in starts.items():
                end = model.copy_end(device, gap, way, start)
                found.append(_Moving(("copy", gap, way), device, start, end, frozenset(path.links), streams))
    seen = set()
    for device, step in enumerate(model.steps):
        for index, run in enumerate(step.runs):
            if run.collective and (run.collective, run.micro_batch) not in seen:
                seen.add((run.collective, run.micro_batch))
                exchange = model.network.exchanges[run.collective]
                start = times[device].runs[index]
                streams = tuple((member, COMMUNICATION_STREAM) for member in exchange.devices)
                key = ("exchange", run.collective, run.micro_batch)
                found.append(_Moving(key, -1, start, start + exchange.ticks, exchange.links, streams))
    return sorted(found, key=lambda item: (item.start, item.device, item.key))


def _pins(model: Model, times: tuple[DeviceTimes, ...]):
    """(waits, signals): waits[device, key] = [(event, stream)] in front of an instruction; signals[device, key] = event
    behind it.

    A pin between two that may not share a link, if one ended (with the hand-over) before the other started. Of earlier
    ones on one stream the last is enough.
    """
    limits = {limit.link: limit for limit in model.network.limits}
    waits: dict[tuple[int, Key], list[tuple[int, int]]] = {}
    signals: dict[tuple[int, Key], int] = {}
    moving = [item for item in _moving(model, times) if item.links & limits.keys()]
    done: dict[tuple, _Moving] = {}
    for later in moving:
        for earlier in _last_before(moving, later, model.network.handover_ticks):
            shared = earlier.links & later.links & limits.keys()
            if earlier.device >= 0 and later.device >= 0:
                shared = {link for link in shared if limits[link].kind is Limit.SHARES}
            if not shared or set(earlier.streams) & set(later.streams):
                continue
            home = later.device if later.device >= 0 else earlier.device
            device, stream = next((s for s in later.streams if s[0] == home), later.streams[0])
            source, _ = next((s for s in earlier.streams if s[0] == device), earlier.streams[0])
            before = done.get((device, stream, source, earlier.streams))
            if before is not None and before.end >= earlier.end:
                continue
            done[device, stream, source, earlier.streams] = earlier
            event = signals.setdefault((source, earlier.key), len(signals))
            waits.setdefault((device, later.key), []).append((event, stream))
    return waits, signals


def _last_before(moving: list[_Moving], later: _Moving, handover: int) -> list[_Moving]:
    """Per stream the last that had ended when `later` started."""
    found: dict[tuple, _Moving] = {}
    for item in moving:
        if item.start >= later.start:
            break
        if item.end + handover <= later.start and item.links & later.links:
            key = item.streams[0]
            if key not in found or found[key].end < item.end:
                found[key] = item
    return list(found.values())


class _DeviceList:
    def __init__(self, model: Model, device: int, times: DeviceTimes, waits, signals) -> None:
        self.model, self.device, self.times = model, device, times
        self.step = model.steps[device]
        self.waits, self.signals = waits, signals
        self.memory = model.problem.machine.devices[device].memory
        self.host = model.host_memory[device]
        self.list = ListBuilder()
        self.row_of: dict[Key, int] = {}
        self.last_start = -1
        self.segments: dict[int, list[Segment]] = {
            store: segments(model, device, times, store) for store in range(len(self.step.stores))
        }

    def build(self):
        events = [*self._starts(), *self._frees()]
        for _, kind, _, key in sorted(events, key=lambda event: event[:3]):
            if kind == STARTS:
                self._start(key)
            else:
                self._free(key)
        return self.list.build(), self.row_of

    def _starts(self):
        """(position, STARTS, order among equals, key) of everything that starts."""
        runs, starts = self.step.runs, self.times.runs
        upcoming = [0] * len(runs)  # a collective stands before the next op, whenever it starts
        bound = None
        for index in reversed(range(len(runs))):
            upcoming[index] = starts[index] if bound is None else min(starts[index], bound)
            if not runs[index].collective:
                bound = starts[index]
        for index in range(len(runs)):
            yield upcoming[index], STARTS, index, ("run", index)
        count = len(runs)
        for number, start in self.times.reruns.items():
            yield start, STARTS, count + number, ("rerun", number)
        count += len(self.step.reruns)
        for gap, start in self.times.out.items():
            yield start, STARTS, count + 2 * gap, ("copy", gap, OUT)
        for gap, start in self.times.into.items():
            yield start, STARTS, count + 2 * gap + 1, ("copy", gap, IN)

    def _frees(self):
        model, device, times, step = self.model, self.device, self.times, self.step
        order = 0
        for index, run in enumerate(step.runs):
            if run.workspace_bytes:
                yield model.run_end(device, index, times.runs[index]), FREES, -1, ("retire", "run", index)
        for number, start in times.reruns.items():
            end = model.rerun_end(device, number, start)
            scratch = 0
            for store, gap in step.reruns[number].outputs:
                if gap in times.again:
                    continue
                if self._resident(store, start):
                    scratch += step.stores[store].size_bytes
                else:
                    order += 1
                    yield end, FREES, order, ("release", store, self.memory)
            if scratch or step.runs[step.reruns[number].run].workspace_bytes:
                yield end, FREES, -1, ("retire", "rerun", number)
        for store, found in self.segments.items():
            for segment in found:
                if segment.end < 0:
                    continue
                order += 1
                if len(step.stores[store].members) > 1:
                    yield from self._members(store, order)
                    continue
                yield segment.end, FREES, order, ("release", store, self.memory)
        last_of: dict[tuple[int, int], tuple[int, int]] = {}
        for gap, start in times.into.items():
            spec = step.gaps[gap]
            if spec.always or spec.seam:
                continue
            key = spec.store, spec.content
            last_of[key] = max(last_of.get(key, (-1, -1)), (model.copy_end(device, gap, IN, start), gap))
        for (store, _), (end, _) in last_of.items():
            order += 1
            yield end, FREES, order, ("release", store, self.host)

    def _members(self, store: int, order: int):
        """An alias group: each member is released behind its own last use."""
        for tensor, run in sorted(self.step.stores[store].member_last.items()):
            end = self.model.run_end(self.device, run, self.times.runs[run])
            yield end, FREES, order, ("member", store, tensor)

    def _resident(self, store: int, moment: int) -> bool:
        return any(s.start < moment and (s.end < 0 or s.end > moment) for s in self.segments[store])

    def _start(self, key: Key) -> None:
        pinned = key
        if key[0] == "run" and self.step.runs[key[1]].collective:
            run = self.step.runs[key[1]]
            pinned = ("exchange", run.collective, run.micro_batch)
        for event, stream in self.waits.get((self.device, pinned), ()):
            self.list.wait(event, stream)
        if key[0] == "copy":
            row = self._copy(key[1], key[2])
        else:
            run = self.step.runs[key[1] if key[0] == "run" else self.step.reruns[key[1]].run]
            row = (self.list.collective if run.collective else self.list.compute)(run.op, run.micro_batch)
        self.row_of[key] = self.last_start = row
        event = self.signals.get((self.device, pinned))
        if event is not None:
            self.list.signal(event, row)

    def _copy(self, gap: int, way: int) -> int:
        store = self.step.stores[self.step.gaps[gap].store]
        if way == OUT:
            return self.list.offload(store.members[0], store.instance, self.memory, self.host)
        return self.list.prefetch(store.members[0], store.instance, self.host, self.memory)

    def _free(self, key: Key) -> None:
        if key[0] == "retire":
            # Unwritten, it stands directly behind its instruction; that is where it is if nothing started since.
            row = self.row_of[key[1:]]
            if row != self.last_start:
                self.list.retire(row)
        elif key[0] == "member":
            self.list.release(key[2], self.step.stores[key[1]].instance, self.memory)
        else:
            store = self.step.stores[key[1]]
            self.list.release(store.members[0], store.instance, key[2])
