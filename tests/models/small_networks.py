"""One small network of every family, which a CPU trains in a moment, with numbers for its parameters and batch."""

import jax
import numpy as np

from tmojax.models import build_model

STAGES = {"stage1": 1, "stage2": 1, "stage3": 1, "stage4": 1}
SMALL = {
    "gpt2": {"layers": 1, "width": 32, "heads": 2, "vocabulary": 64, "sequence": 16},
    "llama-7b": {"layers": 1, "width": 32, "heads": 2, "hidden": 48, "vocabulary": 64, "sequence": 16},
    "bert-base": {
        "layers": 1, "width": 32, "heads": 2, "hidden": 64, "vocabulary": 64, "positions": 16, "sequence": 12,
        "masked": 3,
    },
    "vit-b16": {"layers": 1, "width": 32, "heads": 2, "hidden": 64, "patch": 8, "image": 32, "classes": 8},
    "resnet50": {**STAGES, "stage1": 2, "width": 8, "classes": 8, "image": 32},
    "densenet121": {**STAGES, "stage1": 2, "growth": 8, "width": 8, "classes": 8, "image": 64},
    "convnext-tiny": {**STAGES, "width": 8, "classes": 8, "image": 64},
    "conformer-s": {"layers": 1, "width": 32, "heads": 2, "kernel": 7, "labels": 8, "frames": 40, "filters": 16},
    "dlrm": {
        "tables": 4, "rows": 50, "embedding": 8, "bottom1": 16, "bottom2": 16, "bottom3": 16, "top1": 16, "top2": 8,
    },
}  # fmt: skip


def small(name, batch=4, dtype="float32"):
    return build_model(name, batch=batch, dtype=dtype, **SMALL[name])


def numbers(model, seed=0):
    """Random parameters of the usual size, and a batch of random numbers and of integers that every vocabulary has."""
    random = np.random.default_rng(seed)

    def parameter(shape):
        fan_in = max(1, int(np.prod(shape.shape[:-1])))
        return jax.numpy.asarray(random.normal(size=shape.shape) / np.sqrt(fan_in), shape.dtype)

    def entry(shape):
        if np.issubdtype(shape.dtype, np.integer):
            return jax.numpy.asarray(random.integers(0, 2, shape.shape), shape.dtype)
        return jax.numpy.asarray(random.random(shape.shape), shape.dtype)

    return jax.tree.map(parameter, model.params), jax.tree.map(entry, model.batch)
