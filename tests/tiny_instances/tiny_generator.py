"""Tiny random training steps, small enough that an exhaustive search finds their optimum.

An instance is the arguments of `tiny_instance`, nothing else: Python's `random.Random` is the same on every machine.
"""

import random

from tmojax.problem import (
    Action,
    Collective,
    CollectiveKind,
    Device,
    Lifetime,
    Link,
    Machine,
    Memory,
    MemoryKind,
    Op,
    Overheads,
    Phase,
    Problem,
    Program,
    Route,
    Tensor,
    TensorKind,
    Workload,
    keep_all_footprint_bytes,
    largest_op_bytes,
    validate_problem,
)

MB = 1_000_000
PATHS = ("shared", "half", "lanes", "two-level", "two-level-half", "uneven")


def tiny_instance(
    seed: int, *, gpus: int, micro_batches: int, layers: int, actions: list[str], path: str = "shared",
    state: bool = False, collective: bool = False, latency: bool = False, squeeze: float = 0.6,
) -> Problem:  # fmt: skip
    """`path`: how the GPUs reach the host. `squeeze`: capacity, from 0 (keeping everything fits) to 1 (the largest op
    just fits). `state`: a weight that both passes read and an optimizer tensor, which change in an update.
    `collective`: a gradient sum that the GPUs add up before the end."""
    rng = random.Random(seed)
    program = _program(rng, layers, state, collective)
    collectives = (Collective("sync", CollectiveKind.ALL_REDUCE, 2 * MB, tuple(range(gpus))),) if collective else ()
    workload = Workload("tiny", (program,), (0,) * gpus, micro_batches, "synthetic: random", collectives)
    most, least = keep_all_footprint_bytes(workload, 0), largest_op_bytes(workload, 0)[1]
    capacity = int(most - squeeze * (most - least))
    capacities = [capacity] * gpus
    if path == "uneven":
        capacities[-1] = int(most - 0.5 * squeeze * (most - least))
    machine = _machine(rng, path, capacities, latency)
    problem = Problem("tiny", workload, machine, frozenset(Action(name) for name in actions))
    validate_problem(problem)
    return problem


def _program(rng: random.Random, layers: int, state: bool, collective: bool) -> Program:
    tensors: list[Tensor] = []
    ops: list[Op] = []

    def tensor(name: str, size: int, kind: TensorKind, lifetime: Lifetime = Lifetime.MICRO_BATCH) -> int:
        tensors.append(Tensor(name, size * MB, kind, lifetime))
        return len(tensors) - 1

    def seconds() -> float:
        return rng.randint(1, 8) * 1e-3

    weight = total = moment = -1
    holder = rng.randrange(layers)
    if collective:
        total = tensor("sum", rng.randint(1, 3), TensorKind.GRADIENT, Lifetime.STATE)
    if state:
        weight = tensor("weight", rng.randint(1, 4), TensorKind.WEIGHT, Lifetime.STATE)
        moment = tensor("moment", rng.randint(1, 5), TensorKind.OPTIMIZER_STATE, Lifetime.STATE)
    data = tensor("data", 1, TensorKind.INPUT) if rng.random() < 0.3 else -1
    outputs: list[int] = []
    for i in range(layers):
        reads = [outputs[-1]] if outputs else [data] if data >= 0 else []
        if len(outputs) > 1 and rng.random() < 0.3:
            reads.append(outputs[0])
        if state and i == holder:
            reads.append(weight)
        outputs.append(tensor(f"t{i}", rng.randint(1, 6), TensorKind.ACTIVATION))
        ops.append(Op(f"f{i}", Phase.FORWARD, seconds(), tuple(reads), (outputs[-1],),
                      workspace_bytes=rng.choice([0, 0, MB])))  # fmt: skip
    gradient = -1
    for i in reversed(range(layers)):
        reads = [gradient] if gradient >= 0 else []
        reads += [outputs[j] for j in (i, i - 1) if j >= 0 and rng.random() < 0.75]
        updates = (total,) if total >= 0 and i == holder else ()
        if state and i == holder:
            reads.append(weight)
        gradient = tensor(f"g{i}", rng.randint(1, 2), TensorKind.GRADIENT)
        ops.append(Op(f"b{i}", Phase.BACKWARD, seconds(), tuple(reads), (gradient,), updates, recomputable=not updates))
    if collective:
        ops.append(Op("sync", Phase.COLLECTIVE, 0.0, (), (), (total,), recomputable=False, step_op=True,
                      collective="sync"))  # fmt: skip
    if state:
        ops.append(Op("update", Phase.OPTIMIZER, seconds(), (gradient,), (), (weight, moment), recomputable=False,
                      step_op=True))  # fmt: skip
    return Program("tiny", tuple(tensors), tuple(ops))


def _machine(rng: random.Random, path: str, capacities: list[int], latency: bool) -> Machine:
    """Memory 0 is the host, memory g + 1 that of GPU g."""
    rate, late = rng.choice([0.4, 0.8, 1.6]) * 1e9, rng.choice([1e-4, 5e-4]) if latency else 0.0
    overheads = Overheads(1e-4, 2e-4, 1e-4) if latency else Overheads()
    links: list[Link] = []

    def link(name: str, bandwidth: float) -> int:
        links.append(Link(name, bandwidth, late))
        return len(links) - 1

    if path in ("half", "two-level-half"):
        both = link("both", rate)
        common = ([both], [both])
    else:
        common = ([link("out", rate)], [link("in", rate)])
    if path in ("two-level", "two-level-half"):  # a second shared level, which limits both directions together
        fabric = link("fabric", 1.5 * rate)
        common = ([*common[0], fabric], [*common[1], fabric])
    engines: list[str] = []
    routes: list[Route] = []
    for g in range(len(capacities)):
        for inwards, name in enumerate(("out", "in")):
            way = list(common[inwards])
            if path in ("lanes", "uneven"):
                lane = 0.7 if path == "lanes" else (1.0, 0.4)[g % 2]
                way.append(link(f"lane{g}.{name}", lane * rate))
            engines.append(f"gpu{g}.{name}")
            ends = (0, g + 1) if inwards else (g + 1, 0)
            routes.append(Route(*ends, tuple(way), (len(engines) - 1,)))
    out, into = routes[0::2], routes[1::2]
    for a in range(len(capacities)):  # for collectives: through the host's links
        for b in range(len(capacities)):
            if a != b:
                way = tuple(dict.fromkeys(out[a].links + into[b].links))
                routes.append(Route(a + 1, b + 1, way, out[a].engines + into[b].engines))
    memories = [Memory("host", MemoryKind.HOST, 2**40)]
    memories += [Memory(f"gpu{g}", MemoryKind.DEVICE, size) for g, size in enumerate(capacities)]
    devices = tuple(Device(f"gpu{g}", "gpu", g + 1, 0) for g in range(len(capacities)))
    return Machine(path, tuple(memories), tuple(links), tuple(engines), tuple(routes), devices, overheads)
