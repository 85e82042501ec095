"""All instruction lists of one device that are worth trying on a tiny step, with the time that each needs at least.

A list is made of *runs* (first executions in the default order, and recomputations between them), and of copies out,
copies in and releases between the runs. The enumeration goes through the list from its start and branches at every
place over

- which recomputations stand before a run (every subset of the recomputable ops that have run, in op order),
- which tensors come in before it, in every order,
- which idle tensors are released where an allocation does not fit: every set of which no member could stay,
- in which order tensors are copied out (each as soon as it is written, or behind a copy of one that is written later),
- where every persistent tensor rests between steps: device, host or both.

Whole tensors and copies between a device and its host memory only. A release stands directly before the first
allocation that needs its bytes. Earlier releases would only make allocations wait for more (docs/semantics.md 5.1).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import combinations, product

from tmojax.errors import InputError
from tmojax.problem import Action, Lifetime, ListBuilder, Placement, Problem

Key = tuple[int, int]  # tensor, instance
RUN, IN, OUT, FREE, FORGET = "run", "in", "out", "free", "forget"  # the last: a copy on the host


@dataclass(frozen=True)
class FoundList:
    """steps: (kind, run or key) in list order. least_s: time of the list if its device had all links for itself in both
    directions; first_out_s, first_in_s: when its first copies start then; after_in_s: compute from the first use of
    what comes in last.
    resting: where every persistent tensor is between steps, as (tensor, (on the device, on the host))."""

    steps: tuple[tuple, ...]
    runs: tuple[tuple[int, int], ...]
    resting: tuple[tuple[int, tuple[bool, bool]], ...]
    least_s: float
    first_out_s: float
    first_in_s: float
    after_in_s: float
    out_bytes: int
    in_bytes: int


@dataclass(frozen=True)
class _Run:
    op: int
    micro_batch: int
    again: bool
    reads: tuple[Key, ...]
    writes: tuple[Key, ...]
    updates: tuple[Key, ...]
    workspace_bytes: int
    duration_s: float
    collective: bool


@dataclass(frozen=True)
class _State:
    """A partial list. resident: key -> (content is there, last access ends); host: key -> current copy is complete."""

    run: int
    used: int
    resident: dict[Key, tuple[float, float]]
    host: dict[Key, float]
    made: dict[Key, int]
    steps: tuple[tuple, ...]
    barrier_s: float = 0.0
    compute_s: float = 0.0
    communication_s: float = 0.0
    out_s: float = 0.0
    in_s: float = 0.0
    unused: frozenset[Key] = frozenset()  # copied out and not yet released
    waiting: frozenset[Key] = frozenset()  # copied in and not yet touched
    newest_out: int = -2  # latest write among the copies out since the last run
    slack: int = -1  # bytes of copies in that could just as well stand before the last run


class DeviceLists:
    """Enumerates the lists of one device. Raises InputError where the family does not cover the problem."""

    def __init__(self, problem: Problem, device: int) -> None:
        self.problem, self.device = problem, device
        machine, self.program = problem.machine, problem.workload.program(device)
        spec = machine.devices[device]
        self.memory, self.host_memory = spec.memory, spec.host_memory
        if any(t.alias_group for t in self.program.tensors):
            raise InputError("alias groups: exhaustive search does not cover them; use another planner")
        self.capacity = problem.capacity_bytes(device)
        self.copy_rates = []
        for ends in ((self.memory, self.host_memory), (self.host_memory, self.memory)):
            links = [machine.links[link] for link in machine.route(*ends).links]
            ready_s = machine.overheads.transfer_setup_s + sum(link.latency_s for link in links)
            self.copy_rates.append((ready_s, min(link.bandwidth_bytes_per_s for link in links)))
        self._base = problem.workload.sequence(device)
        self._launch_s = machine.overheads.launch_s
        self.partial = 0

    def within(self, limit_s: float, most_partial: int) -> list[FoundList] | None:
        """Every list that needs at most `limit_s` alone, least first; None when that takes more than `most_partial`
        partial lists and sequences of runs."""
        found: list[FoundList] = []
        self.partial = 0
        state = [t for t, spec in enumerate(self.program.tensors) if spec.lifetime is Lifetime.STATE]
        updated = {t for op in self.program.ops for t in op.updates}
        places = []
        for tensor in state:
            moves = Action.OFFLOAD in self.problem.actions
            # A host copy of what never changes costs nothing.
            kept = [(True, False)] if tensor in updated or not moves else []
            places.append([*kept, (False, True), (True, True)] if moves else kept)
        for sequence in self._sequences(limit_s, most_partial):
            for chosen in product(*places):
                search = _Search(self, sequence, tuple(zip(state, chosen, strict=True)), limit_s, most_partial)
                found += search.lists()
                self.partial += 1
                if self.partial > most_partial:
                    return None
        if self.partial > most_partial:
            return None
        return sorted(_least_held_back(found), key=lambda one: one.least_s)

    def run(self, op: int, micro_batch: int, again: bool) -> _Run:
        spec, workload = self.program.ops[op], self.problem.workload

        def keys(tensors: tuple[int, ...]) -> tuple[Key, ...]:
            return tuple((t, workload.instance(self.device, t, op, micro_batch)) for t in dict.fromkeys(tensors))

        seconds = self._launch_s + (0.0 if spec.collective else spec.duration_s)
        return _Run(op, micro_batch, again, keys(spec.reads), keys(spec.writes), keys(spec.updates),
                    spec.workspace_bytes, seconds, bool(spec.collective))  # fmt: skip

    def copy_s(self, key: Key, inwards: bool) -> float:
        ready_s, rate = self.copy_rates[inwards]
        return ready_s + self.program.tensors[key[0]].size_bytes / rate

    def _sequences(self, limit_s: float, most: int) -> Iterator[list[_Run]]:
        """First executions with recomputations between them, as far as compute alone stays within the limit."""
        base = [self.run(op, k, False) for op, k in self._base]
        spare_s = limit_s - sum(run.duration_s for run in base if not run.collective)
        if spare_s < 0:
            return
        rerun = {
            (run.op, run.micro_batch): self.run(run.op, run.micro_batch, True)
            for run in base
            if Action.RECOMPUTE in self.problem.actions and self.program.ops[run.op].recomputable
            and run.writes and not run.updates and not run.collective and not self.program.ops[run.op].step_op
        }  # fmt: skip
        last_use = {key: place for place, run in enumerate(base) for key in (*run.reads, *run.updates)}

        def extend(place: int, so_far: list[_Run], spare: float) -> Iterator[list[_Run]]:
            self.partial += 1
            if self.partial > most:
                return
            if place == len(base):
                if all(self._useful(so_far, at) for at, run in enumerate(so_far) if run.again):
                    yield so_far
                return
            ran = {(run.op, run.micro_batch) for run in so_far if not run.again}
            options = [
                again for name, again in sorted(rerun.items())
                if name in ran and again.duration_s <= spare
                and any(last_use.get(key, -1) >= place for run in base for key in run.writes
                        if run.micro_batch == again.micro_batch and key in last_use)
            ]  # fmt: skip
            for count in range(len(options) + 1):
                for extra in combinations(options, count):
                    took = sum(run.duration_s for run in extra)
                    if took <= spare:
                        yield from extend(place + 1, [*so_far, *extra, base[place]], spare - took)

        yield from extend(0, [], spare_s * (1 + 1e-12) + 1e-15)

    @staticmethod
    def _useful(runs: list[_Run], at: int) -> bool:
        """Something that the recomputation writes is read before it is written again, and was not just written."""
        mine = set(runs[at].writes)
        if at and mine & set(runs[at - 1].writes):
            return False
        for later in runs[at + 1 :]:
            if mine & set(later.reads):
                return True
            if mine & set(later.writes):
                return False
        return False


class _Search:
    """The lists of one sequence of runs and one placement of the persistent tensors."""

    def __init__(self, lists: DeviceLists, runs: list[_Run], resting, limit_s: float, most: int) -> None:
        self.device, self.runs, self.resting, self.limit_s, self.most = lists, runs, resting, limit_s, most
        self.size = [t.size_bytes for t in lists.program.tensors]
        self.offload = Action.OFFLOAD in lists.problem.actions
        self.uses: dict[Key, list[tuple[int, bool]]] = {}  # (run, whether its content is read)
        for place, run in enumerate(runs):
            for key in (*run.reads, *run.updates):
                self.uses.setdefault(key, []).append((place, True))
            for key in run.writes:
                self.uses.setdefault(key, []).append((place, False))
        self.home = {(t, 0): memories for t, memories in resting}
        for key, memories in self.home.items():
            if memories[0]:
                self.uses.setdefault(key, []).append((len(runs), True))
        self.inputs = {key for key in self.uses if key[0] in lists.program.inputs}
        rest = [run.duration_s if not run.collective else 0.0 for run in runs]
        self.rest_s = [sum(rest[place:]) for place in range(len(runs) + 1)]

    def _start(self) -> _State:
        at_home = [key for key, memories in self.home.items() if memories[0]]
        on_host = [key for key, memories in self.home.items() if memories[1]]
        return _State(
            0, sum(self.size[key[0]] for key in at_home), dict.fromkeys(at_home, (0.0, 0.0)),
            dict.fromkeys([*on_host, *self.inputs], 0.0), dict.fromkeys(at_home, -1), (),
        )  # fmt: skip

    def lists(self) -> Iterator[FoundList]:
        state = self._start()
        if state.used <= self.device.capacity:
            yield from self._extend(state)

    def _extend(self, state: _State) -> Iterator[FoundList]:
        self.device.partial += 1
        if self._least_s(state) > self.limit_s or self.device.partial > self.most:
            return
        if state.run == len(self.runs):
            if (done := self._finished(state)) is not None:
                yield done
        else:
            for later in self._run_next(state):
                yield from self._extend(later)
        for key in self._may_come_in(state):
            if self.size[key[0]] <= state.slack:
                continue  # before the last run it would wait for less
            for room in self._with_room(state, self.size[key[0]], {key}):
                yield from self._extend(self._copied_in(room, key))
        for key in self._may_go_out(state):
            yield from self._extend(self._copied_out(state, key))

    def _least_s(self, state: _State) -> float:
        """Time that every completion of the list takes at least."""
        in_s = state.in_s
        for key in self.uses:
            if key in state.unused or (key in state.host and key not in state.resident):
                use = self._next_use(key, state.run)
                in_s += self.device.copy_s(key, True) if use is not None and (use[1] or key in state.unused) else 0.0
        return max(state.compute_s + self.rest_s[state.run], state.out_s, in_s, state.communication_s)

    def _next_use(self, key: Key, run: int) -> tuple[int, bool] | None:
        return next((use for use in self.uses.get(key, ()) if use[0] >= run), None)

    def _may_come_in(self, state: _State) -> list[Key]:
        found = []
        for key in state.host:
            use = self._next_use(key, state.run)
            if key not in state.resident and use is not None and use[1]:
                found.append(key)
        return sorted(found)

    def _may_go_out(self, state: _State) -> list[Key]:
        """As soon as it is written, or behind a copy of one that was written later."""
        if not self.offload:
            return []
        found = []
        for key in state.resident:
            if key in state.host or key in state.waiting or key not in state.made:
                continue
            made = state.made[key]
            if not (made == state.run - 1 or state.newest_out > made):
                continue
            later = [use for use in self.uses.get(key, ()) if use[0] >= state.run]
            comes_back = any(read and place > state.run for place, read in later)
            returns_home = self.home.get(key, (False, False))[1]
            if comes_back or returns_home:
                found.append(key)
        return sorted(found)

    def _with_room(self, state: _State, needed: int, kept: set[Key]) -> Iterator[_State]:
        """The state after every set of releases, none of which is spare, that lets `needed` bytes fit."""
        over = state.used + needed - self.device.capacity
        if over <= 0:
            yield state
            return
        if state.run < len(self.runs):
            run = self.runs[state.run]
            kept = kept | {*run.reads, *run.writes, *run.updates}
        free = [key for key in sorted(state.resident) if key not in kept and self._may_be_freed(state, key)]
        for count in range(1, len(free) + 1):
            for chosen in combinations(free, count):
                sizes = [self.size[key[0]] for key in chosen]
                if sum(sizes) >= over and sum(sizes) - min(sizes) < over:
                    yield self._freed(state, chosen)

    def _may_be_freed(self, state: _State, key: Key) -> bool:
        if key in state.waiting or not self.size[key[0]]:
            return False
        use = self._next_use(key, state.run)
        if key in self.home:
            return key in state.host  # the last current copy of what persists must stay
        return use is None or not use[1] or key in state.host

    def _freed(self, state: _State, keys: tuple[Key, ...]) -> _State:
        resident = {key: times for key, times in state.resident.items() if key not in keys}
        return replace(
            state, used=state.used - sum(self.size[key[0]] for key in keys), resident=resident,
            barrier_s=max(state.barrier_s, *(state.resident[key][1] for key in keys)),
            steps=(*state.steps, *((FREE, key) for key in keys)), unused=state.unused.difference(keys), slack=-1,
        )  # fmt: skip

    def _copied_in(self, state: _State, key: Key) -> _State:
        start = max(state.in_s, state.barrier_s, state.host[key])
        end = start + self.device.copy_s(key, True)
        return replace(
            state, used=state.used + self.size[key[0]], resident={**state.resident, key: (end, end)}, in_s=end,
            steps=(*state.steps, (IN, key, start, state.run)), waiting=state.waiting | {key},
            slack=state.slack - self.size[key[0]] if state.slack >= 0 else -1,
        )  # fmt: skip

    def _copied_out(self, state: _State, key: Key) -> _State:
        ready, last = state.resident[key]
        start = max(state.out_s, ready)
        end = start + self.device.copy_s(key, False)
        unused = state.unused if key in self.home else state.unused | {key}
        return replace(
            state, resident={**state.resident, key: (ready, max(last, end))}, host={**state.host, key: end}, out_s=end,
            steps=(*state.steps, (OUT, key, start, state.run)), unused=unused,
            newest_out=max(state.newest_out, state.made[key]),
        )  # fmt: skip

    def _run_next(self, state: _State) -> Iterator[_State]:
        run = self.runs[state.run]
        inputs = (*run.reads, *run.updates)
        if any(key not in state.resident for key in inputs):
            return
        new = [key for key in run.writes if key not in state.resident]
        if run.again and not new:
            return
        scratch = sum(self.size[key[0]] for key in run.writes if key in state.resident) if run.again else 0
        workspace = run.workspace_bytes + scratch
        bytes_new = sum(self.size[key[0]] for key in new)
        for room in self._with_room(state, bytes_new + workspace, set()):
            yield self._ran(room, run, new, bytes_new, workspace)

    def _ran(self, state: _State, run: _Run, new: list[Key], bytes_new: int, workspace: int) -> _State:
        stream_s = state.communication_s if run.collective else state.compute_s
        written = run.updates if run.again else (*run.updates, *(k for k in run.writes if k in state.resident))
        start = max(
            stream_s, state.barrier_s if new or workspace else 0.0,
            *(state.resident[key][0] for key in run.reads), *(max(state.resident[key]) for key in written), 0.0,
        )  # fmt: skip
        end = start + run.duration_s
        resident = dict(state.resident)
        for key in run.reads:
            resident[key] = (resident[key][0], max(resident[key][1], end))
        for key in (*written, *new):
            resident[key] = (end, end)
        made = {**state.made, **dict.fromkeys((*written, *new), state.run)}
        host = {key: at for key, at in state.host.items() if key not in run.updates}
        later = replace(
            state, run=state.run + 1, used=state.used + bytes_new, resident=resident, made=made, host=host,
            steps=(*state.steps, (RUN, state.run)), newest_out=-2,
            waiting=state.waiting.difference((*run.reads, *run.updates)),
            barrier_s=max(state.barrier_s, end) if workspace else state.barrier_s,
            slack=self.device.capacity - state.used - bytes_new - workspace,
        )  # fmt: skip
        return replace(later, communication_s=end) if run.collective else replace(later, compute_s=end)

    def _after_use_s(self, key: Key, run: int) -> float:
        """Compute from the first use of what came in before `run`."""
        use = self._next_use(key, run)
        return 0.0 if use is None else self.rest_s[use[0]]

    def _finished(self, state: _State) -> FoundList | None:
        """The complete list: what persists goes back to its place, everything else is released."""
        if state.unused or state.waiting - set(self.home):
            return None
        for key, memories in self.home.items():
            if memories[0] and key not in state.resident:
                return None
            if memories[1] and key not in state.host:
                return None
        elsewhere = (False, False)
        last = [(FREE, key) for key in sorted(state.resident) if not self.home.get(key, elsewhere)[0]]
        copied = {step[1] for step in state.steps if step[0] == OUT}
        last += [(FORGET, key) for key in sorted(copied) if not self.home.get(key, elsewhere)[1]]
        outs = [step for step in state.steps if step[0] == OUT]
        ins = [step for step in state.steps if step[0] == IN]
        return FoundList(
            steps=(*(step[:2] for step in state.steps), *last),
            runs=tuple((run.op, run.micro_batch) for run in self.runs),
            resting=self.resting, least_s=self._least_s(state),
            first_out_s=min((step[2] for step in outs), default=float("inf")),
            first_in_s=min((step[2] for step in ins), default=float("inf")),
            after_in_s=self._after_use_s(*ins[-1][1::2]) if ins else 0.0,
            out_bytes=sum(self.size[step[1][0]] for step in outs), in_bytes=sum(self.size[step[1][0]] for step in ins),
        )  # fmt: skip


def _least_held_back(found: list[FoundList]) -> list[FoundList]:
    """Of lists that differ only in which releases stand before an allocation, those of which no other one has fewer."""
    groups: dict[tuple, list[tuple[list[frozenset], FoundList]]] = {}
    for one in found:
        queues = tuple(tuple(step[1] for step in one.steps if step[0] == kind) for kind in (OUT, IN))
        released: set[tuple] = set()
        before: dict[tuple, frozenset] = {}
        seen: dict[tuple, int] = {}
        for step in one.steps:
            seen[step] = seen.get(step, 0) + 1
            if step[0] == FREE:
                released.add((step, seen[step]))
            elif step[0] in (RUN, IN):
                before[step, seen[step]] = frozenset(released)
        masks = [before[name] for name in sorted(before)]
        members = groups.setdefault((one.runs, one.resting, queues), [])
        if any(all(a <= b for a, b in zip(other, masks, strict=True)) for other, _ in members):
            continue
        members[:] = [(other, kept) for other, kept in members
                      if not all(a <= b for a, b in zip(masks, other, strict=True))]  # fmt: skip
        members.append((masks, one))
    return [one for members in groups.values() for _, one in members]


def build_list(lists: DeviceLists, found: FoundList):
    """(instructions, placements, rows of the runs) of a list that was found."""
    build, device, host = ListBuilder(), lists.memory, lists.host_memory
    rows = []
    for step in found.steps:
        kind, what = step[0], step[1]
        if kind == RUN:
            op, micro_batch = found.runs[what]
            joint = bool(lists.program.ops[op].collective)
            rows.append(build.collective(op, micro_batch) if joint else build.compute(op, micro_batch))
            continue
        tensor, instance = what
        if kind == IN:
            build.prefetch(tensor, instance, host, device)
        elif kind == OUT:
            build.offload(tensor, instance, device, host)
        else:
            build.release(tensor, instance, device if kind == FREE else host)
    placements = tuple(
        Placement(tensor, tuple(memory for memory, there in zip((device, host), where, strict=True) if there))
        for tensor, where in found.resting
    )
    return build.build(), placements, rows
