"""Random training steps small enough to enumerate their schedules."""

import random

from shared_path_machine import shared_path

from tmojax.problem import Action, Lifetime, Op, Phase, Problem, Program, Tensor, TensorKind, Workload

MB = 1_000_000


def tiny_program(rng: random.Random, layers: int, state: bool) -> Program:
    """Forward chain with skips, backward chain that reads some of what forward wrote. With `state`: a weight, a
    gradient sum and an optimizer tensor for one layer, and an update at the end of the step."""
    tensors: list[Tensor] = []
    ops: list[Op] = []

    def tensor(name: str, size: int, kind: TensorKind, lifetime: Lifetime = Lifetime.MICRO_BATCH) -> int:
        tensors.append(Tensor(name, size * MB, kind, lifetime))
        return len(tensors) - 1

    def duration() -> float:
        return rng.randint(1, 8) * 1e-3

    weight = moment = total = -1
    layer_of_state = rng.randrange(layers)
    if state:
        weight = tensor("weight", rng.randint(1, 4), TensorKind.WEIGHT, Lifetime.STATE)
        total = tensor("sum", rng.randint(1, 3), TensorKind.GRADIENT, Lifetime.STATE)
        moment = tensor("moment", rng.randint(1, 6), TensorKind.OPTIMIZER_STATE, Lifetime.STATE)
    outputs: list[int] = []
    for i in range(layers):
        reads = [outputs[-1]] if outputs else []
        if len(outputs) > 1 and rng.random() < 0.4:
            reads.append(rng.choice(outputs[:-1]))
        if state and i == layer_of_state:
            reads.append(weight)
        writes = [tensor(f"t{i}", rng.randint(1, 6), TensorKind.ACTIVATION)]
        ops.append(Op(f"f{i}", Phase.FORWARD, duration(), tuple(dict.fromkeys(reads)), tuple(writes),
                      workspace_bytes=rng.choice([0, 0, MB])))  # fmt: skip
        outputs.append(writes[0])
    gradient = -1
    for i in reversed(range(layers)):
        reads = [gradient] if gradient >= 0 else []
        for j in (i, i - 1):
            if j >= 0 and rng.random() < 0.75:
                reads.append(outputs[j])
        updates = ()
        if state and i == layer_of_state:
            reads.append(weight)
            updates = (total,)
        gradient = tensor(f"g{i}", rng.randint(0, 2), TensorKind.GRADIENT)
        ops.append(
            Op(f"b{i}", Phase.BACKWARD, duration(), tuple(reads), (gradient,), updates, recomputable=not updates)
        )
    if state:
        ops.append(
            Op("update", Phase.OPTIMIZER, duration(), (total,), (), (weight, moment), recomputable=False, step_op=True)
        )
    return Program("tiny", tuple(tensors), tuple(ops))


def tiny_problem(seed: int, *, gpus: int, micro_batches: int, layers: int, actions: set[Action], duplex: bool = True,
                 state: bool = False, squeeze: float = 0.5) -> Problem:  # fmt: skip
    """A step whose capacity lies between what its largest op needs (squeeze 1) and what keeping everything needs
    (0)."""
    from tmojax.problem import keep_all_footprint_bytes, largest_op_bytes

    rng = random.Random(seed)
    workload = Workload("tiny", (tiny_program(rng, layers, state),), (0,) * gpus, micro_batches, "synthetic: random")
    most, least = keep_all_footprint_bytes(workload, 0), largest_op_bytes(workload, 0)[1]
    capacity = int(most - squeeze * (most - least))
    rate = rng.choice([0.3, 0.6, 1.2]) * 1e9
    return Problem("tiny", workload, shared_path(gpus, capacity, rate, duplex=duplex), frozenset(actions))
