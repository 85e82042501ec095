"""Earliest starts for things whose orders are known: the timing of a schedule in the constraint model."""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass, field

from tmojax.ilp.cp_sat_links import IN, OUT, WHOLE, Limit
from tmojax.ilp.cp_sat_times import Model


class NotInModelError(Exception):
    """The schedule does something that the model cannot express; the message says what."""


@dataclass
class Item:
    """Something that takes time. rows: (device, row) of it (of a collective, several). need: items that end before it
    starts; after_start: items that start before it does. allocates: in device memory, in its list."""

    key: tuple
    device: int
    ticks: int
    order_s: float
    need: set[int] = field(default_factory=set)
    after_start: set[int] = field(default_factory=set)
    rows: list[tuple[int, int]] = field(default_factory=list)
    allocates: bool = False
    start: int = -1

    @property
    def end(self) -> int:
        return self.start + self.ticks


class Placing:
    """Earliest starts, in the order of the simulation; an item's predecessors are always placed first."""

    def __init__(self, model: Model, items: list[Item], frees: list[list[tuple[int, set[int]]]]) -> None:
        self.model, self.items, self.frees = model, items, frees
        self.freed: list[list[int]] = [[] for _ in frees]  # per device: latest effect of the first n frees
        self.limits = {limit.link: limit for limit in model.network.limits}
        self.held: dict[int, list[tuple[int, int, int, int, int]]] = {link: [] for link in self.limits}

    def run(self) -> None:
        for number in sorted(range(len(self.items)), key=lambda n: (self.items[n].order_s, self.items[n].device, n)):
            self._place(number)

    def _place(self, number: int) -> None:
        stack = [number]
        while stack:
            item = self.items[stack[-1]]
            if item.start >= 0:
                stack.pop()
                continue
            missing = [n for n in (*item.need, *item.after_start, *self._waited(item)) if self.items[n].start < 0]
            if missing:
                if len(stack) > len(self.items):
                    raise NotInModelError("an order in which the model deadlocks")
                stack.extend(missing)
                continue
            stack.pop()
            earliest = max((self.items[n].end for n in item.need), default=0)
            for other in item.after_start:
                begun = self.items[other].start
                earliest = max(earliest, begun if item.key[0] == "exchange" or self.items[other].key[0] == "exchange"
                               else begun + 1)  # fmt: skip
            earliest = max([earliest, *(self._freed(device, row) for device, row in item.rows if item.allocates)])
            item.start = self._take_turn(item, earliest)

    def _waited(self, item: Item) -> set[int]:
        """Items whose memory must be free before `item` starts, as far as they are not known to be."""
        found: set[int] = set()
        if item.allocates:
            for device, row in item.rows:
                for place in range(len(self.freed[device]), len(self.frees[device])):
                    free_row, waits = self.frees[device][place]
                    if free_row >= row:
                        break
                    found |= waits
        return found

    def _freed(self, device: int, row: int) -> int:
        """Effect of all frees before `row`."""
        known, frees = self.freed[device], self.frees[device]
        while len(known) < len(frees) and frees[len(known)][0] < row:
            effect = max((self.items[n].end for n in frees[len(known)][1]), default=0)
            known.append(max(effect, known[-1] if known else 0))
        latest, low = 0, 0
        high = len(known)
        while low < high:  # frees before `row` are a prefix
            middle = (low + high) // 2
            if frees[middle][0] < row:
                low, latest = middle + 1, known[middle]
            else:
                high = middle
        return latest

    def _take_turn(self, item: Item, earliest: int) -> int:
        """The first moment at which all links that are not free have room."""
        network = self.model.network
        collective = item.key[0] == "exchange"
        if collective:
            links = [link for link in self.limits if link in network.exchanges[item.key[1]].links]
            way, setup = -1, 0
        elif item.key[0] in ("out", "into"):
            way = OUT if item.key[0] == "out" else IN
            links = [link for link in self.limits if (item.device, way) in self.limits[link].share]
            setup = network.paths[item.device][way].setup_ticks
        else:
            return earliest
        moment, moved = earliest, True
        while moved:
            moved = False
            for link in links:
                later = self._room(link, item, way, moment, setup)
                if later > moment:
                    moment, moved = later, True
        for link in links:
            insort(self.held[link], (moment + item.ticks, moment, setup, item.device if not collective else -1, way))
        return moment

    def _room(self, link: int, item: Item, way: int, moment: int, setup: int) -> int:
        """`moment`, or the next one to try."""
        limit, handover = self.limits[link], self.model.network.handover_ticks
        tail = [entry for entry in self.held[link] if entry[0] + handover > moment]
        end = moment + item.ticks
        flows = []
        for other_end, other_start, other_setup, device, other_way in tail:
            wide = other_start < end + handover and moment < other_end + handover
            if wide and (way < 0 or device < 0):
                return other_end + handover
            if limit.kind is Limit.SHARES:
                if wide:
                    share = limit.share[device, other_way]
                    flows.append((other_start, other_end + handover, share))
            elif other_start + other_setup < end and moment + setup < other_end:
                flows.append((other_start + other_setup, other_end, 1))
        if way < 0 or not flows:
            return moment
        own, most = (1, limit.slots) if limit.kind is Limit.SLOTS else (limit.share[item.device, way], WHOLE)
        begin = moment + (setup if limit.kind is Limit.SLOTS else 0)
        for point in (begin, *(start for start, _, _ in flows if start > begin)):
            if own + sum(taken for start, stop, taken in flows if start <= point < stop) > most:
                stop = min(stop for _, stop, _ in flows if stop > begin)
                return moment + stop - begin
        return moment
