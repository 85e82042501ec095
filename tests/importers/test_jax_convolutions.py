"""Convolutional networks: operations, durations and tensors of convolutions, pooling and concatenated features."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tmojax.importers.jax_applying import Number
from tmojax.importers.jax_fusion import fuse
from tmojax.importers.jax_importer import import_train_step
from tmojax.importers.jax_rewriting import rewrite
from tmojax.importers.jax_roofline import GpuSpec, duration_s, equation_flops, is_matmul, uses_matrix_units
from tmojax.importers.jax_tracing import flatten

GPU = GpuSpec("test", {"float32": 100.0}, vector_flops_per_s=10.0, memory_bandwidth_bytes_per_s=1e9, memory_bytes=1)
LAYOUT = ("NHWC", "HWIO", "NHWC")


def shape(*dimensions):
    return jax.ShapeDtypeStruct(dimensions, jnp.float32)


def convolve(image, kernel, stride=1, padding=1, groups=1):
    return jax.lax.conv_general_dilated(
        image, kernel, (stride, stride), [(padding, padding)] * 2, dimension_numbers=LAYOUT, feature_group_count=groups
    )


def gradients(function, *arguments):
    """The flat gradients of a function's sum of sines, for all of its arguments."""
    numbers = tuple(range(len(arguments)))
    graph = flatten(jax.make_jaxpr(jax.grad(lambda *a: jnp.sin(function(*a)).sum(), numbers))(*arguments))
    rewrite(graph)
    return graph


def products(graph):
    return [e for e in graph.equations if is_matmul(e.primitive)]


def evaluate(graph, arguments):
    """Results of a flat graph, equation by equation."""
    arrays = {**graph.values, **dict(zip(graph.arguments, arguments, strict=True))}

    def array(operand):
        if isinstance(operand, Number):
            return operand.value
        value = arrays[operand.storage]
        for view in operand.views:
            (value,) = view(value)
        return value

    for equation in graph.equations:
        arrays.update(zip(equation.outputs, equation.apply(*map(array, equation.operands)), strict=True))
    return [array(seen) for seen in graph.seen_results]


# Input 2 x 8 x 8 x 3, output channels 4, kernel 3 x 3: 2 x places x 4 x 27 operations each way.
@pytest.mark.parametrize(("stride", "places"), [(1, 8 * 8), (2, 4 * 4), (4, 2 * 2)])
def test_both_gradients_of_a_convolution_cost_what_it_costs(stride, places):
    graph = gradients(lambda x, w: convolve(x, w, stride), shape(2, 8, 8, 3), shape(3, 3, 3, 4))
    assert [equation_flops(e, graph) for e in products(graph)] == [2 * 2 * places * 4 * 27] * 3


