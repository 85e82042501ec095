"""Small machines, workloads and schedules for tests of the simulator."""

from __future__ import annotations

import numpy as np

from tmojax.problem import (
    Codec,
    Collective,
    CollectiveKind,
    Device,
    Interference,
    Kind,
    Lifetime,
    Link,
    LinkPolicy,
    LinkPolicyKind,
    ListBuilder,
    Machine,
    Memory,
    MemoryKind,
    Op,
    Overheads,
    Phase,
    Placement,
    Problem,
    Program,
    Route,
    Schedule,
    Tensor,
    TensorKind,
    Workload,
    validate_problem,
)

HOST = 0  # memory 0 is the host's, memory 1 + d that of device d


def box(
    devices: int,
    *,
    lane: float = 10.0,
    uplink: float = 10.0,
    duplex: float = 0.0,
    latency_s: float = 0.0,
    peers: bool = True,
    host_engines: bool = True,
    overheads: Overheads = Overheads(),  # noqa: B008
    interference: Interference = Interference(),  # noqa: B008
    codecs=(),
) -> Machine:
    """GPUs behind one uplink; rates in bytes/s. `duplex`: limit on both directions of the uplink together (0: none).

    Links: out lane and in lane of each device (2d, 2d+1), uplink out, uplink in, and the duplex limit. Engines: out and
    in of each device; `host_engines` says whether copies to and from the host hold them. Peer copies go lane to lane.
    Latency is that of the uplinks.
    """
    links = []
    for d in range(devices):
        links += [Link(f"out{d}", lane), Link(f"in{d}", lane)]
    links += [Link("up", uplink, latency_s), Link("down", uplink, latency_s)]
    extra = ()
    if duplex:
        links.append(Link("duplex", duplex))
        extra = (2 * devices + 2,)
    routes = []
    for d in range(devices):
        held = ((2 * d,), (2 * d + 1,)) if host_engines else ((), ())
        routes.append(Route(1 + d, HOST, (2 * d, 2 * devices, *extra), held[0]))
        routes.append(Route(HOST, 1 + d, (2 * devices + 1, 2 * d + 1, *extra), held[1]))
    for a in range(devices if peers else 0):
        for b in range(devices):
            if a != b:
                routes.append(Route(1 + a, 1 + b, (2 * a, 2 * b + 1), (2 * a, 2 * b + 1)))
    return Machine(
        "box",
        (
            Memory("host", MemoryKind.HOST, 10**6),
            *(Memory(f"gpu{d}", MemoryKind.DEVICE, 10**6) for d in range(devices)),
        ),
        tuple(links),
        tuple(f"engine{e}" for e in range(2 * devices)),
        tuple(routes),
        tuple(Device(f"gpu{d}", "gpu", 1 + d, HOST) for d in range(devices)),
        overheads,
        interference,
        codecs,
    )


def tensor(name: str, size_bytes: int, lifetime: Lifetime = Lifetime.MICRO_BATCH, alias_group: str = "") -> Tensor:
    return Tensor(name, size_bytes, TensorKind.ACTIVATION, lifetime, alias_group)


def op(
    name: str, duration_s: float, reads=(), writes=(), updates=(), workspace_bytes=0, step_op=False, collective=""
) -> Op:
    return Op(
        name, Phase.FORWARD, duration_s, tuple(reads), tuple(writes), tuple(updates), workspace_bytes,
        recomputable=not updates, step_op=step_op, collective=collective,
    )  # fmt: skip


def problem_of(machine: Machine, programs, micro_batches: int = 1, collectives=(), device_program=None) -> Problem:
    """`programs`: pairs (tensors, ops), one per device unless `device_program` says otherwise."""
    workload = Workload(
        "work",
        tuple(Program(f"p{i}", tuple(tensors), tuple(ops)) for i, (tensors, ops) in enumerate(programs)),
        tuple(range(len(machine.devices))) if device_program is None else tuple(device_program),
        micro_batches,
        "synthetic",
        tuple(collectives),
    )
    problem = Problem("test", workload, machine, frozenset())
    validate_problem(problem)
    return problem


def schedule_of(*lists: ListBuilder, initial=None, link_policies: tuple[LinkPolicy, ...] = ()) -> Schedule:
    built = tuple(builder.build() for builder in lists)
    return Schedule(built, tuple(() for _ in built) if initial is None else initial, link_policies)


CODEC = Codec("half", 1, 2, 40.0, 80.0, workspace_numerator=1)


