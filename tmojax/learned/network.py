"""The network: candidates one by one, with the mean of all others of the step added half-way (Zaheer et al. 2017, Deep
sets, section 3)."""

from __future__ import annotations

import tmojax.jax_setup  # noqa: F401  (before JAX)

# isort: split
import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array, Float

WIDTH = 32
CHOICES = 3  # keep, offload, recompute


class ChoiceNetwork(nn.Module):
    """What to add to the logits of a heuristic (`features.prior_logits`), from standardised features; nothing at first.
    `weight` [I]: of each candidate in the mean."""

    @nn.compact
    def __call__(
        self, features: Float[Array, "candidate feature"], weight: Float[Array, " candidate"]
    ) -> Float[Array, "candidate 3"]:
        hidden = nn.relu(nn.Dense(WIDTH)(features))
        hidden = nn.relu(nn.Dense(WIDTH)(hidden))
        mean = (weight[:, None] * hidden).sum(0) / jnp.maximum(weight.sum(), 1e-9)
        hidden = jnp.concatenate([hidden, jnp.broadcast_to(mean, hidden.shape)], axis=1)
        hidden = nn.relu(nn.Dense(WIDTH)(hidden))
        return nn.Dense(CHOICES, kernel_init=nn.initializers.zeros)(hidden)
