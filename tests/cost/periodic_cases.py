"""Small problems whose best step time can be worked out by hand, and transformers with round figures."""

from dataclasses import replace

from tmojax.importers.synthetic import SyntheticTransformer, synthetic_transformer
from tmojax.problem import (
    Action,
    Device,
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
    keep_all_footprint_bytes,
)
from tmojax.problem.step_view import view_step

GB = 10**9


def one_path_machine(gpus: int, capacity_bytes: int, rate: float, *, half_duplex: bool = False) -> Machine:
    """GPUs that share one path to the host; each of them alone can fill it."""
    memories = [Memory(f"gpu{g}", MemoryKind.DEVICE, capacity_bytes) for g in range(gpus)]
    links = [Link("out", rate), *([] if half_duplex else [Link("in", rate)])]
    back = 0 if half_duplex else 1
    routes = [Route(g, gpus, (0,), (2 * g,)) for g in range(gpus)]
    routes += [Route(gpus, g, (back,), (2 * g + 1,)) for g in range(gpus)]
    engines = tuple(f"gpu{g}.{way}" for g in range(gpus) for way in ("out", "in"))
    devices = tuple(Device(f"gpu{g}", "gpu", g, gpus) for g in range(gpus))
    memories.append(Memory("host", MemoryKind.HOST, 10**13))
    return Machine("one path", tuple(memories), tuple(links), engines, tuple(routes), devices)


def one_tensor_problem(gpus: int = 1, capacity_gb: float = 1.0, rate_gb_per_s: float = 0.8) -> Problem:
    """Seven ops of one second. `a` (1 GB) is idle between f2 and b1, `c` (1 GB) exists from f4 to b4.

    With room for one of them `a` leaves during f3 and comes back during b3. At 0.8 GB/s each takes 1.25 s, so f4 and b1
    start 0.25 s late: 7.5 s.
    """
    tensors = (
        Tensor("a", GB, TensorKind.ACTIVATION),
        Tensor("u", 0, TensorKind.ACTIVATION),
        Tensor("v", 0, TensorKind.ACTIVATION),
        Tensor("c", GB, TensorKind.ACTIVATION),
    )
    ops = (
        Op("f1", Phase.FORWARD, 1.0, (), (0,)),
        Op("f2", Phase.FORWARD, 1.0, (0,), (1,)),
        Op("f3", Phase.FORWARD, 1.0, (1,), (2,)),
        Op("f4", Phase.FORWARD, 1.0, (2,), (3,)),
        Op("b4", Phase.BACKWARD, 1.0, (3,)),
        Op("b3", Phase.BACKWARD, 1.0),
        Op("b1", Phase.BACKWARD, 1.0, (0,)),
    )
    workload = Workload("one tensor", (Program("only", tensors, ops),), (0,) * gpus, 1, "synthetic")
    machine = one_path_machine(gpus, int(capacity_gb * GB), rate_gb_per_s * GB)
    return Problem("one tensor", workload, machine, frozenset({Action.OFFLOAD}))


def transformer_problem(layers: int, gpus: int, micro_batches: int, footprint_factor: float, actions=("offload",),
                        rate: float = 12.5e9, half_duplex: bool = False) -> Problem:  # fmt: skip
    """A transformer on GPUs that share a path, with any number of layers (350 ms of compute for 12)."""
    spec = SyntheticTransformer(layers=layers, compute_s=0.35 * layers / 12)
    workload = synthetic_transformer(spec, gpus, micro_batches)
    capacity = int(keep_all_footprint_bytes(workload, 0) / footprint_factor)
    machine = one_path_machine(gpus, capacity, rate, half_duplex=half_duplex)
    return Problem("transformer", workload, machine, frozenset(Action(action) for action in actions))


def views_of(problem: Problem):
    """One view per device; equal devices share theirs."""
    view = view_step(problem, 0)
    return [view if g == 0 else replace(view, device=g) for g in range(problem.workload.device_count)]
