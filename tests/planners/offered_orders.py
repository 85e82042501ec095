"""Steps that offer orders of micro-batches."""

from dataclasses import replace

from random_steps import shared_path_machine

from tmojax.importers.micro_batch_orders import BreadthFirst, offer_orders
from tmojax.problem import (
    Action,
    Lifetime,
    Op,
    Phase,
    Problem,
    Program,
    Tensor,
    TensorKind,
    Workload,
    validate_problem,
)


def layers_with_weights(micro_batches: int, *, layers: int = 5, weight_bytes: int = 1000, gpus: int = 1) -> Problem:
    """Large weights, small activations, 1 s an op. The loss needs room in which two weights lie, which cross a link
    in 10 s each."""
    tensors, ops = [Tensor("x", 1, TensorKind.INPUT)], []

    def tensor(name: str, size: int, kind: TensorKind, lifetime: Lifetime = Lifetime.MICRO_BATCH) -> int:
        tensors.append(Tensor(name, size, kind, lifetime))
        return len(tensors) - 1

    weights = [tensor(f"w{n}", weight_bytes, TensorKind.WEIGHT, Lifetime.STATE) for n in range(layers)]
    outputs = [0]
    for n in range(layers):
        outputs.append(tensor(f"y{n}", 1, TensorKind.ACTIVATION))
        ops.append(Op(f"f{n}", Phase.FORWARD, 1.0, (outputs[n], weights[n]), (outputs[n + 1],), layer=f"h{n}"))
    upstream = (tensor("dy", 1, TensorKind.GRADIENT),)
    ops.append(Op("loss", Phase.BACKWARD, 1.0, (outputs[-1],), upstream, workspace_bytes=2 * weight_bytes))
    for n in reversed(range(layers)):
        gradient = tensor(f"dy{n}", 1, TensorKind.GRADIENT)
        ops.append(Op(f"b{n}", Phase.BACKWARD, 1.0, (outputs[n], weights[n], *upstream), (gradient,), layer=f"h{n}"))
        upstream = (gradient,)
    workload = Workload("weights", (Program("p", tuple(tensors), tuple(ops)),), (0,) * gpus, micro_batches, "synthetic")
    capacity = int((layers + 0.2) * weight_bytes)
    problem = Problem("weights", workload, shared_path_machine(gpus, capacity, rate=100.0), frozenset({Action.OFFLOAD}))
    validate_problem(problem)
    return problem


def offering(problem: Problem, *orders: BreadthFirst) -> Problem:
    problem = replace(problem, workload=offer_orders(problem.workload, orders))
    validate_problem(problem)
    return problem