def chain_problem(rng: np.random.Generator, devices: int, *, overheads=None, interference=None, duplex=0.0):
    """A random small problem: per device a chain of ops with a backward that reads what the forward wrote, some outputs
    views of others, one STATE tensor that an update op changes, and sometimes a gradient all-reduce.
    """
    machine = box(
        devices,
        lane=float(rng.integers(5, 30)),
        uplink=float(rng.integers(5, 30)),
        duplex=duplex,
        host_engines=bool(rng.random() < 0.8),
        latency_s=float(rng.choice([0.0, 0.125])),
        overheads=overheads or Overheads(),
        interference=interference or Interference(),
        codecs=(CODEC,),
    )
    depth = int(rng.integers(1, 4))
    views = rng.random() < 0.3
    tensors = [
        tensor(f"a{i}", int(rng.integers(0, 40)), alias_group="views" if views and i < 2 else "") for i in range(depth)
    ]
    tensors += [tensor("grad", int(rng.integers(1, 40))), tensor("w", int(rng.integers(1, 40)), Lifetime.STATE)]
    grad, weight = depth, depth + 1
    durations = [float(rng.integers(0, 8)) / 4 for _ in range(2 * depth + 1)]
    ops = []
    for i in range(depth):
        reads = [weight, i - 1] if i else [weight]
        ops.append(op(f"f{i}", durations[i], reads, [i], workspace_bytes=int(rng.integers(0, 2)) * 5))
    for i in reversed(range(depth)):
        written = {"writes": [grad]} if i == depth - 1 else {"updates": [grad]}
        ops.append(op(f"b{i}", durations[depth + i], [i], **written))
    collectives = ()
    if devices > 1 and rng.random() < 0.5:
        ops.append(op("sync", 0.0, reads=[grad], step_op=True, collective="sync"))
        collectives = (Collective("sync", CollectiveKind.ALL_REDUCE, int(rng.integers(0, 40)), tuple(range(devices))),)
    ops.append(op("step", durations[-1], reads=[grad], updates=[weight], step_op=True))
    return problem_of(machine, [(tensors, ops)], int(rng.integers(1, 3)), collectives, [0] * devices)


class RandomList:
    """One list: ops in order; between them activations leave (for a peer; for the host plain, in slices, encoded) and
    return, some are recomputed instead, workspace is retired late, memory is lent, peers get copies, streams wait for
    other lists.
    """

    def __init__(self, problem: Problem, device: int, rng: np.random.Generator, events: list[tuple[int, int]]) -> None:
        self.problem, self.device, self.rng, self.events = problem, device, rng, events
        self.here = 1 + device
        self.builder = ListBuilder()
        self.away: dict[tuple[int, int], str] = {}
        self.pending: list[int] = []

    def signal(self, after: int) -> None:
        self.builder.signal(len(self.events), after)
        self.events.append((len(self.events), self.device))

    def wait(self) -> None:
        others = [event for event, device in self.events if device != self.device]
        if others:
            self.builder.wait(
                int(self.rng.choice(others)), int(self.rng.integers(0, 2 + len(self.problem.machine.engines)))
            )

    def leave(self, t: int, k: int) -> None:
        builder, here, way = (
            self.builder,
            self.here,
            str(self.rng.choice(["plain", "slices", "encoded", "mixed", "peer"])),
        )
        if way == "peer" and self.problem.workload.device_count == 1:
            way = "plain"
        self.away[t, k] = way
        peer = 1 + (self.device + 1) % self.problem.workload.device_count
        if way == "slices":
            for part in range(3):
                last = builder.offload(t, k, here, HOST, part=part, parts=3)
        elif way == "encoded":
            builder.encode(t, k, here, 0)
            last = builder.offload(t, k, here, HOST, form=0)
            builder.release(t, k, here, form=0)
        else:
            last = builder.offload(t, k, here, peer if way == "peer" else HOST)
        if self.rng.random() < 0.2:
            self.signal(last)
        builder.release(t, k, here)

    def come_back(self, t: int, k: int) -> None:
        builder, here, way = self.builder, self.here, self.away.pop((t, k))
        program = self.problem.workload.program(self.device)
        there = 1 + (self.device + 1) % self.problem.workload.device_count if way == "peer" else HOST
        if len(program.ops[t].reads) == 1 and self.rng.random() < 0.4:
            builder.compute(t, k)  # op t of these chains writes tensor t; only the first reads nothing but weights
        elif way == "encoded":
            builder.prefetch(t, k, HOST, here, form=0)
            builder.decode(t, k, here, 0)
            builder.release(t, k, here, form=0)
        elif way == "mixed":  # leaves whole, returns in slices
            for part in range(2):
                builder.prefetch(t, k, HOST, here, part=part, parts=2)
        else:
            builder.prefetch(t, k, there, here)  # of slices: assembles the whole
        if way == "peer":
            builder.release(t, k, there)
            return
        for part in range(3 if way == "slices" else 1):
            builder.release(
                t, k, HOST, form=0 if way == "encoded" else -1, part=part, parts=3 if way == "slices" else 1
            )

    def run(self) -> np.ndarray:
        problem, rng, builder, d, here = self.problem, self.rng, self.builder, self.device, self.here
        workload, program = problem.workload, problem.workload.program(d)
        activations = {t for t in range(len(program.tensors)) if program.tensors[t].name.startswith("a")}
        for number, (run, k) in enumerate(workload.sequence(d)):
            spec = program.ops[run]
            if rng.random() < 0.3:
                self.wait()
            if rng.random() < 0.1:
                last = builder.lend(7, (d + 1) % workload.device_count, number)
                if rng.random() < 0.5:
                    self.signal(last)
                self.wait()
                builder.reclaim(number)
            for t in (*spec.reads, *spec.updates):
                if (t, k) in self.away:
                    self.come_back(t, k)
            index = builder.collective(run, k) if spec.collective else builder.compute(run, k)
            if spec.workspace_bytes:
                self.pending.append(index)
            if self.pending and rng.random() < 0.5:
                builder.retire(self.pending.pop())
            for t in spec.writes:
                if t in activations and rng.random() < 0.6:
                    self.leave(t, k)
                elif t in activations and workload.device_count > 1 and rng.random() < 0.4:
                    other = int(rng.choice([e for e in range(workload.device_count) if e != d]))
                    builder.offload(t, k, here, 1 + other)
                    builder.release(t, k, 1 + other)
        for index in self.pending:
            builder.retire(index)
        return builder.build()


