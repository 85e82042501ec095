"""Steps by layers, small enough to plan by hand."""

from dataclasses import replace

from random_steps import shared_path_machine

from tmojax.problem import (
    Action,
    Lifetime,
    Op,
    Overheads,
    Phase,
    Problem,
    Program,
    Tensor,
    TensorKind,
    Workload,
    validate_problem,
)


def layer_chain(
    layers: int, capacity_bytes: int, rate: float, *, inner_bytes: int = 0, outer_bytes: int = 4, gpus: int = 1,
    weight_bytes: int = 0, moment_bytes: int = 0, micro_batches: int = 1, actions=tuple(Action),
) -> Problem:  # fmt: skip
    """Every layer is one op of a second that writes `outer_bytes`, or with `inner_bytes` two of them: the first writes
    that many. Backward is as many ops of a second; gradients have no bytes. One moment of each layer is updated by a
    step op of no duration. No launch overhead; `gpus` share a path of `rate` bytes/s each way."""
    tensors: list[Tensor] = []
    ops: list[Op] = []

    def add(name: str, size_bytes: int, kind=TensorKind.ACTIVATION, lifetime=Lifetime.MICRO_BATCH) -> int:
        tensors.append(Tensor(name, size_bytes, kind, lifetime))
        return len(tensors) - 1

    weights = [add(f"w{b}", weight_bytes, TensorKind.WEIGHT, Lifetime.STATE) for b in range(layers) if weight_bytes]
    previous: tuple[int, ...] = ()
    forward: list[tuple[str, tuple[int, ...], int]] = []
    for b in range(layers):
        weight = (weights[b],) if weights else ()
        for name, size in ((f"inner{b}", inner_bytes), (f"outer{b}", outer_bytes)):
            if size:
                written = add(name, size)
                ops.append(Op(f"f.{name}", Phase.FORWARD, 1.0, (*previous, *weight), (written,), layer=f"h{b}"))
                forward.append((name, weight, written))
                previous = (written,)
    upstream: tuple[int, ...] = ()
    for name, weight, saved in reversed(forward):
        gradient = add(f"g.{name}", 0, TensorKind.GRADIENT)
        ops.append(Op(f"b.{name}", Phase.BACKWARD, 1.0, (saved, *upstream, *weight), (gradient,), layer=name[-1]))
        upstream = (gradient,)
    for b in range(layers if moment_bytes else 0):
        moment = add(f"m{b}", moment_bytes, TensorKind.OPTIMIZER_STATE, Lifetime.STATE)
        ops.append(Op(f"u{b}", Phase.OPTIMIZER, 0.0, (), (), (moment,), recomputable=False, step_op=True))
    program = Program("layers", tuple(tensors), tuple(ops))
    workload = Workload("layers", (program,), (0,) * gpus, micro_batches, "synthetic")
    machine = replace(shared_path_machine(gpus, capacity_bytes, rate=rate), overheads=Overheads())
    problem = Problem("layers", workload, machine, frozenset(actions))
    validate_problem(problem)
    return problem
