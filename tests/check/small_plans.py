"""Small problems and valid plans for them, by hand. Sizes are chosen so that a sum shows what it is made of."""

from __future__ import annotations

from dataclasses import replace

from plan_text import Plan, lines

from tmojax.problem import (
    Action,
    Codec,
    Device,
    Lifetime,
    Link,
    Machine,
    Memory,
    MemoryKind,
    Op,
    Phase,
    Problem,
    Program,
    Route,
    Tensor,
    TensorKind,
    Workload,
    validate_problem,
)

HOST, GPU0, GPU1 = 0, 1, 2
HALF = Codec("half", 1, 2, 1e9, 1e9, workspace_numerator=1)  # half the size, as much scratch


def machine(gpus: int, capacity_bytes: int = 10_000, host_bytes: int = 100_000, **host) -> Machine:
    """GPUs behind one uplink with a path to each peer. Engines: out0, in0, out1, in1, ... Links: up, down, peer."""
    routes = []
    for gpu in range(gpus):
        routes.append(Route(1 + gpu, HOST, (0,), (2 * gpu,)))
        routes.append(Route(HOST, 1 + gpu, (1,), (2 * gpu + 1,)))
        routes += [Route(1 + gpu, 1 + p, (2,), (2 * gpu, 2 * p + 1)) for p in range(gpus) if p != gpu]
    return Machine(
        "box",
        (
            Memory("host", MemoryKind.HOST, host_bytes, **host),
            *(Memory(f"gpu{gpu}", MemoryKind.DEVICE, capacity_bytes) for gpu in range(gpus)),
        ),
        (Link("up", 1e9), Link("down", 1e9), Link("peer", 1e9)),
        tuple(f"{way}{gpu}" for gpu in range(gpus) for way in ("out", "in")),
        tuple(routes),
        tuple(Device(f"gpu{gpu}", "gpu", 1 + gpu, HOST) for gpu in range(gpus)),
        codecs=(HALF,),
    )


def problem(workload: Workload, box: Machine) -> Problem:
    result = Problem("small", workload, box, frozenset(Action))
    validate_problem(result)
    return result


def with_memory(plan: Plan, name: str, **changes) -> Plan:
    """The plan on a machine with one memory changed."""
    box = plan.problem.machine
    memories = tuple(replace(m, **changes) if m.name == name else m for m in box.memories)
    return replace(plan, problem=replace(plan.problem, machine=replace(box, memories=memories)))


# --- one layer: x -> a -> b, backward from b and a, update of w -------------------------------------------------------

X, W, A, B, G = range(5)
LAYER = Program(
    "layer",
    (
        Tensor("x", 100, TensorKind.INPUT),
        Tensor("w", 1000, TensorKind.WEIGHT, Lifetime.STATE),
        Tensor("a", 400, TensorKind.ACTIVATION),
        Tensor("b", 300, TensorKind.ACTIVATION),
        Tensor("g", 70, TensorKind.GRADIENT),
    ),
    (
        Op("f1", Phase.FORWARD, 1.0, reads=(X, W), writes=(A,), workspace_bytes=5),
        Op("f2", Phase.FORWARD, 1.0, reads=(A, W), writes=(B,)),
        Op("back", Phase.BACKWARD, 2.0, reads=(A, B), writes=(G,), workspace_bytes=20),
        Op("step", Phase.OPTIMIZER, 1.0, reads=(G,), updates=(W,), recomputable=False, step_op=True),
    ),
)


def layer(micro_batches: int = 1, gpus: int = 1) -> Problem:
    workload = Workload("layer", (LAYER,), (0,) * gpus, micro_batches, "synthetic")
    return problem(workload, machine(gpus))


KEEP = Plan(
    layer(),
    (
        lines("""
        prefetch x host gpu0
        compute f1
        release x gpu0
        compute f2
        compute back
        release a gpu0
        release b gpu0
        compute step
        release g gpu0
        """),
    ),
    ({"w": ("gpu0",)},),
)

# `a` leaves and comes back, `w` lives on the host as well, workspace of f1 overlaps the offload.
SWAP = Plan(
    layer(),
    (
        lines("""
        prefetch w host gpu0
        prefetch x host gpu0
        f: compute f1
        offload a gpu0 host
        retire f
        release x gpu0
        compute f2
        release a gpu0
        release x host
        prefetch a host gpu0
        compute back
        release a gpu0
        release a host
        release b gpu0
        compute step
        offload w gpu0 host
        release w gpu0
        release g gpu0
        """),
    ),
    ({"w": ("host",)},),
)

# `a` is dropped after f2 and computed again for the backward op.
RECOMPUTE = Plan(
    layer(),
    (
        lines("""
        prefetch x host gpu0
        compute f1
        compute f2
        release a gpu0
        again: compute f1
        release x gpu0
        compute back
        release a gpu0
        release b gpu0
        compute step
        release g gpu0
        """),
    ),
    ({"w": ("gpu0",)},),
)

ENCODED = Plan(
    layer(),
    (
        lines("""
        prefetch x host gpu0
        compute f1
        release x gpu0
        compute f2
        encode a gpu0 half
        release a gpu0
        offload a gpu0 host form=half
        release a gpu0 form=half
        prefetch a host gpu0 form=half
        decode a gpu0 half
        release a host form=half
        compute back
        release a gpu0 form=half
        release a gpu0
        release b gpu0
        compute step
        release g gpu0
        """),
    ),
    ({"w": ("gpu0",)},),
)

SLICED = Plan(
    layer(),
    (
        lines("""
        prefetch x host gpu0
        compute f1
        release x gpu0
        compute f2
        offload a gpu0 host part=0/3
        offload a gpu0 host part=1/3
        offload a gpu0 host part=2/3
        release a gpu0
        prefetch a host gpu0 part=1/3
        prefetch a host gpu0 part=0/3
        prefetch a host gpu0 part=2/3
        compute back
        release a gpu0 part=0/3
        release a gpu0 part=1/3
        release a gpu0 part=2/3
        release a host part=0/3
        release a host part=1/3
        release a host part=2/3
        release b gpu0
        compute step
        release g gpu0
        """),
    ),
    ({"w": ("gpu0",)},),
)

TWO_BATCHES = Plan(
    layer(micro_batches=2),
    (
        lines("""
        prefetch x.0 host gpu0
        compute f1.0
        compute f2.0
        release x.0 gpu0
        prefetch x.1 host gpu0
        compute back.0
        release a.0 gpu0
        release b.0 gpu0
        release g.0 gpu0
        compute f1.1
        compute f2.1
        release x.1 gpu0
        compute back.1
        release a.1 gpu0
        release b.1 gpu0
        compute step
        release g.1 gpu0
        """),
    ),
    ({"w": ("gpu0",)},),
)

ONE_GPU = {
    "keep": KEEP,
    "swap": SWAP,
    "recompute": RECOMPUTE,
    "encoded": ENCODED,
    "sliced": SLICED,
    "two batches": TWO_BATCHES,
}
