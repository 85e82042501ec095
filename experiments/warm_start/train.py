"""Train the network on solved lessons and write its weights."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import tmojax.jax_setup  # noqa: F401  (before JAX)

# isort: split
import jax
import jax.numpy as jnp
import optax

from experiments.warm_start.solve import unpacked
from tmojax.learned.features import Surroundings, interval_features
from tmojax.learned.network import CHOICES, CLIP, ChoiceNetwork, save_weights

STEPS = 3000
LEARNING_RATE = 2e-3
DECAY = 0.02
HELD_OUT = 5  # every fifth lesson of each kind tells whether the network has learned or remembers


class Examples(NamedTuple):
    """One view of every lesson, padded to the largest: features [N, I, F], target [N, I, 3] (shares of the GPUs and of
    micro-batches), weight [N, I] (share of the bytes; 0 for padding), allowed [N, I, 3]."""

    features: Any
    target: Any
    weight: Any
    allowed: Any


def examples_of(paths: list[Path]) -> Examples:
    rows = []
    for path in paths:
        with np.load(path) as file:
            arrays = dict(file)
        for device in sorted({name.split(".")[0] for name in arrays if name.endswith(".choice")}):
            mine = {name.partition(".")[2]: value for name, value in arrays.items() if name.startswith(f"{device}.")}
            view = unpacked(mine)
            features = interval_features(view, Surroundings(*mine["surroundings"].tolist()))
            target = np.eye(CHOICES)[mine["choice"].astype(int)].mean(0)
            allowed = np.stack([np.ones(len(features), bool), view.may_offload, view.may_recompute], axis=1)
            rows.append((features, target, view.size_bytes / view.size_bytes.sum(), allowed))
    longest = max(len(features) for features, *_ in rows)

    def stacked(index: int) -> np.ndarray:
        arrays = [np.asarray(row[index], float) for row in rows]
        return np.stack([np.pad(a, ((0, longest - len(a)), *((0, 0),) * (a.ndim - 1))) for a in arrays])

    return Examples(stacked(0), stacked(1), stacked(2), stacked(3).astype(bool))


def loss_of(network: ChoiceNetwork, parameters: Any, examples: Examples) -> tuple[jax.Array, jax.Array]:
    """(cross-entropy, share of bytes that get the planner's choice), means over lessons, by bytes."""
    logits: Any = jax.vmap(lambda f, w: network.apply(parameters, f, w))(examples.features, examples.weight)
    logits = jnp.where(examples.allowed, logits, -30.0)
    weight = jnp.sqrt(examples.weight) / jnp.maximum(jnp.sqrt(examples.weight).sum(1, keepdims=True), 1e-9)
    loss = -(weight[..., None] * examples.target * jax.nn.log_softmax(logits)).sum((1, 2)).mean()
    chosen = jax.nn.one_hot(logits.argmax(-1), CHOICES)
    return loss, (examples.weight[..., None] * chosen * examples.target).sum((1, 2)).mean()


def main() -> int:
    parser = argparse.ArgumentParser(prog="experiments.warm_start.train", description=__doc__)
    parser.add_argument("solved", type=Path, help="folder that solve.py has filled")
    parser.add_argument("--out", type=Path, required=True, help="file of the weights")
    arguments = parser.parse_args()
    paths = sorted(arguments.solved.glob("*.npz"), key=lambda path: int(path.name.split("-")[0]))
    held = [path for index, path in enumerate(paths) if index % HELD_OUT == HELD_OUT - 1]
    train, test = examples_of([path for path in paths if path not in held]), examples_of(held)
    known = train.weight > 0
    mean, scale = train.features[known].mean(0), np.maximum(train.features[known].std(0), 0.05)
    train, test = (one._replace(features=np.clip((one.features - mean) / scale, -CLIP, CLIP)) for one in (train, test))
    train, test = (Examples(*map(jnp.asarray, one)) for one in (train, test))

    network = ChoiceNetwork()
    parameters: Any = network.init(jax.random.key(0), train.features[0], train.weight[0])
    optimiser = optax.adamw(optax.cosine_decay_schedule(LEARNING_RATE, STEPS), weight_decay=DECAY)
    state = optimiser.init(parameters)

    @jax.jit
    def step(parameters, state, key):
        """One batch of lessons, features with noise, so that no lesson is learned by heart."""
        picked = jax.random.choice(key, train.features.shape[0], (min(16, train.features.shape[0]),), replace=False)
        batch = jax.tree.map(lambda values: values[picked], train)
        noise = 0.1 * jax.random.normal(key, batch.features.shape)
        batch = batch._replace(features=batch.features + noise)
        gradient = jax.grad(lambda p: loss_of(network, p, batch)[0])(parameters)
        updates, state = optimiser.update(gradient, state, parameters)
        return optax.apply_updates(parameters, updates), state

    judge = jax.jit(lambda p, examples: loss_of(network, p, examples))
    for number in range(STEPS):
        parameters, state = step(parameters, state, jax.random.fold_in(jax.random.key(1), number))
        if number % 500 == 499:
            (a, b), (c, d) = judge(parameters, train), judge(parameters, test)
            print(f"step {number + 1}: loss {a:.3f}, {100 * b:.1f} % of the bytes as the planner; held out {c:.3f}, "
                  f"{100 * d:.1f} %", flush=True)  # fmt: skip
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    save_weights(arguments.out, parameters, mean, scale)
    print(f"{len(paths)} lessons, {len(held)} of them held out; {arguments.out.stat().st_size} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
