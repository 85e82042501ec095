"""Options of the zoo replace sizes, nothing is allocated, and bad options name the field and the remedy."""

import math

import jax
import pytest

from tmojax.errors import InputError
from tmojax.models import MODEL_NAMES, build_model, model_options


def parameter_count(model):
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(model.params))


@pytest.mark.parametrize("name", ["gpt2", "bert-base", "vit-b16", "resnet50", "convnext-tiny", "dlrm"])
def test_nothing_is_allocated(name):
    model = build_model(name)
    leaves = jax.tree.leaves((model.params, model.batch))
    assert all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves)
    assert {str(leaf.dtype) for leaf in jax.tree.leaves(model.params)} == {"float32"}
    assert {leaf.shape[0] for leaf in jax.tree.leaves(model.batch)} == {8}


def test_options_replace_sizes():
    model = build_model("gpt2", batch=2, layers=3, width=128, heads=4, vocabulary=1000, sequence=64)
    assert parameter_count(model) == 1000 * 128 + 64 * 128 + 3 * (12 * 128**2 + 13 * 128) + 2 * 128
    assert model.batch["tokens"].shape == (2, 65)
    assert model.samples == 2


def test_shapes_of_batches():
    assert build_model("gpt2").batch["tokens"].shape == (8, 1025)
    assert build_model("bert-base", batch=2, layers=1, sequence=128, masked=20).batch["labels"].shape == (2, 20)
    assert build_model("vit-b16", batch=2, layers=1).batch["image"].shape == (2, 224, 224, 3)
    frames = build_model("conformer-s", batch=2, layers=1, frames=403)
    assert frames.batch["labels"].shape == (2, 100)  # (403 - 3) / 2 + 1 = 201, (201 - 3) / 2 + 1 = 100
    assert build_model("dlrm", batch=2, tables=3).batch["rows"].shape == (2, 3)


@pytest.mark.parametrize("name", ["gpt2", "llama-7b"])
def test_loss_of_an_untrained_model_is_the_logarithm_of_the_vocabulary(name):
    model = build_model(name, batch=2, layers=1, width=32, heads=2, vocabulary=64, sequence=16, dtype="float32")
    params = jax.tree.map(lambda s: jax.numpy.zeros(s.shape, s.dtype), model.params)
    tokens = jax.numpy.zeros(model.batch["tokens"].shape, "int32")
    assert float(model.loss(params, {"tokens": tokens})) == pytest.approx(math.log(64), rel=1e-6)


@pytest.mark.parametrize("name", MODEL_NAMES)
def test_every_model_lists_its_options(name):
    options = model_options(name)
    assert options and all(isinstance(value, int) and value >= 1 for value in options.values())


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
        ("llama-7b", {"width": 96}, ("model.heads", "3 wide", "even")),
        ("bert-base", {"sequence": 1024}, ("model.sequence", "1024", "model.positions 512")),
        ("bert-base", {"sequence": 64}, ("model.masked", "77", "model.sequence 64", "lower it")),
        ("bert-large", {"heads": 7}, ("model.heads", "7", "1024")),
        ("vit-b16", {"image": 225}, ("model.patch", "16", "225")),
        ("vit-b16", {"heads": 5}, ("model.heads", "5", "768")),
        ("resnet50", {"layers": 3}, ("model.layers", "stage1", "image")),
        ("resnet50", {"stage3": 20_000}, ("model.stage3", "20000", "10000", "lower it")),
        ("densenet121", {"image": 31}, ("model.image", "31", "at least 32")),
        ("convnext-tiny", {"image": 200}, ("model.image", "200", "multiple of 32")),
        ("conformer-s", {"heads": 5}, ("model.heads", "5", "144")),
        ("conformer-s", {"width": 145, "heads": 5}, ("model.width", "145", "even")),
        ("conformer-s", {"frames": 6}, ("model.frames", "6", "at least 7")),
        ("conformer-s", {"filters": 3}, ("model.filters", "3", "at least 7")),
        ("dlrm", {"tables": 27}, ("model.tables", "27", "26")),
    ],
)
def test_bad_options_are_named(name, options, parts):
    with pytest.raises(InputError) as error:
        build_model(name, **options)
    for part in parts:
        assert part in str(error.value)
