"""One search through everything that can happen to lists of instructions. The second part of the oracle.

Starts and ends of instructions are separate events, so whatever can be in flight together is. A state is: what has
started, what is complete, the value in every copy, the newest value of every instance. The search visits each state
once. Times do not matter: any instruction may take any time, any signal to another device any delay.
"""

from __future__ import annotations

from dataclasses import dataclass

from unrolled import LOST, Copy, Fault, Step, Unrolled, made, need

from tmojax.problem import Kind, LinkPolicyKind, MemoryKind, Problem, Schedule

ABSENT, COMING = None, ("coming",)  # no copy; a copy that is being written, or a version that is being made
INSTANT = (Kind.RELEASE, Kind.RETIRE, Kind.SIGNAL, Kind.LEND, Kind.RECLAIM)


@dataclass
class Outcome:
    """`fault`: kind of what goes wrong in some order ('' if nothing does). `complete`: every state was visited.

    `peak_bytes`: per memory, the most that was in it at one moment of any order (lent bytes count for the lender).
    `apart`: the lists share nothing but host memory.
    """

    fault: str
    where: object = ""
    states: int = 0
    complete: bool = True
    peak_bytes: tuple[int, ...] = ()
    apart: bool = False


def limits(problem: Problem) -> list[int]:
    return [
        min(m.capacity_bytes - m.reserve_bytes, m.pinned_limit_bytes if m.pinned_limit_bytes >= 0 else 10**18)
        for m in problem.machine.memories
    ]


