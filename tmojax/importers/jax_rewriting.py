"""Two algebraic rewrites that XLA makes before it fuses and that change what has to be kept.

- `x > 0` becomes `max(x, 0) > 0` where the maximum exists: backward of ReLU then needs only what forward passed on.
- `y + scatter_add(zeros, i, u)` becomes `scatter_add(y, i, u)`: the gradient of an indexed read is added in place.
"""

from __future__ import annotations

from tmojax.importers.jax_applying import Number, Seen
from tmojax.importers.jax_tracing import Equation, Graph


def rewrite(graph: Graph) -> None:
    """Apply both rewrites in place. Equations that lose their last user are removed, the order stays valid."""
    _relu_masks(graph)
    _scatter_in_place(graph)
    graph.remove_dead()


def _compares_with_zero(equation: Equation) -> bool:
    return len(equation.inputs) == 1 and equation.literals == (0.0,)


def _relu_masks(graph: Graph) -> None:
    maximum = {_operand(e): e.outputs[0] for e in graph.equations if e.primitive == "max" and _compares_with_zero(e)}
    for index, equation in enumerate(graph.equations):
        if equation.primitive == "gt" and _compares_with_zero(equation):
            # Looked up with its views: both must see the elements in the same shape.
            relu = maximum.get(_operand(equation), -1)
            if 0 <= graph.storages[relu].producer < index:
                equation.inputs = (relu,)
                equation.operands = tuple(o if isinstance(o, Number) else Seen(relu) for o in equation.operands)


def _operand(equation: Equation) -> Seen:
    """The one operand that is no number."""
    return next(operand for operand in equation.operands if isinstance(operand, Seen))


def _scatter_in_place(graph: Graph) -> None:
    uses: dict[int, list[int]] = {}
    for index, equation in enumerate(graph.equations):
        for source in equation.inputs:
            uses.setdefault(source, []).append(index)
    for equation in graph.equations:
        if equation.primitive != "scatter-add" or not _is_zero(graph, equation.inputs[0]):
            continue
        users = uses.get(equation.outputs[0], [])
        if len(users) != 1 or equation.outputs[0] in graph.results:
            continue
        addition = graph.equations[users[0]]
        result = Seen(equation.outputs[0])
        others = [source for source in addition.inputs if source != equation.outputs[0]]
        if addition.primitive not in ("add", "add_any") or len(others) != 1 or result not in addition.operands:
            continue
        if graph.storages[others[0]].elements != graph.storages[equation.outputs[0]].elements:
            continue
        # The addition becomes the scatter, because only there both operands exist; the old scatter is dead.
        addition.primitive = equation.primitive
        addition.inputs = (others[0], *equation.inputs[1:])
        base = next(operand for operand in addition.operands if operand != result)
        addition.apply, addition.operands = equation.apply, (base, *equation.operands[1:])
        addition.input_shapes, addition.params = equation.input_shapes, equation.params


def _is_zero(graph: Graph, storage: int) -> bool:
    producer = graph.storages[storage].producer
    if producer < 0:
        return False
    equation = graph.equations[producer]
    return equation.primitive == "broadcast_in_dim" and not equation.inputs and equation.literals == (0.0,)
