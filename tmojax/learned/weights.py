"""The trained network as a file, and its forward pass in NumPy: a few small matrices, for which nothing has to be
compiled and JAX need not be there."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float

CLIP = 6.0  # standard deviations: features of unseen steps may lie anywhere


def save_weights(path: Path, parameters: Mapping[str, Any], mean: np.ndarray, scale: np.ndarray) -> None:
    """One npz file: layers in float16, mean and scale of the features."""
    arrays: dict[str, Any] = {
        f"{layer}.{name}": np.asarray(value, np.float16)
        for layer, both in parameters["params"].items()
        for name, value in both.items()
    }
    np.savez_compressed(path, mean=mean.astype(np.float32), scale=scale.astype(np.float32), **arrays)


class Weights:
    """A trained network."""

    def __init__(self, path: Path) -> None:
        with np.load(path) as arrays:
            self._arrays = {name: np.asarray(value, np.float32) for name, value in arrays.items()}

    def logits(
        self, features: Float[np.ndarray, "candidate feature"], weight: Float[np.ndarray, " candidate"]
    ) -> Float[np.ndarray, "candidate 3"]:
        """As `ChoiceNetwork` of the standardised features."""
        hidden = np.clip((features - self._arrays["mean"]) / self._arrays["scale"], -CLIP, CLIP)
        hidden = np.maximum(self._dense(0, hidden), 0)
        hidden = np.maximum(self._dense(1, hidden), 0)
        mean = (weight[:, None] * hidden).sum(0) / max(float(weight.sum()), 1e-9)
        hidden = np.concatenate([hidden, np.broadcast_to(mean, hidden.shape)], axis=1)
        hidden = np.maximum(self._dense(2, hidden), 0)
        return self._dense(3, hidden)

    def _dense(self, number: int, values: np.ndarray) -> np.ndarray:
        return values @ self._arrays[f"Dense_{number}.kernel"] + self._arrays[f"Dense_{number}.bias"]
