"""Random small training steps with everything that a decode must handle: forks, several outputs, workspace, optimizer
state that rests, a gradient all-reduce, K micro-batches, inputs."""

import numpy as np

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
    validate_problem,
)


def shared_path_machine(gpus: int, capacity_bytes: int, *, rate: float = 100.0, half_duplex: bool = False) -> Machine:
    """GPUs with a lane each way behind one shared uplink each way; with `half_duplex` one more link sums both ways."""
    memories = [Memory(f"gpu{g}", MemoryKind.DEVICE, capacity_bytes) for g in range(gpus)]
    host = len(memories)
    memories.append(Memory("host", MemoryKind.HOST, 10**12))
    links = [Link(f"gpu{g}.{way}", rate) for g in range(gpus) for way in ("out", "in")]
    out, into, both = len(links), len(links) + 1, (len(links) + 2,) if half_duplex else ()
    links += [Link("uplink.out", rate), Link("uplink.in", rate)] + ([Link("uplink.both", rate)] if half_duplex else [])
    routes = []
    for g in range(gpus):
        routes.append(Route(g, host, (2 * g, out, *both), (2 * g,)))
        routes.append(Route(host, g, (2 * g + 1, into, *both), (2 * g + 1,)))
        routes += [
            Route(g, other, (2 * g, out, into, 2 * other + 1, *both), (2 * g, 2 * other + 1))
            for other in range(gpus)
            if other != g
        ]
    engines = tuple(f"gpu{g}.copy_{way}" for g in range(gpus) for way in ("out", "in"))
    devices = tuple(Device(f"gpu{g}", "gpu", g, host) for g in range(gpus))
    return Machine("shared path", tuple(memories), tuple(links), engines, tuple(routes), devices, Overheads(0.001))


def random_problem(seed: int, *, factor: float = 2.0, actions=(Action.OFFLOAD, Action.RECOMPUTE)) -> Problem:
    """A random problem with 1-3 GPUs; capacity = footprint / `factor`."""
    rng = np.random.default_rng(seed)
    gpus, micro_batches = int(rng.integers(1, 4)), int(rng.integers(1, 4))
    tensors: list[Tensor] = [Tensor("batch", int(rng.integers(1, 9)), TensorKind.INPUT)]
    ops: list[Op] = []

    def tensor(name: str, kind: TensorKind, lifetime: Lifetime = Lifetime.MICRO_BATCH, most: int = 60) -> int:
        tensors.append(Tensor(name, int(rng.integers(1, most)), kind, lifetime))
        return len(tensors) - 1

    def seconds() -> float:
        return float(rng.integers(1, 20)) / 100

    depth = int(rng.integers(3, 10))
    weights = [tensor(f"w{i}", TensorKind.WEIGHT, Lifetime.STATE, 10) for i in range(depth)]
    moments = [tensor(f"m{i}", TensorKind.OPTIMIZER_STATE, Lifetime.STATE, 20) for i in range(depth)]
    saved: list[int] = [0]
    produced: list[list[int]] = []
    for i in range(depth):
        reads = {saved[-1], *rng.choice(saved, size=min(2, len(saved)), replace=False).tolist()}
        outputs = [tensor(f"a{i}.{j}", TensorKind.ACTIVATION) for j in range(int(rng.integers(1, 3)))]
        ops.append(Op(f"f{i}", Phase.FORWARD, seconds(), (*sorted(reads), weights[i]), tuple(outputs),
                      workspace_bytes=int(rng.integers(0, 10)), recomputable=bool(rng.random() < 0.9),
                      layer=f"h{i // 2}"))  # fmt: skip
        saved += outputs
        produced.append(outputs)
    gradients, accumulators = [], []
    upstream: int | None = None
    for i in reversed(range(depth)):
        used = [t for t in {*ops[i].reads, *produced[i]} if t not in weights and rng.random() < 0.7]
        reads = sorted({*used, *([upstream] if upstream is not None else [])})
        upstream = tensor(f"g{i}", TensorKind.GRADIENT)
        if micro_batches == 1:
            gradient = tensor(f"dw{i}", TensorKind.GRADIENT, most=10)
            ops.append(
                Op(f"b{i}", Phase.BACKWARD, seconds(), (*reads, weights[i]), (upstream, gradient), layer=f"h{i // 2}")
            )
        else:
            gradient = tensor(f"dw{i}", TensorKind.GRADIENT, Lifetime.STATE, 10)
            ops.append(Op(f"b{i}", Phase.BACKWARD, seconds(), (*reads, weights[i]), (upstream,), (gradient,),
                          recomputable=False, layer=f"h{i // 2}"))  # fmt: skip
            accumulators.append(gradient)
        gradients.append((i, gradient))
        if gpus > 1 and i == depth // 2:
            ops.append(Op("sync", Phase.COLLECTIVE, 0.0, updates=(gradient,), recomputable=False, step_op=True,
                          collective="sync"))  # fmt: skip
    for i, gradient in reversed(gradients):
        resets = (gradient,) if micro_batches > 1 else ()
        reads = () if micro_batches > 1 else (gradient,)
        ops.append(Op(f"u{i}", Phase.OPTIMIZER, seconds(), reads, (), (weights[i], moments[i], *resets),
                      recomputable=False, step_op=True))  # fmt: skip
    program = Program("random", tuple(tensors), tuple(ops))
    collectives = (Collective("sync", CollectiveKind.ALL_REDUCE, 10, tuple(range(gpus))),) if gpus > 1 else ()
    workload = Workload("random", (program,), (0,) * gpus, micro_batches, "synthetic", collectives)
    capacity = max(1, int(keep_all_footprint_bytes(workload, 0) / factor))
    machine = shared_path_machine(gpus, capacity, half_duplex=bool(rng.random() < 0.5))
    problem = Problem(f"random {seed}", workload, machine, frozenset(actions))
    validate_problem(problem)
    return problem


def random_choice(view, rng) -> np.ndarray:
    """A random allowed choice for every candidate."""
    choice = np.zeros(len(view.tensor), np.int8)
    for index in range(len(choice)):
        options = [0] + ([1] if view.may_offload[index] else [])
        if view.may_recompute[index] or not view.needed[index]:
            options += [2, 2]
        choice[index] = rng.choice(options)
        if not view.needed[index] and rng.random() < 0.5:
            choice[index] = 2
    return choice
