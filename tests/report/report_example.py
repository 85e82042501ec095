"""A small data-parallel step on GPUs behind one shared host path, and a schedule for it written by hand."""

from tmojax.bounds import bound
from tmojax.check import check
from tmojax.planners.base import PlanResult, Status
from tmojax.problem import (
    COMPUTE_STREAM,
    Action,
    Collective,
    CollectiveKind,
    Device,
    Lifetime,
    Link,
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
    keep_all_footprint_bytes,
    validate_problem,
)
from tmojax.problem.io import problem_hash
from tmojax.report.outcome import Jitter, Outcome, RunReport
from tmojax.simulate import simulate

MB = 10**6


def machine(devices: int = 2, capacity_bytes: int = 70 * MB) -> Machine:
    """GPUs with own lanes (8 GB/s) behind one uplink (10 GB/s each way); peers go through the uplink as well."""
    host = devices
    memories = [Memory(f"gpu{d}", MemoryKind.DEVICE, capacity_bytes) for d in range(devices)]
    memories.append(Memory("host", MemoryKind.HOST, 4000 * MB))
    links = [Link(f"gpu{d}.{way}", 8e9, 1e-6) for d in range(devices) for way in ("out", "in")]
    up, down = len(links), len(links) + 1
    links += [Link("uplink.out", 10e9), Link("uplink.in", 10e9)]
    routes = []
    for d in range(devices):
        routes += [Route(d, host, (2 * d, up), (2 * d,)), Route(host, d, (2 * d + 1, down), (2 * d + 1,))]
        routes += [
            Route(d, e, (2 * d, up, down, 2 * e + 1), (2 * d, 2 * e + 1)) for e in range(devices) if e != d
        ]
    return Machine(
        name="two-lanes-one-uplink",
        memories=tuple(memories),
        links=tuple(links),
        engines=tuple(f"gpu{d}.{way}" for d in range(devices) for way in ("d2h", "h2d")),
        routes=tuple(routes),
        devices=tuple(Device(f"gpu{d}", "gpu", d, host, "example") for d in range(devices)),
        assumptions=("Bandwidths are invented for this example.",),
    )


def workload(devices: int = 2, layers: int = 3, micro_batches: int = 2) -> Workload:
    """Every layer: weights w (8 MB), output y (10 MB, recomputable) and an inner z (10 MB) that backward needs."""
    tensors: list[Tensor] = [Tensor("batch", MB, TensorKind.INPUT)]
    ops: list[Op] = []

    def tensor(name, size, kind, lifetime=Lifetime.MICRO_BATCH) -> int:
        tensors.append(Tensor(name, size, kind, lifetime))
        return len(tensors) - 1

    weights = [tensor(f"h{i}.w", 8 * MB, TensorKind.WEIGHT, Lifetime.STATE) for i in range(layers)]
    sums = [tensor(f"h{i}.gsum", 4 * MB, TensorKind.GRADIENT, Lifetime.STATE) for i in range(layers)]
    moments = [tensor(f"h{i}.m", 8 * MB, TensorKind.OPTIMIZER_STATE, Lifetime.STATE) for i in range(layers)]
    inner = [tensor(f"h{i}.z", 10 * MB, TensorKind.ACTIVATION) for i in range(layers)]
    outer = [tensor(f"h{i}.y", 10 * MB, TensorKind.ACTIVATION) for i in range(layers)]
    grads = [tensor(f"h{i}.dy", 5 * MB, TensorKind.GRADIENT) for i in range(layers)]
    for i in range(layers):
        source = outer[i - 1] if i else 0
        ops.append(Op(f"h{i}.mlp", Phase.FORWARD, 2e-3, (source, weights[i]), (inner[i],), workspace_bytes=2 * MB,
                      layer=f"h{i}"))  # fmt: skip
        ops.append(Op(f"h{i}.gelu", Phase.FORWARD, 0.3e-3, (inner[i],), (outer[i],), layer=f"h{i}"))
    for i in reversed(range(layers)):
        above = (grads[i + 1],) if i + 1 < layers else ()
        ops.append(Op(f"h{i}.back", Phase.BACKWARD, 4e-3, (*above, inner[i], outer[i], weights[i]), (grads[i],),
                      updates=(sums[i],), recomputable=False, workspace_bytes=3 * MB, layer=f"h{i}"))  # fmt: skip
    ops.append(Op("sync", Phase.COLLECTIVE, 0.0, tuple(sums), step_op=True, collective="sync", recomputable=False))
    ops.append(Op("adam", Phase.OPTIMIZER, 1e-3, tuple(sums), updates=(*weights, *moments), step_op=True,
                  recomputable=False))  # fmt: skip
    program = Program("step", tuple(tensors), tuple(ops))
    return Workload(
        "example", (program,), (0,) * devices, micro_batches, "synthetic: written by hand",
        (Collective("sync", CollectiveKind.ALL_REDUCE, 4 * layers * MB, tuple(range(devices))),),
    )  # fmt: skip


