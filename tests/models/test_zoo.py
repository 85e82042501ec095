"""Models have their published sizes, and bad options name the field and the remedy."""

import math

import jax
import pytest

from tmojax.errors import InputError
from tmojax.models import MODEL_NAMES, build_model, model_options


def parameter_count(model):
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(model.params))


# GPT-2: V d + T d + L (12 d^2 + 13 d) + 2 d; published as 124 M, 355 M, 774 M and 1558 M.
# Llama: 2 V d + L (4 d^2 + 3 d h + 2 d) + d; published as 6.7 B and 13.0 B.
@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("gpt2", 124439808),
        ("gpt2-medium", 354823168),
        ("gpt2-large", 774030080),
        ("gpt2-xl", 1557611200),
        ("llama-7b", 6738415616),
        ("llama-13b", 13015864320),
    ],
)
def test_models_have_their_published_numbers_of_parameters(name, count):
    assert parameter_count(build_model(name)) == count


def test_nothing_is_allocated():
    model = build_model("gpt2")
    leaves = jax.tree.leaves((model.params, model.batch))
    assert all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves)
    assert {str(leaf.dtype) for leaf in jax.tree.leaves(model.params)} == {"float32"}
    assert model.batch["tokens"].shape == (8, 1025)


def test_options_replace_sizes():
    model = build_model("gpt2", batch=2, layers=3, width=128, heads=4, vocabulary=1000, sequence=64)
    assert parameter_count(model) == 1000 * 128 + 64 * 128 + 3 * (12 * 128**2 + 13 * 128) + 2 * 128
    assert model.batch["tokens"].shape == (2, 65)
    assert model.samples == 2


@pytest.mark.parametrize("name", ["gpt2", "llama-7b"])
def test_loss_of_an_untrained_model_is_the_logarithm_of_the_vocabulary(name):
    model = build_model(name, batch=2, layers=1, width=32, heads=2, vocabulary=64, sequence=16, dtype="float32")
    params = jax.tree.map(lambda s: jax.numpy.zeros(s.shape, s.dtype), model.params)
    tokens = jax.numpy.zeros(model.batch["tokens"].shape, "int32")
    assert float(model.loss(params, {"tokens": tokens})) == pytest.approx(math.log(64), rel=1e-6)


@pytest.mark.parametrize("name", MODEL_NAMES)
def test_every_model_lists_its_options(name):
    assert model_options(name)["layers"] >= 1


@pytest.mark.parametrize(
    ("name", "options", "parts"),
    [
        ("gpt5", {}, ("gpt5", "gpt2-xl")),
        ("gpt2", {"depth": 3}, ("model.depth", "layers")),
        ("gpt2", {"layers": 0}, ("model.layers", "0", "positive")),
        ("gpt2", {"layers": True}, ("model.layers", "True")),
        ("gpt2", {"heads": 5}, ("model.heads", "5", "768")),
        ("gpt2", {"dtype": "int8"}, ("model.dtype", "int8", "bfloat16")),
        ("mlp", {"heads": 2}, ("model.heads", "width")),
    ],
)
def test_bad_options_are_named(name, options, parts):
    with pytest.raises(InputError) as error:
        build_model(name, **options)
    for part in parts:
        assert part in str(error.value)
