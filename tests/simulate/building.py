"""Small machines, workloads and schedules for tests of the simulator."""

from __future__ import annotations

import numpy as np

from tmojax.problem import (
    Collective,
    CollectiveKind,
    Device,
    Interference,
    Kind,
    Lifetime,
    Link,
    LinkPolicy,
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
    overheads: Overheads = Overheads(),  # noqa: B008
    interference: Interference = Interference(),  # noqa: B008
    codecs=(),
) -> Machine:
    """GPUs behind one uplink; rates in bytes/s. `duplex`: limit on both directions of the uplink together (0: none).

    Links: out lane and in lane of each device (2d, 2d+1), uplink out, uplink in, and the duplex limit. Engines: out and
    in of each device. Peer copies go lane to lane. Latency is that of the uplinks.
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
        routes.append(Route(1 + d, HOST, (2 * d, 2 * devices, *extra), (2 * d,)))
        routes.append(Route(HOST, 1 + d, (2 * devices + 1, 2 * d + 1, *extra), (2 * d + 1,)))
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


def chain_problem(
    rng: np.random.Generator, devices: int, *, overheads=None, interference=None, duplex=0.0, micro_batches=2
):
    """A random small problem: per device a chain of ops with a backward that reads what the forward wrote, one STATE
    tensor that an update op changes, and sometimes a gradient all-reduce.
    """
    machine = box(
        devices,
        lane=float(rng.integers(5, 30)),
        uplink=float(rng.integers(5, 30)),
        duplex=duplex,
        latency_s=float(rng.choice([0.0, 0.125])),
        overheads=overheads or Overheads(),
        interference=interference or Interference(),
    )
    depth = int(rng.integers(1, 4))
    tensors = [tensor(f"a{i}", int(rng.integers(0, 40))) for i in range(depth)]
    tensors += [tensor("grad", int(rng.integers(1, 40))), tensor("w", int(rng.integers(1, 40)), Lifetime.STATE)]
    grad, weight = depth, depth + 1
    durations = [float(rng.integers(0, 8)) / 4 for _ in range(2 * depth + 1)]
    ops = [
        op(
            f"f{i}",
            durations[i],
            reads=[weight] + ([i - 1] if i else []),
            writes=[i],
            workspace_bytes=int(rng.integers(0, 2)) * 5,
        )
        for i in range(depth)
    ]
    for i in reversed(range(depth)):
        first = i == depth - 1
        ops.append(
            op(
                f"b{i}",
                durations[depth + i],
                reads=[i],
                writes=[grad] if first else [],
                updates=[] if first else [grad],
            )
        )
    collectives = ()
    if devices > 1 and rng.random() < 0.5:
        ops.append(op("sync", 0.0, reads=[grad], step_op=True, collective="sync"))
        collectives = (Collective("sync", CollectiveKind.ALL_REDUCE, int(rng.integers(0, 40)), tuple(range(devices))),)
    ops.append(op("step", durations[-1], reads=[grad], updates=[weight], step_op=True))
    program = (tensors, ops)
    return problem_of(machine, [program], micro_batches, collectives, [0] * devices)


def random_schedule(problem: Problem, rng: np.random.Generator, link_policies: tuple[LinkPolicy, ...] = ()) -> Schedule:
    """Offloads, prefetches, recomputations, peer copies, retires and cross-list signals at random places; every
    list can finish (signals only point to later parts of lists with a higher number).
    """
    workload = problem.workload
    lists, initial = [], []
    events: list[tuple[int, int]] = []  # (event, device) signalled so far
    for d in range(workload.device_count):
        program = workload.program(d)
        here = 1 + d
        builder = ListBuilder()
        away: set[tuple[int, int]] = set()
        state = [t for t, spec in enumerate(program.tensors) if spec.lifetime is Lifetime.STATE]
        initial.append(tuple(Placement(t, (here,)) for t in state))
        pending: list[int] = []
        for event, other in events:
            if rng.random() < 0.5 and other != d:
                builder.wait(event, int(rng.integers(0, 2 + len(problem.machine.engines))))
        for run, k in workload.sequence(d):
            spec = program.ops[run]
            for t in (*spec.reads, *spec.updates):
                instance = workload.instance(d, t, run, k)
                if (t, instance) in away:
                    producer = program.producer[t]
                    recompute = producer >= 0 and program.ops[producer].recomputable and not program.ops[producer].reads
                    if recompute and rng.random() < 0.5:
                        builder.compute(producer, instance)
                    else:
                        builder.prefetch(t, instance, HOST, here)
                    builder.release(t, instance, HOST)
                    away.discard((t, instance))
            if spec.collective:
                index = builder.collective(run, k)
            else:
                index = builder.compute(run, k)
            if spec.workspace_bytes:
                pending.append(index)
            if pending and rng.random() < 0.5:
                builder.retire(pending.pop())
            for t in spec.writes:
                instance = workload.instance(d, t, run, k)
                if not spec.step_op and rng.random() < 0.6:
                    last = builder.offload(t, instance, here, HOST)
                    if rng.random() < 0.2:
                        event = len(events)
                        builder.signal(event, last)
                        events.append((event, d))
                    builder.release(t, instance, here)
                    away.add((t, instance))
            if workload.device_count > 1 and rng.random() < 0.2 and spec.writes:
                t = spec.writes[0]
                instance = workload.instance(d, t, run, k)
                if (t, instance) not in away:
                    other = int(rng.choice([e for e in range(workload.device_count) if e != d]))
                    builder.offload(t, instance, here, 1 + other)
                    builder.release(t, instance, 1 + other)
        for index in pending:
            builder.retire(index)
        lists.append(builder.build())
    return Schedule(tuple(lists), tuple(initial), link_policies)


def transfers_of_link(problem: Problem, schedule: Schedule, link: int) -> list[tuple[int, int]]:
    found = []
    for d, rows in enumerate(schedule.lists):
        for i, row in enumerate(rows):
            if row["kind"] in (Kind.OFFLOAD, Kind.PREFETCH):
                if link in problem.machine.route(int(row["memory"]), int(row["to_memory"])).links:
                    found.append((d, i))
    return found
