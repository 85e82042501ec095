"""A chain of ops forward and backward on several GPUs with one shared path: small enough to reason about."""

from random_steps import shared_path_machine

from tmojax.problem import (
    Action,
    Op,
    Phase,
    Problem,
    Program,
    Tensor,
    TensorKind,
    Workload,
    keep_all_footprint_bytes,
    validate_problem,
)


def chain(gpus: int, layers: int, *, factor: float, sizes=(40,), seconds=(1.0,), micro_batches: int = 1,
          half_duplex: bool = False, actions=(Action.OFFLOAD,), rate: float = 100.0) -> Problem:  # fmt: skip
    """`layers` forward ops, each of which writes an activation that the next and its own backward op read; gradients
    take one byte. Sizes (bytes) and seconds (backward takes twice as long) repeat from layer to layer; capacity =
    footprint / `factor`."""
    tensors: list[Tensor] = []
    ops: list[Op] = []
    for layer in range(layers):
        size = sizes[layer % len(sizes)]
        tensors.append(Tensor(f"a{layer}", size, TensorKind.ACTIVATION))
        reads = (layer - 1,) if layer else ()
        ops.append(Op(f"f{layer}", Phase.FORWARD, seconds[layer % len(seconds)], reads, (layer,), layer=f"l{layer}"))
    gradient = -1
    for layer in reversed(range(layers)):
        tensors.append(Tensor(f"g{layer}", 1, TensorKind.GRADIENT))
        reads = (layer,) if gradient < 0 else (layer, gradient)
        gradient = len(tensors) - 1
        backward_s = 2 * seconds[layer % len(seconds)]
        ops.append(Op(f"b{layer}", Phase.BACKWARD, backward_s, reads, (gradient,), layer=f"l{layer}"))
    program = Program("chain", tuple(tensors), tuple(ops))
    workload = Workload("chain", (program,), (0,) * gpus, micro_batches, "synthetic: a chain")
    capacity_bytes = int(keep_all_footprint_bytes(workload, 0) / factor)
    machine = shared_path_machine(gpus, capacity_bytes, rate=rate, half_duplex=half_duplex)
    problem = Problem(f"chain of {layers} on {gpus}", workload, machine, frozenset(actions))
    validate_problem(problem)
    return problem
