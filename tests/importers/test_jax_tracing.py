"""Flattening: views vanish, inner jaxprs are inlined, scans unrolled; phases and scopes come from the name stack."""

import jax
import jax.numpy as jnp
import pytest

from tmojax.errors import InputError
from tmojax.importers.jax_rewriting import rewrite
from tmojax.importers.jax_tracing import flatten
from tmojax.problem import Phase

X = jax.ShapeDtypeStruct((8, 4), jnp.float32)
W = jax.ShapeDtypeStruct((4, 4), jnp.float32)


def graph_of(function, *shapes, **options):
    return flatten(jax.make_jaxpr(function)(*shapes), **options)


def primitives(graph):
    return [equation.primitive for equation in graph.equations]


def test_views_share_the_storage_of_their_source():
    graph = graph_of(lambda x: jnp.exp(x.reshape(2, 16).T[None]).sum((0,)).reshape(-1), X)
    assert primitives(graph) == ["exp"]


def test_dead_equations_are_removed():
    def function(x):
        _ = jnp.sin(x)
        return jnp.cos(x)

    assert primitives(graph_of(function, X)) == ["cos"]


def test_inner_jaxprs_are_inlined():
    inner = jax.jit(lambda x: jax.nn.relu(jnp.tanh(x)))
    assert primitives(graph_of(lambda x: jax.jit(inner)(x) * 2, X)) == ["tanh", "max", "mul"]


def test_literals_are_no_storages():
    graph = graph_of(lambda x: jnp.maximum(x, 0.0), X)
    assert graph.equations[0].inputs == (graph.arguments[0],)
    assert graph.equations[0].literals == (0.0,)


def test_arrays_that_are_closed_over_are_constants():
    table = jnp.ones((8, 4))
    graph = graph_of(lambda x: x + table, X)
    assert [graph.storages[c].size_bytes for c in graph.constants] == [8 * 4 * 4]


def test_scan_is_unrolled_and_backward_reads_the_turns_of_forward():
    def loss(w, x):
        return jax.lax.scan(lambda c, w: (jnp.tanh(c @ w), None), x, w)[0].sum()

    graph = graph_of(jax.grad(loss), jax.ShapeDtypeStruct((3, 4, 4), jnp.float32), X)
    # Per turn: forward one product, backward two; the first turn needs no gradient of x. One stack of gradients.
    assert primitives(graph).count("dot_general") == 3 + 3 + 2
    assert primitives(graph).count("tanh") == 3
    assert primitives(graph).count("concatenate") == 1
    assert any("scan[2]" in equation.scope for equation in graph.equations)


def test_rematerialisation_is_kept():
    def loss(w, x):
        return jax.checkpoint(lambda x: jnp.tanh(x @ w) @ w)(x).sum()

    graph = graph_of(jax.grad(loss), W, X)
    assert primitives(graph).count("tanh") == 1
    tanh = next(equation for equation in graph.equations if equation.primitive == "tanh")
    assert tanh.phase is Phase.BACKWARD


def test_phases_and_scopes():
    def step(w, m, count, x):
        def loss(w):
            with jax.named_scope("block3"):
                return jnp.tanh(x @ w).sum()

        gradient = jax.grad(loss)(w)
        count = count + 1
        m = 0.9 * m + gradient / count
        return w - m, m, count

    graph = graph_of(step, W, W, jax.ShapeDtypeStruct((), jnp.float32), X)
    phases = {(e.primitive, e.scope): e.phase for e in graph.equations}
    assert phases["tanh", ("block3",)] is Phase.FORWARD
    assert {e.phase for e in graph.equations if e.primitive == "dot_general"} == {Phase.FORWARD, Phase.BACKWARD}
    optimizer = [e for e in graph.equations if e.phase is Phase.OPTIMIZER]
    assert {e.primitive for e in optimizer} == {"add", "mul", "div", "sub"}  # with the step counter


def test_backward_of_relu_reads_what_forward_passed_on():
    graph = graph_of(jax.value_and_grad(lambda w, x: jax.nn.relu(x @ w).sum()), W, X)
    rewrite(graph)
    # Only the sign of the output is needed, so the product itself is read by the maximum alone.
    product = next(e for e in graph.equations if e.primitive == "dot_general" and e.phase is Phase.FORWARD).outputs[0]
    assert [e.primitive for e in graph.equations if product in e.inputs] == ["max"]


def test_scatter_into_zeros_is_added_in_place():
    def loss(x):
        return (x[jnp.arange(3)] * 2).sum() + (x**2).sum()

    graph = graph_of(jax.grad(loss), X)
    before = primitives(graph)
    rewrite(graph)
    assert "add_any" in before and "add_any" not in primitives(graph)
    assert primitives(graph).count("scatter-add") == 1


def test_while_is_rejected_by_name():
    def function(x):
        with jax.named_scope("model"):
            return jax.lax.while_loop(lambda c: c.sum() < 9, lambda c: c + 1, x)

    with pytest.raises(InputError, match=r"'while' at 'model' .* use jax.lax.scan"):
        graph_of(function, X)


def test_cond_is_rejected_by_name():
    with pytest.raises(InputError, match=r"'cond'.*trace the branch"):
        graph_of(lambda x: jax.lax.cond(x.sum() > 0, jnp.sin, jnp.cos, x), X)


def test_communication_is_rejected_by_name():
    jaxpr = jax.make_jaxpr(lambda x: jax.lax.psum(x, "gpu"), axis_env=[("gpu", 2)])(X)
    with pytest.raises(InputError, match="communicates between devices"):
        flatten(jaxpr)
