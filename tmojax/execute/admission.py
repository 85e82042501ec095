"""Who may copy when: copy engines that several lists use, and link policies with turns (semantics 4.1 and 8.3)."""

from __future__ import annotations

import threading
from dataclasses import dataclass

from tmojax.execute.tokens import Abort
from tmojax.problem import LinkPolicy, LinkPolicyKind, Machine, Schedule

_POLL_S = 0.1


@dataclass(frozen=True, slots=True)
class _Request:
    rank: int
    ticket: int
    device: int
    index: int
    links: tuple[int, ...]


class Admission:
    """Admits the transfers of one step. A transfer holds its engines, then waits for its links."""

    def __init__(self, machine: Machine, schedule: Schedule, abort: Abort) -> None:
        self._machine, self._abort = machine, abort
        policies = schedule.link_policies or (LinkPolicy(),) * len(machine.links)
        self._policies = {link: policy for link, policy in enumerate(policies) if policy.kind != LinkPolicyKind.FAIR}
        self._free = {link: policy.slots for link, policy in self._policies.items()}
        self._turn = dict.fromkeys(self._policies, 0)
        self._busy_engines: set[int] = set()
        self._queue: list[tuple[int, frozenset[int]]] = []  # (ticket, engines) that wait for their engines
        self._waiting: list[_Request] = []
        self._tickets = 0
        self._changed = threading.Condition()

    def enter(self, device: int, index: int, source: int, destination: int) -> None:
        """Block until the transfer has its engines and its turn on every link."""
        route = self._machine.route(source, destination)
        engines = frozenset(route.engines)
        links = tuple(link for link in route.links if link in self._policies)
        with self._changed:
            place = (self._ticket(), engines)
            self._queue.append(place)
            while not self._engines_free(place):
                self._wait()
            self._queue.remove(place)
            self._busy_engines |= engines
            if links:
                request = _Request(self._rank(device, links), self._ticket(), device, index, links)
                self._waiting.append(request)
                self._admit()
                while request in self._waiting:
                    self._wait()

    def leave(self, source: int, destination: int) -> None:
        """The bytes of a transfer have arrived."""
        route = self._machine.route(source, destination)
        with self._changed:
            self._busy_engines -= set(route.engines)
            for link in route.links:
                if link in self._free:
                    self._free[link] += 1
            self._admit()
            self._changed.notify_all()

    def _ticket(self) -> int:
        self._tickets += 1
        return self._tickets

    def _wait(self) -> None:
        self._changed.wait(_POLL_S)
        self._abort.check()

    def _engines_free(self, place: tuple[int, frozenset[int]]) -> bool:
        """Nobody uses the engines, and nobody who came earlier wants one of them."""
        ahead = any(ticket < place[0] and engines & place[1] for ticket, engines in self._queue)
        return not ahead and not self._busy_engines & place[1]

    def _rank(self, device: int, links: tuple[int, ...]) -> int:
        ranks = [0]
        for link in links:
            policy = self._policies[link]
            if policy.kind is LinkPolicyKind.PRIORITY:
                order = policy.device_rank
                ranks.append(order.index(device) if device in order else len(order))
        return max(ranks)

    def _eligible(self, request: _Request) -> bool:
        for link in request.links:
            policy = self._policies[link]
            if self._free[link] < 1:
                return False
            if policy.kind is LinkPolicyKind.ORDER:
                if policy.sequence[self._turn[link]] != (request.device, request.index):
                    return False
        return True

    def _admit(self) -> None:
        while True:
            eligible = [request for request in self._waiting if self._eligible(request)]
            if not eligible:
                return
            first = min(eligible, key=lambda r: (r.rank, r.ticket, r.device, r.index))
            self._waiting.remove(first)
            for link in first.links:
                self._free[link] -= 1
                self._turn[link] += 1
            self._changed.notify_all()