@pytest.mark.parametrize("stride", [1, 2])
def test_both_gradients_of_a_depthwise_convolution_cost_what_it_costs(stride):
    graph = gradients(lambda x, w: convolve(x, w, stride, groups=16), shape(2, 8, 8, 16), shape(3, 3, 1, 16))
    places = 2 * (8 // stride) ** 2
    assert [equation_flops(e, graph) for e in products(graph)] == [2 * places * 16 * 9] * 3


@pytest.mark.parametrize(("groups", "on_matrix_units"), [(1, True), (2, True), (4, False), (16, False)])
def test_groups_of_few_channels_run_on_vector_units(groups, on_matrix_units):
    graph = gradients(lambda x, w: convolve(x, w, groups=groups), shape(2, 8, 8, 16), shape(3, 3, 16 // groups, 16))
    for equation in products(graph):
        flops = equation_flops(equation, graph)
        assert uses_matrix_units(equation) is on_matrix_units
        assert duration_s(GPU, [equation], 0, 0) == pytest.approx(flops / (0.7 * (100 if on_matrix_units else 10)))


def test_reading_a_convolution_is_reading_its_operands():
    graph = flatten(jax.make_jaxpr(convolve)(shape(2, 8, 8, 3), shape(3, 3, 3, 4)))
    (kernel,) = fuse(graph).kernels
    assert sorted(kernel.reads.values()) == [4 * 3 * 3 * 3 * 4, 4 * 2 * 8 * 8 * 3]
    assert graph.storages[kernel.writes[0]].size_bytes == 4 * 2 * 8 * 8 * 4


def test_reversed_kernels_are_no_tensors():
    graph = gradients(lambda x, w: convolve(x, w, 2), shape(2, 8, 8, 3), shape(3, 3, 3, 4))
    assert "rev" not in {e.primitive for e in graph.equations}


def test_a_small_network_computes_what_it_did_before_it_was_flat():
    def network(x, w, v, u):
        y = jax.nn.relu(convolve(x, w, 2))
        y = y[:, ::-1] + y
        y = convolve(y, v, groups=4)
        pooled = jax.lax.reduce_window(
            y, -jnp.inf, jax.lax.max, (1, 3, 3, 1), (1, 2, 2, 1), [(0, 0), (1, 1), (1, 1), (0, 0)]
        )
        return jnp.stack((pooled, pooled * 2), axis=-1) @ u

    random = np.random.default_rng(0)
    sizes = ((2, 8, 8, 3), (3, 3, 3, 4), (3, 3, 1, 4), (2, 5))
    arguments = [random.normal(size=size).astype("float32") for size in sizes]
    graph = gradients(network, *[shape(*size) for size in sizes])
    expected = jax.grad(lambda *a: jnp.sin(network(*a)).sum(), (0, 1, 2, 3))(*arguments)
    for made, wanted in zip(evaluate(graph, arguments), expected, strict=True):
        np.testing.assert_allclose(made, wanted, rtol=2e-4, atol=1e-5)


def test_pooling_counts_its_windows():
    def pool(x):
        return jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 3, 3, 1), (1, 2, 2, 1), "SAME")

    graph = gradients(pool, shape(2, 8, 8, 3))
    flops = {e.primitive: equation_flops(e, graph) for e in graph.equations}
    assert flops["reduce_window_max"] == flops["select_and_scatter_add"] == 9 * 2 * 4 * 4 * 3


def test_pooling_is_timed_by_known_operations():
    def loss(params, batch):
        y = convolve(batch, params)
        return jnp.square(jax.lax.reduce_window(y, -jnp.inf, jax.lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")).sum()

    step = import_train_step(loss, shape(3, 3, 3, 4), shape(2, 8, 8, 3), optax.sgd(0.1), gpu="A100-SXM4-40GB")
    assert step.report.uncounted_primitives == ()


def test_stacked_vectors_are_written_once_and_their_gradient_is_read_in_pieces():
    def function(x, y, w):
        return jnp.stack((x * 2, y * 2), axis=1) @ w

    graph = gradients(function, shape(64, 32), shape(64, 32), shape(32, 8))
    kernels = fuse(graph).kernels
    assert "opaque" not in {kernel.kind for kernel in kernels}
    # The gradient of x is made of its half of the gradient of the stack.
    gradient = next(k for k in kernels if k.writes == [graph.results[0]])
    assert list(gradient.reads.values()) == [64 * 32 * 4]


def test_a_sum_whose_pieces_go_to_different_kernels_is_kept():
    def function(x, y, z, w):
        first, second = jnp.split(x + y + z, 2)  # three reads to recompute, one to read
        return first @ w, jnp.exp(second) @ w

    graph = flatten(jax.make_jaxpr(function)(*[shape(512, 64)] * 3, shape(64, 64)))
    fusion = fuse(graph)
    sums = [kernel for kernel in fusion.kernels if graph.equations[kernel.root].primitive == "add"]
    assert len(sums) == 1 and len(sums[0].reads) == 3
    piece = next(kernel for kernel in fusion.kernels if graph.equations[kernel.root].primitive == "split")
    assert list(piece.reads.values()) == [512 * 64 * 4 // 2]


def test_traffic_of_concatenated_features_grows_with_what_layers_read():
    """Backward of a layer in a dense block reads a few times what the layer sees, and not what later layers read."""

    def traffic(layers):
        def loss(params, x):
            for kernel in params:
                y = jnp.maximum(x * jnp.square(x).mean((0, 1, 2)), 0)
                x = jnp.concatenate((x, convolve(y, kernel)), axis=-1)
            return jnp.square(x).sum()

        params = [shape(3, 3, 8 * (1 + layer), 8) for layer in range(layers)]
        step = import_train_step(loss, params, shape(2, 32, 32, 8), optax.sgd(0.1), gpu="A100-SXM4-40GB")
        return sum(op.memory_traffic_bytes for op in step.workload.programs[0].ops if op.phase == "backward")

    # Layer l sees l + 1 pieces and the loss sees all: a quadratic sum. Reading for all later layers makes it cubic.
    seen = {layers: layers * (layers + 3) / 2 for layers in (4, 16)}
    assert traffic(16) / traffic(4) < 1.3 * seen[16] / seen[4]