def random_schedule(problem: Problem, rng: np.random.Generator) -> Schedule:
    """Not a valid schedule in every respect, but one that can finish: lists wait only for lists before them."""
    events: list[tuple[int, int]] = []
    lists = tuple(RandomList(problem, d, rng, events).run() for d in range(problem.workload.device_count))
    state = [t for t, spec in enumerate(problem.workload.program(0).tensors) if spec.lifetime is Lifetime.STATE]
    return Schedule(lists, tuple(tuple(Placement(t, (1 + d,)) for t in state) for d in range(len(lists))))


def random_policies(problem: Problem, rng: np.random.Generator) -> tuple[LinkPolicy, ...]:
    """All kinds but `order`."""
    devices = problem.workload.device_count
    policies = []
    for _ in problem.machine.links:
        kind = rng.choice([LinkPolicyKind.FAIR, LinkPolicyKind.FCFS, LinkPolicyKind.PRIORITY])
        rank = tuple(rng.permutation(devices)[: rng.integers(0, devices + 1)].tolist())
        slots = int(rng.integers(1, 3))
        policies.append(LinkPolicy(LinkPolicyKind(str(kind)), slots, rank if kind == LinkPolicyKind.PRIORITY else ()))
    return tuple(policies)


def random_case(seed: int, **options):
    """(problem, schedule, link policies, steps); with overheads, interference and a duplex limit at times."""
    rng = np.random.default_rng(seed)
    overheads = Overheads(*(float(x) for x in rng.choice([0.0, 0.25, 0.5], 3)))
    interference = Interference(*(float(x) for x in rng.choice([1.0, 1.0, 1.5, 2.0], 5)))
    problem = chain_problem(
        rng,
        int(rng.integers(1, 4)),
        overheads=options.get("overheads", overheads),
        interference=interference if options.get("interference", rng.random() < 0.4) else Interference(),
        duplex=float(rng.choice([0.0, 0.0, 15.0])),
    )
    schedule = random_schedule(problem, rng)
    policies = random_policies(problem, rng) if rng.random() < 0.7 else ()
    return problem, schedule, policies, int(rng.integers(1, 4))


def transfers_of_link(problem: Problem, schedule: Schedule, link: int) -> list[tuple[int, int]]:
    """(device, instruction) of every transfer that crosses a link."""
    found = []
    for d, rows in enumerate(schedule.lists):
        for i, row in enumerate(rows):
            if row["kind"] in (Kind.OFFLOAD, Kind.PREFETCH):
                if link in problem.machine.route(int(row["memory"]), int(row["to_memory"])).links:
                    found.append((d, i))
    return found


def one_op(machine: Machine, size_bytes: int = 100, duration_s: float = 1.0) -> Problem:
    """Every device runs `f`, which writes one tensor, then `g` of 2 s, which needs nothing."""
    program = ([tensor("x", size_bytes)], [op("f", duration_s, writes=[0]), op("g", 2.0)])
    return problem_of(machine, [program], device_program=[0] * len(machine.devices))


def offloading(device: int) -> ListBuilder:
    """f, its output to the host, g."""
    builder = ListBuilder()
    builder.compute(0, 0)
    builder.offload(0, 0, 1 + device, HOST)
    builder.compute(1, 0)
    return builder


def uplink_policy(machine: Machine, policy: LinkPolicy) -> tuple[LinkPolicy, ...]:
    """`policy` on the uplink of a box, all else fair."""
    chosen = [LinkPolicy()] * len(machine.links)
    chosen[2 * len(machine.devices)] = policy
    return tuple(chosen)
