"""A second simulator, exact and deliberately naive: fractions, every rule as written, all pairs, no graph.

It shares only the problem types with the package. It exists to be compared with.
"""

from __future__ import annotations

from fractions import Fraction

from tmojax.problem import Kind, Lifetime, LinkPolicyKind, Problem, Schedule

TRANSFERS = (Kind.OFFLOAD, Kind.PREFETCH)
RUNS = (Kind.COMPUTE, Kind.COLLECTIVE)
CODES = (Kind.ENCODE, Kind.DECODE)


def max_min(flows: list[dict[int, Fraction]], capacity: dict[int, Fraction]) -> list[Fraction]:
    """Max-min fair levels: raise the level of all flows that are not stopped until a link is full, again and again.

    `flows[i]`: load per unit of level on each link.
    """
    level = [Fraction(0)] * len(flows)
    growing = {i for i, loads in enumerate(flows) if loads}
    while growing:
        room = {}
        for link, total in capacity.items():
            weight = sum((flows[i].get(link, Fraction(0)) for i in growing), Fraction(0))
            if weight:
                used = sum((level[i] * flows[i].get(link, Fraction(0)) for i in range(len(flows))), Fraction(0))
                room[link] = (total - used) / weight
        rise = min(room.values())
        for i in growing:
            level[i] += rise
        stopped = {link for link, more in room.items() if more == rise}
        growing = {i for i in growing if not stopped & set(flows[i])}
    return level


class Instruction:
    def __init__(self, device, place, index, row):
        self.device, self.place, self.index, self.row = device, place, index, row
        self.kind = Kind(int(row["kind"]))
        self.streams: list[int] = []
        self.before: list[tuple[object, Fraction]] = []  # (instruction, delay): starts after its effect
        self.work = Fraction(0)
        self.bytes = Fraction(0)
        self.loads: dict[int, Fraction] = {}
        self.route = None
        self.members: list[Instruction] = [self]
        self.partners = 1
        self.frees_in = self.allocates_in = None
        self.start = self.ready = self.asked = self.flowing = self.effect = None