def problem(devices: int = 2, layers: int = 3, micro_batches: int = 2, capacity_bytes: int = 130 * MB) -> Problem:
    made = Problem(
        "example", workload(devices, layers, micro_batches), machine(devices, capacity_bytes),
        frozenset({Action.OFFLOAD, Action.RECOMPUTE}),
    )  # fmt: skip
    validate_problem(made)
    return made


def schedule(problem: Problem, offload: bool = True, recompute: bool = True) -> Schedule:
    """z leaves to the host and returns one op early (`offload`), y is recomputed (`recompute`), otherwise both stay."""
    lists, initial = [], []
    program, work = problem.workload.programs[0], problem.workload
    index = {spec.name: i for i, spec in enumerate(program.tensors)}
    op_index = {spec.name: i for i, spec in enumerate(program.ops)}
    layers = sum(spec.name.endswith(".w") for spec in program.tensors)
    for device in range(work.device_count):
        own, host, b = device, work.device_count, ListBuilder()
        for k in range(work.micro_batches):
            b.prefetch(index["batch"], k, host, own)
            for i in range(layers):
                b.compute(op_index[f"h{i}.mlp"], k)
                if i == 0:
                    b.release(index["batch"], k, own)
                elif recompute:
                    b.release(index[f"h{i - 1}.y"], k, own)
                b.compute(op_index[f"h{i}.gelu"], k)
                if offload and i + 1 < layers:
                    b.offload(index[f"h{i}.z"], k, own, host)
                    b.release(index[f"h{i}.z"], k, own)
            for i in reversed(range(layers)):
                if offload and i + 1 < layers:
                    if i + 2 == layers:
                        b.prefetch(index[f"h{i}.z"], k, host, own)
                if recompute and i + 1 < layers:
                    b.compute(op_index[f"h{i}.gelu"], k)
                if offload and 0 < i < layers - 1:
                    b.prefetch(index[f"h{i - 1}.z"], k, host, own)
                b.compute(op_index[f"h{i}.back"], k)
                if i + 1 < layers:
                    b.release(index[f"h{i + 1}.dy"], k, own)
                b.release(index[f"h{i}.z"], k, own)
                b.release(index[f"h{i}.y"], k, own)
                if offload and i + 1 < layers:
                    b.release(index[f"h{i}.z"], k, host)
            b.release(index["h0.dy"], k, own)
        sync = b.collective(op_index["sync"], 0)
        b.signal(device, sync)
        b.wait(device, COMPUTE_STREAM)
        b.compute(op_index["adam"], 0)
        lists.append(b.build())
        initial.append(tuple(Placement(t, (own,)) for t, s in enumerate(program.tensors) if s.lifetime == "state"))
    return Schedule(tuple(lists), tuple(initial))


def run_report(devices: int = 2, layers: int = 3, micro_batches: int = 4, capacity_bytes: int = 120 * MB) -> RunReport:
    """Three planners by hand: one that does not fit, one that recomputes and offloads, one that only offloads."""
    made = problem(devices, layers, micro_batches, capacity_bytes)
    lower = bound(made)
    outcomes = []
    for name, offload, recompute in (("keep-all", False, False), ("offload", True, False), ("mixed", True, True)):
        plan = schedule(made, offload, recompute)
        simulation = simulate(made, plan, record=True)
        checked = check(made, plan)
        result = PlanResult(name, Status.FEASIBLE, plan, simulation.step_s, plan_s=0.25, compile_s=0.1)
        jitter = Jitter(simulation.step_s * 1.01, simulation.step_s * 1.05, 0.05, 20)
        outcomes.append(
            Outcome(result, checked, simulation, lower.bound_s, jitter, name == "offload", heuristic=True)
        )
    footprint = tuple(keep_all_footprint_bytes(made.workload, d) for d in range(devices))
    return RunReport(
        made, problem_hash(made), tuple(outcomes), footprint, simulate(made, schedule(made, False, False)).step_s,
        lower, provenance={"tmojax": "0", "seed": 0},
    )  # fmt: skip
