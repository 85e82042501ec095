"""Which values a compiled step keeps: each rule on a function small enough to decide by hand."""

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from tmojax.importers.jax_fusion import fuse
from tmojax.importers.jax_grouping import group_kernels
from tmojax.importers.jax_rewriting import rewrite
from tmojax.importers.jax_tracing import flatten

X = jax.ShapeDtypeStruct((512, 256), jnp.float32)
HALF = jax.ShapeDtypeStruct((512, 256), jnp.bfloat16)
W = jax.ShapeDtypeStruct((256, 256), jnp.float32)


def fused(function, *shapes, **options):
    graph = flatten(jax.make_jaxpr(function)(*shapes))
    rewrite(graph)
    return graph, fuse(graph, **options)


def made(function, *shapes, **options):
    """Primitives whose outputs are materialised, in order."""
    graph, fusion = fused(function, *shapes, **options)
    return [graph.equations[kernel.root].primitive for kernel in fusion.kernels]


def ops(function, *shapes):
    graph, fusion = fused(function, *shapes)
    groups = group_kernels(graph, fusion, lambda kernel: "", {})
    return [[graph.equations[kernel.root].primitive for kernel in group.kernels] for group in groups]


def test_element_wise_chain_is_one_kernel():
    graph, fusion = fused(lambda x: jnp.exp(x * 2 + 1).T, X)
    (kernel,) = fusion.kernels
    assert kernel.reads == {graph.arguments[0]: 512 * 256 * 4}
    assert kernel.vector_flops == 3 * 512 * 256


def test_reduction_computes_its_inputs():
    assert made(lambda x: jnp.exp(x * 2).sum(0), X) == ["reduce_sum"]


def test_operands_of_products_are_materialised():
    assert made(lambda x, w: (x * 2).T.T @ w.astype(jnp.float32), X, W) == ["mul", "dot_general"]


def test_transposed_operands_are_read_as_they_are():
    assert made(lambda x, w: x @ w.T, X, W) == ["dot_general"]


def test_cheap_shared_value_is_recomputed():
    def function(x, w):
        y = x * 2 + 1
        return (y * 3) @ w, y.sum(0)

    assert made(function, X, W) == ["mul", "dot_general", "reduce_sum"]


def test_shared_value_of_larger_inputs_is_kept():
    def function(x, y, z, w):
        total = x + y + z  # three reads to recompute, one to read
        return (total * 3) @ w, (total * 4) @ w, total.max(0)

    assert made(function, X, X, X, W).count("add") == 1


def test_expensive_value_is_kept_in_bf16_and_recomputed_in_fp32():
    def function(x, w):
        y = jnp.tanh(x)
        return (y * 3).astype(jnp.float32) @ w, ((1 - y) * x).astype(jnp.float32) @ w

    assert "tanh" in made(function, HALF, W)
    assert "tanh" not in made(function, X, W)


def test_kept_expensive_bf16_value_is_fp32_without_bf16_arithmetic():
    def function(x, w):
        y = jnp.tanh(x)
        return (y * 3).astype(jnp.float32) @ w, ((1 - y) * x).astype(jnp.float32) @ w

    for bf16_vector, itemsize in ((True, 2), (False, 4)):
        graph, fusion = fused(function, HALF, W, bf16_vector=bf16_vector)
        tanh = next(k for k in fusion.kernels if graph.equations[k.root].primitive == "tanh")
        assert graph.storages[tanh.writes[0]].size_bytes == 512 * 256 * itemsize


def test_dropout_mask_is_kept_as_booleans():
    def loss(x, key):
        with jax.named_scope("dropout"):
            keep = jax.random.bernoulli(key, 0.9, x.shape)
        return jnp.where(keep, jnp.exp(x), 0).sum()

    graph, fusion = fused(jax.value_and_grad(loss), X, jax.eval_shape(lambda: jax.random.key(0)))
    sizes = [graph.storages[w].size_bytes for k in fusion.kernels for w in k.writes if k.scope == ("dropout",)]
    assert sizes == [512 * 256]


def test_named_value_is_kept():
    def function(x, w):
        return checkpoint_name(x * 2, "doubled").sum(0), x.max(0)

    assert made(function, X, W) == ["mul", "reduce_sum", "reduce_max"]
    graph, fusion = fused(function, X, W)
    assert graph.storages[fusion.kernels[0].writes[0]].given_name == "doubled"


def test_slices_read_what_they_return():
    _, fusion = fused(lambda x: x[:, :64] * 2, X)
    assert list(fusion.kernels[0].reads.values()) == [512 * 64 * 4]


def test_gather_reads_what_it_returns():
    rows = jax.ShapeDtypeStruct((16,), jnp.int32)
    graph, fusion = fused(lambda x, i: x.at[i].get(mode="fill", fill_value=0), X, rows)
    gather = next(k for k in fusion.kernels if graph.equations[k.root].primitive == "gather")
    assert gather.reads[graph.arguments[0]] == 16 * 256 * 4


def test_softmax_is_one_op():
    assert ops(lambda x: jax.nn.softmax(x, axis=-1), X) == [["reduce_max", "reduce_sum", "div"]]


def test_softmax_over_long_rows_is_three_ops():
    rows = jax.ShapeDtypeStruct((4, 50257), jnp.float32)
    assert ops(lambda x: jax.nn.softmax(x, axis=-1), rows) == [["reduce_max"], ["reduce_sum"], ["div"]]


def test_reductions_of_one_input_are_one_op():
    assert ops(lambda x: (x.sum(0), (x * x).sum(0)), X) == [["reduce_sum", "reduce_sum"]]


def test_split_after_bias_is_one_op():
    def function(x, w, b):
        parts = jnp.split(x @ w + b, 2, axis=-1)
        return parts[0] @ w[:128], parts[1] @ w[:128]

    bias = jax.ShapeDtypeStruct((256,), jnp.float32)
    graph, fusion = fused(function, X, W, bias)
    split = next(k for k in fusion.kernels if graph.equations[k.root].primitive == "split")
    assert len(split.writes) == 2


def test_joining_never_makes_a_cycle():
    # The second reduction shares the input of the first but needs a product of its result.
    def function(x, w):
        first = x.sum(0)
        second = (x * (first @ w)).sum(0)
        return first, second

    assert ops(function, X, W) == [["reduce_sum"], ["dot_general"], ["reduce_sum"]]