class Play:
    def __init__(self, problem: Problem, schedule: Schedule, lists: list[Unrolled], late_frees: bool) -> None:
        self.problem, self.lists = problem, lists
        self.limits = limits(problem)
        memories = range(len(problem.machine.memories))
        owners = {m: [d for d, spec in enumerate(problem.machine.devices) if spec.memory == m] for m in memories}
        self.owner = {m: found[0] for m, found in owners.items()
                      if len(found) == 1 and problem.machine.memories[m].kind is MemoryKind.DEVICE}  # fmt: skip
        self.steps: list[Step] = []
        self.of: list[int] = []  # device of each step
        first: dict[int, int] = {}
        for unrolled in lists:
            first[unrolled.device] = len(self.steps)
            self.steps += unrolled.steps
            self.of += [unrolled.device] * len(unrolled.steps)
        count = len(self.steps)
        fired = {event: first[u.device] + index for u in lists for event, index in u.signals.items()}
        self.preds = [0] * count
        self.never = 0
        for n, step in enumerate(self.steps):
            for index in step.preds:
                self.preds[n] |= 1 << (first[self.of[n]] + index)
            if step.event >= 0 and step.event in fired:
                self.preds[n] |= 1 << fired[step.event]
            elif step.event >= 0:
                self.never |= 1 << n
        # Zero-time instructions happen as soon as they can; a wait for another device's event whenever it arrives.
        at_once = (Kind.SIGNAL, Kind.LEND) if late_frees else INSTANT
        self.instant = [
            n for n, step in enumerate(self.steps)
            if step.kind in at_once or (step.event in fired and self.of[fired[step.event]] == self.of[n])
        ]  # fmt: skip
        instant = set(self.instant)
        self.others = [n for n in range(count) if n not in instant]
        self.same_engine = [0] * count
        for n, step in enumerate(self.steps):
            for other, its in enumerate(self.steps):
                if n != other and {s for s in step.streams if s[0] == "engine"} & set(its.streams) and its.takes_time:
                    self.same_engine[n] |= 1 << other
        self._collectives(problem)
        self._link_turns(schedule, first)
        self._slots(lists)

    def _collectives(self, problem: Problem) -> None:
        """`together[n]`: all members of the collective of step n; 0 if one of them never enters."""
        self.together = [0] * len(self.steps)
        groups: dict[object, list[int]] = {}
        for n, step in enumerate(self.steps):
            if step.collective:
                groups.setdefault(step.collective, []).append(n)
        for (name, _, _), members in groups.items():
            whole = len(members) == len(problem.workload.collective(name).devices)
            for n in members:
                self.together[n] = sum(1 << m for m in members) if whole else -1

    def _link_turns(self, schedule: Schedule, first: dict[int, int]) -> None:
        """Per step: (admitted before it, ended before it) for its turn on `order` links."""
        self.turn: dict[int, list[tuple[int, int]]] = {}
        for policy in schedule.link_policies:
            if policy.kind is LinkPolicyKind.ORDER:
                nodes = [first[d] + i for d, i in policy.sequence]
                for place, n in enumerate(nodes):
                    before = 1 << nodes[place - 1] if place else 0
                    ended = 1 << nodes[place - policy.slots] if place >= policy.slots else 0
                    self.turn.setdefault(n, []).append((before, ended))

    def _slots(self, lists: list[Unrolled]) -> None:
        """Give every copy and every instance's newest value a place in the state."""
        self.slot: dict[object, int] = {}
        self.makers: list[int] = []
        self.start: list[object] = []
        for unrolled in lists:
            for copy, value in unrolled.start.items():
                self._slot(copy, value)
                self._slot(copy[:3], value)
        for unrolled in lists:
            for step in unrolled.steps:
                for copy in [c for c, *_ in step.reads] + [c for c, _ in step.writes] + step.vanish + step.spoils:
                    self._slot(copy, ABSENT)
                    self._slot(copy[:3], ABSENT)
        count = len(self.steps)
        storage = lists[0].storage
        self.names = [{c for c, *_ in s.reads} | {c for c, _ in s.writes} for s in self.steps]
        self.uses = [{storage(c) for c, *_ in s.reads} | {storage(c) for c, _ in s.writes} for s in self.steps]
        # A write is one of the storage, and so of all tensors in it; a release is one of the copy alone.
        self.changes = [{storage(c) for c, _ in s.writes} for s in self.steps]
        # Instances whose newest value a step of another device relies on while it reads them.
        self.relies = [{c[:3] for c, *_ in s.reads} for s in self.steps]
        self.clash = [0] * count  # steps of other lists in flight that may not be when this one starts (or frees)
        self.outdates = [0] * count
        for n, step in enumerate(self.steps):
            for other in range(count):
                if self.of[other] != self.of[n]:
                    if self.changes[n] & self.uses[other] or set(step.vanish) & self.names[other]:
                        self.clash[n] |= 1 << other
                    if {instance for instance, _ in step.makes} & self.relies[other]:
                        self.outdates[n] |= 1 << other

    def _slot(self, key: object, value: object) -> None:
        if key not in self.slot:
            self.slot[key] = len(self.start)
            self.start.append(value)

    # --- the search ----------------------------------------------------------------------------------------------

    def search(self, most_states: int) -> Outcome:
        count = len(self.steps)
        everything = (1 << count) - 1
        self.peak = [0] * len(self.limits)
        states = 0
        seen: set[object] = set()
        try:
            bytes_now = self._first_bytes()
            self._check_bytes(bytes_now, "start")
            stack = [self._settle(0, 0, 0, tuple(self.start), (), bytes_now)]
            while stack:
                started, done, admitted, values, pending, room = stack.pop()
                key = (started, done, admitted, values)
                if key in seen:
                    continue
                if states >= most_states:
                    return Outcome("", "", states, False, tuple(self.peak))
                seen.add(key)
                states += 1
                if done == everything:
                    self._finish(values)
                    continue
                moved = False
                for n in self.others:
                    bit = 1 << n
                    if done & bit:
                        continue
                    if started & bit:
                        together = self.together[n]
                        if together and (together == -1 or together & ~started or bit != together & -together):
                            continue
                        if n in self.turn and not admitted & bit:
                            continue
                        stack.append(self._end(n, started, done, admitted, values, pending, room))
                        moved = True
                    elif not (self.preds[n] & ~done or self.never & bit or self.same_engine[n] & started & ~done):
                        stack.append(self._start(n, started, done, admitted, values, pending, room))
                        moved = True
                if not moved:
                    stuck = next(n for n in range(count) if not done >> n & 1)
                    raise Fault("stuck", self._name(stuck))
        except Fault as fault:
            return Outcome(*fault.args, states, True, tuple(self.peak))
        return Outcome("", "", states, True, tuple(self.peak))

    def _name(self, n: int) -> str:
        return f"device {self.of[n]} #{self.steps[n].index} {self.steps[n].kind.name.lower()}"

    def _start(self, n, started, done, admitted, values, pending, room):
        step, bit = self.steps[n], 1 << n
        if not step.takes_time:
            started, done, values, room = self._happen(n, started, done, values, room)
            return self._settle(started, done, admitted, values, pending, room)
        room = list(room)
        for memory, size in step.allocates:
            self._charge(room, memory, size, self.of[n])
        self._check_bytes(room, self._name(n))
        started |= bit
        together = self.together[n]
        members = [n]
        if together:
            if together == -1 or together & ~started:  # entered; nothing is touched before all have
                return self._settle(started, done, admitted, values, pending, room)
            members = [m for m in range(len(self.steps)) if together >> m & 1]
        values = list(values)
        for member in members:
            values, result = self._touch(member, started, done, together, values)
            pending = (*pending, (member, result))
        return self._settle(started, done, admitted, tuple(values), pending, room)

    def _touch(self, n, started, done, together, values):
        """Reads at the start; marks what is being written."""
        step, name = self.steps[n], self._name(n)
        inputs = []
        for copy, expected, mine in step.reads:
            value = values[self.slot[copy]]
            need(value is not ABSENT, "missing data", name)
            need(value is not COMING, "data still on its way", name)
            need(value is not LOST, "overwritten data", name)
            need(expected is None or value == expected, "wrong data", name)
            if expected is None or not mine:
                need(value == values[self.slot[copy[:3]]], "stale data of another list", name)
            inputs.append(value)
        # A collective touches its copies on all devices at once; its members do not disturb each other.
        flying = started & ~done & ~(together if together > 0 else 0) & ~(1 << n)
        flying &= ~self._only_entered(started)
        need(not flying & self.clash[n], "copy in use is overwritten", name)
        need(not flying & self.outdates[n], "read copy becomes stale", name)
        appear = set(step.appear)
        for copy in dict.fromkeys(copy for copy, _ in step.writes):
            need((values[self.slot[copy]] is ABSENT) == (copy in appear), "copy of another list is overwritten", name)
            values[self.slot[copy]] = COMING
        for copy in step.spoils:
            values[self.slot[copy]] = LOST
        for instance, _ in step.makes:
            values[self.slot[instance]] = COMING
        if step.run:
            result = made(step.run, self._op_inputs(n, inputs))
        else:
            need(len(set(inputs)) == 1, "slices of different versions", name)
            result = inputs[0]
        return values, result

    def _op_inputs(self, n, inputs):
        """One value per tensor that the op reads: slices of one tensor count once."""
        step, found, last = self.steps[n], [], None
        for (copy, _, _), value in zip(step.reads, inputs, strict=True):
            name = (copy[:3], copy[6])
            if copy[6] == 1 or name != last:
                found.append(value)
            last = name if copy[6] > 1 else None
        return tuple(found)

    def _only_entered(self, started: int) -> int:
        """Members of collectives that wait for the others."""
        entered = 0
        for n, together in enumerate(self.together):
            if together and started >> n & 1 and (together == -1 or together & ~started):
                entered |= 1 << n
        return entered

    def _end(self, n, started, done, admitted, values, pending, room):
        together = self.together[n] or 1 << n
        values, room = list(values), list(room)
        for member, result in pending:
            if together >> member & 1:
                for copy, tag in self.steps[member].writes:
                    values[self.slot[copy]] = result if tag is None else (result, tag)
                for instance, tag in self.steps[member].makes:
                    values[self.slot[instance]] = (result, tag)
                for memory, size in self.steps[member].frees:
                    self._charge(room, memory, -size, self.of[member])
        pending = tuple(entry for entry in pending if not together >> entry[0] & 1)
        return self._settle(started, done | together, admitted, tuple(values), pending, room)

    def _settle(self, started, done, admitted, values, pending, room):
        """Everything that takes no time and can happen, happens."""
        moved = True
        while moved:
            moved = False
            for n in self.instant:
                bit = 1 << n
                if done & bit or self.preds[n] & ~done:
                    continue
                moved = True
                started, done, values, room = self._happen(n, started, done, values, room)
            for n, turns in self.turn.items():
                bit = 1 << n
                if (
                    started & bit
                    and not admitted & bit
                    and not any(before & ~admitted or ended & ~done for before, ended in turns)
                ):
                    admitted, moved = admitted | bit, True
        return started, done, admitted, values, pending, room

    def _happen(self, n, started, done, values, room):
        """The effect of an instruction that takes no time."""
        step, bit = self.steps[n], 1 << n
        started, done = started | bit, done | bit
        if step.kind in (Kind.SIGNAL, Kind.WAIT):
            return started, done, values, room
        room = list(room)
        for memory, size in step.allocates:
            self._charge(room, memory, size, self.of[n])
        for memory, size in step.frees:
            self._charge(room, memory, -size, self.of[n])
        if step.loan:
            room[self._pair_place(self.of[n], step.loan[0])] += step.loan[1]
        if step.vanish:
            flying = started & ~done & ~self._only_entered(started)
            need(not flying & self.clash[n], "copy in use is freed", self._name(n))
            values = list(values)
            for copy in step.vanish:
                values[self.slot[copy]] = ABSENT
            values = tuple(values)
        self._check_bytes(room, self._name(n))
        return started, done, values, room

    def _finish(self, values) -> None:
        for unrolled in self.lists:
            for placement in unrolled.schedule.initial[unrolled.device]:
                for memory in placement.memories:
                    copy: Copy = (unrolled.device, placement.tensor, 0, memory, -1, 0, 1)
                    need(values[self.slot[copy]] == values[self.slot[copy[:3]]], "state not restored", copy)

    # --- bytes: one number per memory, then per (lender, borrower) what is lent and what is borrowed ----------------

    def _first_bytes(self) -> list[int]:
        devices = len(self.problem.machine.devices)
        room = [0] * (len(self.limits) + 2 * devices * devices)
        for unrolled in self.lists:
            for memory, size in unrolled.initial:
                self._charge(room, memory, size, unrolled.device)
        return room

    def _pair_place(self, lender: int, borrower: int) -> int:
        devices = len(self.problem.machine.devices)
        return len(self.limits) + 2 * (lender * devices + borrower)

    def _charge(self, room: list[int], memory: int, size: int, device: int) -> None:
        lender = self.owner.get(memory, device)
        if lender != device:  # what a borrower has there is in the lender's bytes already
            room[self._pair_place(lender, device) + 1] += size
        else:
            room[memory] += size

    def _check_bytes(self, room: list[int], where: str) -> None:
        for memory, limit in enumerate(self.limits):
            size = room[memory]
            if size > self.peak[memory]:
                self.peak[memory] = size
            need(size <= limit, "memory full", where)
        for place in range(len(self.limits), len(room), 2):
            need(room[place + 1] <= room[place], "more borrowed than lent", where)
