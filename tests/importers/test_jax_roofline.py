"""Operation counts and durations against hand calculations, and errors that name the remedy."""

import jax
import jax.numpy as jnp
import pytest

from tmojax.errors import InputError
from tmojax.importers.jax_roofline import GpuSpec, duration_s, equation_flops, find_gpu, gpu_table
from tmojax.importers.jax_tracing import flatten

GPU = GpuSpec("test", {"float32": 100.0}, vector_flops_per_s=10.0, memory_bandwidth_bytes_per_s=1000.0, memory_bytes=1)


def product(left, right, function=jnp.matmul):
    shapes = jax.ShapeDtypeStruct(left, jnp.float32), jax.ShapeDtypeStruct(right, jnp.float32)
    graph = flatten(jax.make_jaxpr(function)(*shapes))
    equation = next(e for e in graph.equations if e.primitive in ("dot_general", "conv_general_dilated"))
    return equation, equation_flops(equation, graph)


def test_matrix_product_counts_two_operations_per_multiplication():
    assert product((5, 7), (7, 11))[1] == 2 * 5 * 7 * 11


def test_batched_product_counts_every_batch():
    _, flops = product((3, 5, 7), (3, 7, 11), lambda a, b: jnp.einsum("bij,bjk->bik", a, b))
    assert flops == 2 * 3 * 5 * 7 * 11


def test_convolution_counts_the_product_that_it_equals():
    def convolution(image, kernel):
        return jax.lax.conv_general_dilated(image, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))

    assert product((2, 8, 8, 3), (3, 3, 3, 16), convolution)[1] == 2 * (2 * 8 * 8) * 16 * (3 * 3 * 3)


def test_duration_is_the_larger_of_compute_and_memory():
    equation, flops = product((5, 7), (7, 11))
    assert duration_s(GPU, [equation], 0, 0) == pytest.approx(flops / (0.70 * 100))
    assert duration_s(GPU, [], 14, 0) == pytest.approx(14 / (0.70 * 10))
    assert duration_s(GPU, [equation], 0, 10**6) == pytest.approx(10**6 / (0.85 * 1000))


def test_large_products_are_more_efficient():
    equation, flops = product((4096, 4096), (4096, 4096))
    assert duration_s(GPU, [equation], 0, 0) == pytest.approx(flops / (0.80 * 100))
    equation, flops = product((4096, 4095), (4095, 4096))
    assert duration_s(GPU, [equation], 0, 0) == pytest.approx(flops / (0.70 * 100))


def test_table_rates():
    a100 = find_gpu("A100-SXM4-40GB")
    assert a100.matmul_peak("bfloat16") == 312e12
    assert a100.matmul_peak("float32") == 156e12  # TF32, XLA's default
    assert a100.memory_bandwidth_bytes_per_s == 1555e9
    assert find_gpu("GTX-1080-Ti").matmul_peak("float16") == 0.18e12
    assert find_gpu("V100-SXM2-16GB").matmul_peak("float32") == 15.7e12
    assert all(spec.memory_bytes > 10 * 2**30 for spec in gpu_table().values())


@pytest.mark.parametrize("name", ["P100-SXM2-16GB", "GTX-1080-Ti", "V100-SXM2-16GB", "RTX-2080-Ti", "T4"])
def test_missing_bf16_is_an_error_with_a_remedy(name):
    with pytest.raises(InputError, match=rf"{name} has no bfloat16 .* use dtype float16 or float32, or another GPU"):
        find_gpu(name).matmul_peak("bfloat16")


def test_unknown_gpu_lists_the_known_ones():
    with pytest.raises(InputError, match=r"'A100' is unknown; choose one of .*A100-SXM4-40GB.*V100"):
        find_gpu("A100")
