"""Speed of the simulator: compile, lower and run times, events per second.

    python benchmarks/simulate/speed.py [--repeats 5]

The steps are synthetic and have the shape of GPT-2's: per micro-batch `ops` forward ops in a chain, each with one
output, and as many backward ops in reverse that read it; every activation is offloaded after its use and prefetched
four ops before it returns; weights, gradients and an update per layer; one all-reduce; GPUs behind one shared uplink.
"""

from __future__ import annotations

import argparse
import os
import platform
import time

import numpy as np

from tmojax.problem import (
    Collective,
    CollectiveKind,
    Device,
    Interference,
    Lifetime,
    Link,
    LinkPolicy,
    LinkPolicyKind,
    ListBuilder,
    Machine,
    Memory,
    MemoryKind,
    Op,
    Phase,
    Placement,
    Problem,
    Program,
    Route,
    Schedule,
    Tensor,
    TensorKind,
    Workload,
)
from tmojax.simulate import prepare

GB = 10**9
HOST = 0
LOOKAHEAD = 4
OPS_PER_LAYER = 28

CASES = {
    "GPT-2 12 layers, 4 GPUs, K=8": (4, 12, 8),
    "GPT-2 XL 48 layers, 4 GPUs, K=4": (4, 48, 4),
    "GPT-2 XL 48 layers, 8 GPUs, K=8": (8, 48, 8),
}


def box(gpus: int, interference: Interference) -> Machine:
    links = [Link("up", 25.0 * GB, 1e-6), Link("down", 25.0 * GB, 1e-6)]
    routes = []
    for gpu in range(gpus):
        links += [Link(f"out{gpu}", 25.0 * GB), Link(f"in{gpu}", 25.0 * GB)]
        routes.append(Route(1 + gpu, HOST, (2 + 2 * gpu, 0), (2 * gpu,)))
        routes.append(Route(HOST, 1 + gpu, (1, 3 + 2 * gpu), (2 * gpu + 1,)))
    for a in range(gpus):
        routes += [Route(1 + a, 1 + b, (2 + 2 * a, 3 + 2 * b), (2 * a, 2 * b + 1)) for b in range(gpus) if b != a]
    memories = [Memory("host", MemoryKind.HOST, 10**12)]
    memories += [Memory(f"gpu{gpu}", MemoryKind.DEVICE, 24 * GB) for gpu in range(gpus)]
    devices = tuple(Device(f"gpu{gpu}", "gpu", 1 + gpu, HOST) for gpu in range(gpus))
    engines = tuple(f"engine{engine}" for engine in range(2 * gpus))
    return Machine("box", tuple(memories), tuple(links), engines, tuple(routes), devices, interference=interference)


