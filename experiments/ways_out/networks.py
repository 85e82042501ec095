"""Five networks of test size in JAX: what `run.py` and the tests of the runtime execute."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

from tmojax.models import build_model


@dataclass(frozen=True)
class Network:
    """`loss(params, batch)` with the shapes of the parameters; `batch(rng)` makes one micro-batch of NumPy arrays."""

    name: str
    loss: Callable[[Any, Any], jax.Array]
    params: Any
    batch: Callable[[np.random.Generator], Any]


class MLP(nn.Module):
    """Pairs of dense layers around a GELU, each with a shortcut."""

    layers: int

    @nn.compact
    def __call__(self, x):
        width = x.shape[-1]
        for layer in range(self.layers):
            x = x + nn.Dense(width, name=f"out{layer}")(nn.gelu(nn.Dense(2 * width, name=f"in{layer}")(x)))
        return x


class ResidualBlock(nn.Module):
    """Two 3x3 convolutions with group normalisation around a shortcut."""

    features: int

    @nn.compact
    def __call__(self, x):
        y = nn.Conv(self.features, (3, 3), use_bias=False, name="conv0")(x)
        y = nn.relu(nn.GroupNorm(4, name="norm0")(y))
        y = nn.Conv(self.features, (3, 3), use_bias=False, name="conv1")(y)
        y = nn.GroupNorm(4, name="norm1")(y)
        if x.shape[-1] != self.features:
            x = nn.Conv(self.features, (1, 1), use_bias=False, name="shortcut")(x)
        return nn.relu(x + y)


class ResNet(nn.Module):
    """A small residual network for images."""

    widths: tuple[int, ...]
    classes: int

    @nn.compact
    def __call__(self, images):
        x = nn.Conv(self.widths[0], (3, 3), name="stem")(images)
        for index, width in enumerate(self.widths):
            x = ResidualBlock(width, name=f"block{index}")(x)
        return nn.Dense(self.classes, name="head")(x.mean((1, 2)))


class EncoderBlock(nn.Module):
    """Pre-normalised self-attention and MLP without a mask."""

    heads: int

    @nn.compact
    def __call__(self, x):
        width = x.shape[-1]
        y = nn.LayerNorm(name="norm0")(x)
        qkv = nn.Dense(3 * width, name="qkv")(y).reshape(*x.shape[:2], 3, self.heads, -1)
        query, key, value = (qkv[:, :, i] for i in range(3))
        scores = jnp.einsum("bqhd,bkhd->bhqk", query, key) * (width // self.heads) ** -0.5
        mixed = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), value)
        x = x + nn.Dense(width, name="proj")(mixed.reshape(x.shape))
        y = nn.gelu(nn.Dense(4 * width, name="fc")(nn.LayerNorm(name="norm1")(x)))
        return x + nn.Dense(width, name="out")(y)


class ViT(nn.Module):
    """A small vision transformer: patches of 4 x 4 pixels, mean pooling."""

    layers: int
    width: int
    heads: int
    classes: int

    @nn.compact
    def __call__(self, images):
        x = nn.Conv(self.width, (4, 4), (4, 4), name="patches")(images)
        x = x.reshape(x.shape[0], -1, self.width)
        x = x + self.param("position", nn.initializers.normal(0.02), (x.shape[1], self.width))
        for layer in range(self.layers):
            x = EncoderBlock(self.heads, name=f"h{layer}")(x)
        return nn.Dense(self.classes, name="head")(nn.LayerNorm(name="norm")(x).mean(1))


class Scanned(nn.Module):
    """Encoder blocks in one `nn.scan`, their parameters stacked: the importer unrolls it."""

    layers: int
    heads: int
    vocabulary: int
    width: int

    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(self.vocabulary, self.width, name="embed")(tokens)
        blocks = nn.scan(
            lambda block, x, _: (block(x), None), variable_axes={"params": 0}, split_rngs={"params": True},
            length=self.layers,
        )  # fmt: skip
        x, _ = blocks(EncoderBlock(self.heads, name="blocks"), x, None)
        return nn.Dense(self.vocabulary, name="logits")(x)


def _mlp(scale: int) -> Network:
    module, shape = MLP(4), (256, 32 * scale)
    shapes = jax.eval_shape(module.init, jax.random.key(0), jax.ShapeDtypeStruct(shape, jnp.float32))["params"]

    def loss(params, batch):
        return ((jnp.asarray(module.apply({"params": params}, batch["x"])) - batch["y"]) ** 2).mean()

    def batch(rng):
        return {part: rng.normal(size=shape).astype(np.float32) for part in ("x", "y")}

    return Network("mlp", loss, shapes, batch)


def mlp_of(chain: Callable[[Any, jax.Array], jax.Array]) -> Callable[[Any, Any], jax.Array]:
    """The loss of the MLP with its blocks in a chain, as the explicit form takes it: the same parameters."""

    def loss(params, batch):
        blocks = [(params[f"in{block}"], params[f"out{block}"]) for block in range(len(params) // 2)]
        return ((chain(blocks, batch["x"]) - batch["y"]) ** 2).mean()

    return loss


def mlp_block(layer: Any, x: jax.Array) -> jax.Array:
    """One block of it."""
    inner, outer = layer
    return x + nn.gelu(x @ inner["kernel"] + inner["bias"]) @ outer["kernel"] + outer["bias"]


def _classifier(name: str, module: nn.Module, images: tuple[int, ...], classes: int) -> Network:
    shapes = jax.eval_shape(module.init, jax.random.key(0), jax.ShapeDtypeStruct(images, jnp.float32))["params"]

    def loss(params, batch):
        logits = jnp.asarray(module.apply({"params": params}, batch["images"]))
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"]).mean()

    def batch(rng):
        labels = rng.integers(0, classes, images[0]).astype(np.int32)
        return {"images": rng.normal(size=images).astype(np.float32), "labels": labels}

    return Network(name, loss, shapes, batch)


def _vit(scale: int) -> ViT:
    return ViT(5, 16 * scale, 2, 10)


def _scanned(scale: int) -> Network:
    module = Scanned(layers=3, heads=2, vocabulary=64, width=16 * scale)
    tokens = (2, 16 * scale)
    shapes = jax.eval_shape(module.init, jax.random.key(0), jax.ShapeDtypeStruct(tokens, jnp.int32))["params"]

    def loss(params, batch):
        logits = jnp.asarray(module.apply({"params": params}, batch["tokens"]))
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"]).mean()

    def batch(rng):
        return {name: rng.integers(0, 64, tokens).astype(np.int32) for name in ("tokens", "targets")}

    return Network("scanned", loss, shapes, batch)


def network(name: str, scale: int = 1) -> Network:
    """A network by name; `scale` multiplies widths and lengths (1: the tests; a GPU wants more)."""
    if name == "mlp":
        return _mlp(scale)
    if name == "gpt2":
        tokens = 16 * scale
        model = build_model(
            "gpt2", batch=8, dtype="float32", layers=2, width=32 * scale, heads=4, vocabulary=96, sequence=tokens
        )
        return Network(
            name, model.loss, model.params,
            lambda rng: {"tokens": rng.integers(0, 96, (8, tokens + 1)).astype(np.int32)},
        )  # fmt: skip
    if name == "resnet":
        return _classifier(name, ResNet((8 * scale, 16 * scale), 10), (4, 8 * scale, 8 * scale, 3), 10)
    if name == "vit":
        return _classifier(name, _vit(scale), (4, 16, 16, 3), 10)
    if name == "scanned":
        return _scanned(scale)
    raise ValueError(f"unknown network {name!r}; choose one of {', '.join(NETWORKS)}")


NETWORKS = ("mlp", "gpt2", "resnet", "vit", "scanned")