class Reference:
    """`end_s`, `start_s`: per device a list over instructions, None where nothing happened."""

    def __init__(self, problem: Problem, schedule: Schedule, steps: int = 1, link_policies=None):
        self.problem, self.machine = problem, problem.machine
        self.policies = schedule.link_policies if link_policies is None else link_policies
        self.lists = [self._read(schedule, d, steps) for d in range(problem.workload.device_count)]
        self._events(schedule)
        self._collectives()
        self.order = {
            link: [self.lists[d][s * len(schedule.lists[d]) + i] for s in range(steps) for d, i in policy.sequence]
            for link, policy in enumerate(self.policies)
            if policy.kind is LinkPolicyKind.ORDER
        }
        self.all = [instruction for instructions in self.lists for instruction in instructions]
        self._run()
        self.start_s = [[i.start for i in instructions] for instructions in self.lists]
        self.end_s = [[i.effect for i in instructions] for instructions in self.lists]

    # --- reading a list: sections 3 to 5 -----------------------------------------------------------------------

    def _storage(self, owner, tensor, instance, step):
        spec = self.problem.workload.program(owner).tensors[tensor]
        group = spec.alias_group
        tensors = self.problem.workload.program(owner).tensors
        members = [t for t in tensors if group and t.alias_group == group] or [spec]
        kept = any(t.lifetime is Lifetime.STATE for t in members)
        return (owner, group or tensor, instance, None if kept else step)

    def _copy(self, device, row, memory, form, step):
        owner = device if row["owner"] < 0 else int(row["owner"])
        tensor = int(row["tensor"])
        spec = self.problem.workload.program(owner).tensors[tensor]
        instance = int(row["micro_batch"]) if spec.lifetime is Lifetime.MICRO_BATCH else 0
        return (
            tensor,
            *self._storage(owner, tensor, instance, step),
            memory,
            form,
            int(row["part"]),
            int(row["parts"]),
        )

    def _read(self, schedule, device, steps):
        workload, machine, overheads = self.problem.workload, self.machine, self.machine.overheads
        program = workload.program(device)
        here = machine.devices[device].memory
        rows = schedule.lists[device]
        resident, written, ran = set(), {}, set()  # copies; storage -> [(instruction, is it a write)]
        out: list[Instruction] = []

        def plain(tensor, instance, memory, step, part=0, parts=1):
            return (tensor, *self._storage(device, tensor, instance, step), memory, -1, part, parts)

        def read(instruction, copy):
            chosen = [copy]
            if copy not in resident and copy[-3] == -1 and copy[-1] > 1:
                whole = (*copy[:-2], 0, 1)
                chosen = [whole] if whole in resident else chosen
            elif copy not in resident and copy[-3] == -1:
                for parts in sorted({c[-1] for c in resident if c[:-2] == copy[:-2] and c[-1] > 1}):
                    slices = [(*copy[:-2], part, parts) for part in range(parts)]
                    if all(c in resident for c in slices):
                        chosen = slices
                        break
            for one in chosen:
                for other, is_write in written.setdefault(one[1:], []):
                    if is_write and other is not instruction:
                        instruction.before.append((other, Fraction(0)))
                written[one[1:]].append((instruction, False))

        def write(instruction, copy):
            earlier = [other for other, _ in written.setdefault(copy[1:], []) if other is not instruction]
            instruction.before += [(other, Fraction(0)) for other in earlier]
            written[copy[1:]].append((instruction, True))

        def allocate(copy):
            """Add the copy; whether its storage is new."""
            new = not any(c[1:] == copy[1:] for c in resident)
            added = copy not in resident
            resident.add(copy)
            return new and added

        for step in range(steps):
            for placement in schedule.initial[device] if step == 0 else ():
                resident.update(plain(placement.tensor, 0, memory, 0) for memory in placement.memories)
            for tensor in program.inputs:
                count = workload.micro_batches if program.tensors[tensor].lifetime is Lifetime.MICRO_BATCH else 1
                resident.update(plain(tensor, k, machine.devices[device].host_memory, step) for k in range(count))
            first = len(out)
            lend_of = {}
            retired = {first + int(row["after"]) for row in rows if row["kind"] == Kind.RETIRE}
            ran.clear()
            for place, row in enumerate(rows):
                i = Instruction(device, place, len(out), row)
                out.append(i)
                frees = False
                if i.kind in RUNS:
                    op_index, k = int(row["op"]), int(row["micro_batch"])
                    op = program.ops[op_index]
                    i.streams = [0 if i.kind is Kind.COMPUTE else 1]
                    i.work = Fraction(op.duration_s) + Fraction(overheads.launch_s)
                    workspace, again, new = op.workspace_bytes, (op_index, k) in ran, False
                    ran.add((op_index, k))
                    for t in op.reads:
                        read(i, plain(t, workload.instance(device, t, op_index, k), here, step))
                    for t in op.updates:
                        write(i, plain(t, workload.instance(device, t, op_index, k), here, step))
                    for t in op.writes:
                        copy = plain(t, workload.instance(device, t, op_index, k), here, step)
                        if again and copy in resident:
                            workspace += program.tensors[t].size_bytes
                        else:
                            write(i, copy)
                            new |= allocate(copy)
                    if new or workspace:
                        i.allocates_in = here
                    frees = workspace > 0
                elif i.kind in TRANSFERS:
                    i.route = machine.route(int(row["memory"]), int(row["to_memory"]))
                    i.streams = [2 + engine for engine in i.route.engines]
                    i.work = Fraction(overheads.transfer_setup_s)
                    i.work += sum(Fraction(machine.links[link].latency_s) for link in i.route.links)
                    i.loads = {link: Fraction(1) for link in i.route.links}
                    i.bytes = Fraction(self._bytes(device, row))
                    read(i, self._copy(device, row, int(row["memory"]), int(row["form"]), step))
                    target = self._copy(device, row, int(row["to_memory"]), int(row["form"]), step)
                    write(i, target)
                    if allocate(target):
                        i.allocates_in = int(row["to_memory"])
                elif i.kind in CODES:
                    codec = machine.codecs[row["form"]]
                    i.streams = [0]
                    size = self._bytes(device, row, encoded=False)
                    rate = codec.encode_bytes_per_s if i.kind is Kind.ENCODE else codec.decode_bytes_per_s
                    i.work = Fraction(size) / Fraction(rate) + Fraction(overheads.launch_s)
                    forms = (-1, int(row["form"])) if i.kind is Kind.ENCODE else (int(row["form"]), -1)
                    read(i, self._copy(device, row, int(row["memory"]), forms[0], step))
                    target = self._copy(device, row, int(row["memory"]), forms[1], step)
                    write(i, target)
                    workspace = codec.workspace_bytes(size)
                    if allocate(target) or workspace:
                        i.allocates_in = int(row["memory"])
                    frees = workspace > 0
                elif i.kind is Kind.RELEASE:
                    copy = self._copy(device, row, int(row["memory"]), int(row["form"]), step)
                    i.before += [(other, Fraction(0)) for other, _ in written.get(copy[1:], [])]
                    i.frees_in = int(row["memory"])
                    resident.discard(copy)
                elif i.kind in (Kind.RETIRE, Kind.SIGNAL):
                    target = out[first + int(row["after"])]
                    i.before.append((target, Fraction(0)))
                    if i.kind is Kind.RETIRE and target.has_workspace:
                        i.frees_in = int(target.row["memory"]) if target.kind in CODES else here
                elif i.kind is Kind.WAIT:
                    i.streams = [int(row["stream"])]
                elif i.kind is Kind.LEND:
                    i.allocates_in = here
                    lend_of[int(row["event"])] = i
                elif i.kind is Kind.RECLAIM:
                    lend = lend_of[int(row["event"])]
                    i.before.append((lend, Fraction(0)))
                    i.before += [(o, Fraction(0)) for o in out[lend.index : i.index] if o.kind is Kind.WAIT]
                    i.frees_in = here
                i.has_workspace = frees
                for other in out[:-1]:
                    if set(other.streams) & set(i.streams):
                        i.before.append((other, Fraction(0)))
                    if i.allocates_in is not None and other.frees_in == i.allocates_in:
                        i.before.append((other, Fraction(0)))
                if frees and i.index not in retired:
                    i.frees_in = int(row["memory"]) if i.kind in CODES else here
        return out

    def _bytes(self, device, row, encoded=True):
        owner = device if row["owner"] < 0 else int(row["owner"])
        size = self.problem.workload.program(owner).tensors[row["tensor"]].size_bytes
        part, parts = int(row["part"]), int(row["parts"])
        size = size * (part + 1) // parts - size * part // parts
        return self.machine.codecs[row["form"]].encoded_bytes(size) if encoded and row["form"] >= 0 else size

    def _events(self, schedule):
        signals = {}
        for instructions, rows in zip(self.lists, schedule.lists, strict=True):
            for i in instructions:
                if i.kind is Kind.SIGNAL:
                    signals[int(i.row["event"]), i.index // len(rows)] = i
        for instructions, rows in zip(self.lists, schedule.lists, strict=True):
            for i in instructions:
                if i.kind is Kind.WAIT:
                    signal = signals[int(i.row["event"]), i.index // len(rows)]
                    delay = 0 if signal.device == i.device else self.machine.overheads.handover_s
                    i.before.append((signal, Fraction(delay)))

    def _collectives(self):
        workload = self.problem.workload
        joined: dict[object, list[Instruction]] = {}
        for device, instructions in enumerate(self.lists):
            seen: dict[object, int] = {}
            for i in instructions:
                if i.kind is Kind.COLLECTIVE:
                    name = workload.program(device).ops[i.row["op"]].collective
                    key = (name, int(i.row["micro_batch"]))
                    seen[key] = seen.get(key, 0) + 1
                    joined.setdefault((*key, seen[key]), []).append(i)
        for (name, *_), members in joined.items():
            spec = workload.collective(name)
            loads = self.machine.collective_loads(spec.kind, spec.devices)
            largest = max((Fraction(load) for load in loads.values()), default=Fraction(0))
            for i in members:
                i.members, i.partners = members, len(spec.devices)
                i.work = Fraction(self.machine.overheads.launch_s)
                i.work += Fraction(self.machine.collective_latency_s(spec.kind, spec.devices))
                i.loads = {link: Fraction(load) / largest for link, load in loads.items()}
                i.bytes = spec.size_bytes * largest

    # --- time: section 8 -------------------------------------------------------------------------------------------

    def _policy(self, link):
        return self.policies[link] if self.policies else None

    def _is_ready(self, i, now):
        for member in i.members:
            while member.before:
                other, delay = member.before[-1]
                if other.effect is None or other.effect + delay > now:
                    return False
                member.before.pop()
        return True

    def _run(self):
        now = Fraction(0)
        capacity = {link: Fraction(spec.bandwidth_bytes_per_s) for link, spec in enumerate(self.machine.links)}
        busy: dict[int, Instruction] = {}
        while True:
            while self._settle(now) or self._take_engines(now, busy) or self._admit(now):
                pass
            flows = [i for i in self.all if i.flowing is not None and i.effect is None and i is i.members[0]]
            levels = max_min([i.loads for i in flows], capacity)
            rate = {}
            for i, level in zip(flows, levels, strict=True):
                rate[i] = level / self._slow_flow(i) if i.loads else None
            working = [i for i in self.all if i.start is not None and i.effect is None and i.streams == [0]]
            working = [i for i in working if i.kind is not Kind.WAIT]
            leaders = [i for i in self.all if i is i.members[0] and i.kind in (*TRANSFERS, Kind.COLLECTIVE)]
            setting_up = [i for i in leaders if i.start is not None and i.asked is None]
            times = [i.left / rate[i] for i in flows if rate[i]]
            times += [i.left * self._slow_compute(i, flows, setting_up) for i in working]
            times += [i.start + i.work - now for i in setting_up]
            pending = [pair for i in self.all for pair in i.before if pair[1]]
            arrivals = [o.effect + delay - now for o, delay in pending if o.effect is not None]
            times += [time for time in arrivals if time > 0]
            if not times:
                return
            elapsed = min(times)
            for i in flows:
                i.left -= elapsed * rate[i]
            slow = {i: self._slow_compute(i, flows, setting_up) for i in working}
            for i in working:
                i.left -= elapsed / slow[i]
            now += elapsed
            for i in flows:
                if i.left == 0:
                    self._end(i, now, busy)

    def _end(self, i, now, busy):
        for member in i.members:
            member.effect = now
        for engine in i.route.engines if i.route else ():
            del busy[engine]

    def _settle(self, now):
        """Whatever ends or starts at this moment without engines or links. Whether anything did."""
        happened = False
        for i in self.all:
            if i.effect is not None or i is not i.members[0]:
                continue
            ready = i.start is None and len(i.members) == i.partners and self._is_ready(i, now)
            if ready and i.kind in TRANSFERS:
                if i.ready is None:
                    i.ready, happened = now, True
            elif ready and i.kind in (Kind.COMPUTE, *CODES):
                i.start, i.left, happened = now, i.work, True
            elif ready and i.kind is Kind.COLLECTIVE:
                for member in i.members:
                    member.start = now
                happened = True
            elif ready:
                i.start = i.effect = now
                happened = True
            elif i.start is not None and i.kind in (Kind.COMPUTE, *CODES) and i.left == 0:
                i.effect, happened = now, True
            elif i.start is not None and i.asked is None and i.start + i.work <= now:
                if i.kind in TRANSFERS or i.kind is Kind.COLLECTIVE:
                    i.asked, i.left, happened = now, i.bytes, True
                if i.kind is Kind.COLLECTIVE:
                    for member in i.members:
                        member.flowing = now
                    if not i.loads or not i.bytes:
                        self._end(i, now, {})
        return happened

    def _take_engines(self, now, busy):
        waiting = [i for i in self.all if i.ready is not None and i.start is None]
        taken = set(busy)
        for i in sorted(waiting, key=lambda i: (i.ready, i.device, i.index)):
            if not taken & set(i.route.engines):
                i.start = now
                busy.update({engine: i for engine in i.route.engines})
                self._busy = busy
                return True
            taken |= set(i.route.engines)
        return False

    def _admit(self, now):
        asking = [i for i in self.all if i.kind in TRANSFERS and i.asked is not None and i.flowing is None]
        candidates = []
        for i in asking:
            eligible, rank = True, 0
            for link in i.route.links:
                policy = self._policy(link)
                if policy is None or policy.kind is LinkPolicyKind.FAIR:
                    continue
                holding = [o for o in self.all if o.kind in TRANSFERS and o.flowing is not None and o.effect is None]
                eligible &= sum(link in o.route.links for o in holding) < policy.slots
                if policy.kind is LinkPolicyKind.ORDER:
                    eligible &= next(o for o in self.order[link] if o.flowing is None) is i
                if policy.kind is LinkPolicyKind.PRIORITY:
                    ranked = list(policy.device_rank)
                    rank = max(rank, ranked.index(i.device) if i.device in ranked else len(ranked))
            if eligible:
                candidates.append((rank, i.asked, i.device, i.index, i))
        if not candidates:
            return False
        chosen = min(candidates, key=lambda c: c[:4])[4]
        chosen.flowing = now
        if not chosen.bytes:
            self._end(chosen, now, self._busy)
        return True

    # --- interference: 8.5 ---------------------------------------------------------------------------------------

    def _computes(self, device):
        return any(
            i.start is not None and i.effect is None and i.streams == [0] and i.kind is not Kind.WAIT
            for i in self.lists[device]
        )

    def _slow_flow(self, i):
        factors = self.machine.interference
        if i.kind is Kind.COLLECTIVE:
            together = any(self._computes(m.device) for m in i.members)
            return Fraction(factors.collective_during_compute) if together else Fraction(1)
        return Fraction(factors.copy_during_compute) if self._computes(i.device) else Fraction(1)

    def _slow_compute(self, i, flows, setting_up):
        factors = self.machine.interference
        memory = self.machine.devices[i.device].memory
        copies = [o for o in (*flows, *setting_up) if o.kind in TRANSFERS]
        slow = Fraction(1)
        if any(o.route.destination == memory for o in copies):
            slow *= Fraction(factors.compute_during_copy_in)
        if any(o.route.source == memory for o in copies):
            slow *= Fraction(factors.compute_during_copy_out)
        if any(o.kind is Kind.COLLECTIVE and i.device in [m.device for m in o.members] for o in flows):
            slow *= Fraction(factors.compute_during_collective)
        return slow