def step(gpus: int, layers: int, micro_batches: int, interference: Interference) -> tuple[Problem, Schedule]:
    """A data-parallel step and a schedule that offloads every activation."""
    rng = np.random.default_rng(0)
    forward = layers * OPS_PER_LAYER
    sizes = rng.integers(2_000_000, 30_000_000, forward)
    seconds = rng.uniform(2e-4, 1e-3, forward)
    tensors = [Tensor(f"a{i}", int(sizes[i]), TensorKind.ACTIVATION) for i in range(forward)]
    tensors += [Tensor(f"w{i}", 14_000_000, TensorKind.WEIGHT, Lifetime.STATE) for i in range(layers)]
    tensors += [Tensor(f"g{i}", 14_000_000, TensorKind.GRADIENT, Lifetime.STATE) for i in range(layers)]
    ops = []
    for i in range(forward):
        reads = (i - 1, forward + i // OPS_PER_LAYER) if i else (forward,)
        ops.append(Op(f"f{i}", Phase.FORWARD, float(seconds[i]), reads, (i,), workspace_bytes=10**6 * (i % 2)))
    for i in reversed(range(forward)):
        weight = forward + i // OPS_PER_LAYER
        ops.append(
            Op(
                f"b{i}",
                Phase.BACKWARD,
                2 * float(seconds[i]),
                (i, weight),
                updates=(weight + layers,),
                recomputable=False,
            )
        )
    gradients = tuple(range(forward + layers, forward + 2 * layers))
    ops.append(Op("sync", Phase.COLLECTIVE, 0.0, gradients, recomputable=False, step_op=True, collective="sync"))
    for i in range(layers):
        reads, updates = (forward + layers + i,), (forward + i,)
        ops.append(Op(f"u{i}", Phase.OPTIMIZER, 1e-4, reads, updates=updates, recomputable=False, step_op=True))
    collective = Collective("sync", CollectiveKind.ALL_REDUCE, 14_000_000 * layers, tuple(range(gpus)))
    workload = Workload(
        "step", (Program("gpt", tuple(tensors), tuple(ops)),), (0,) * gpus, micro_batches, "synthetic", (collective,)
    )
    problem = Problem("speed", workload, box(gpus, interference), frozenset())
    lists = tuple(_list(1 + gpu, forward, layers, micro_batches) for gpu in range(gpus))
    state = tuple(tuple(Placement(forward + i, (1 + gpu,)) for i in range(2 * layers)) for gpu in range(gpus))
    return problem, Schedule(lists, state)


def _list(here: int, forward: int, layers: int, micro_batches: int) -> np.ndarray:
    builder = ListBuilder()
    for k in range(micro_batches):
        for i in range(forward):
            builder.compute(i, k)
            if i:
                builder.offload(i - 1, k, here, HOST)
                builder.release(i - 1, k, here)
        fetched = forward - 1  # the last output is still there
        for i in reversed(range(forward)):
            while fetched > max(0, i - LOOKAHEAD):
                fetched -= 1
                builder.prefetch(fetched, k, HOST, here)
                builder.release(fetched, k, HOST)
            builder.compute(2 * forward - 1 - i, k)
            builder.release(i, k, here)
    for i in range(1 + layers):
        builder.collective(2 * forward, 0) if i == 0 else builder.compute(2 * forward + i, 0)
    return builder.build()


def policies(problem: Problem, kind: LinkPolicyKind) -> tuple[LinkPolicy, ...]:
    fair = LinkPolicy()
    return (LinkPolicy(kind), LinkPolicy(kind), *(fair for _ in problem.machine.links[2:]))


def fastest(function, repeats: int) -> float:
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return min(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    small, schedule = step(2, 1, 1, Interference())
    start, cpu = time.perf_counter(), time.process_time()
    prepare(small, schedule).run()
    print(f"first call: {time.perf_counter() - start:.1f} s, {time.process_time() - cpu:.1f} s of CPU")
    print(
        f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}; best of {arguments.repeats}"
    )
    print("| case | policy | instructions | prepare ms | run ms | events | events/s |\n|---|---|---|---|---|---|---|")
    for name, shape in CASES.items():
        problem, schedule = step(*shape, Interference())
        prepare_s = fastest(lambda p=problem, s=schedule: prepare(p, s), arguments.repeats)
        prepared = prepare(problem, schedule)
        rows = sum(map(len, schedule.lists))
        for kind in (LinkPolicyKind.FAIR, LinkPolicyKind.FCFS):
            chosen = policies(problem, kind)
            run_s = fastest(lambda p=prepared, c=chosen: p.run(link_policies=c).step_s, arguments.repeats)
            events = prepared.run(link_policies=chosen).events
            print(
                f"| {name} | {kind} | {rows} | {prepare_s * 1e3:.1f} | {run_s * 1e3:.1f} | {events} "
                f"| {events / run_s / 1e6:.2f} M |"
            )
    problem, schedule = step(*CASES["GPT-2 12 layers, 4 GPUs, K=8"], Interference(1.1, 1.1, 1.1, 1.1, 1.1))
    prepared = prepare(problem, schedule)
    run_s = fastest(lambda: prepared.run().step_s, arguments.repeats)
    events = prepared.run().events
    print(f"with interference, 12 layers: {run_s * 1e3:.1f} ms, {events / run_s / 1e6:.2f} M events/s")


if __name__ == "__main__":
    main()
