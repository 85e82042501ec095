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
from tmojax.learned.features import Surroundings, interval_features, prior_logits
from tmojax.learned.network import CHOICES, ChoiceNetwork
from tmojax.learned.weights import CLIP, save_weights

STEPS = 120
EVERY = 10  # steps: then the lessons that are held out say which weights are kept
LEARNING_RATE = 2e-3
DECAY = 0.1
NOISE = 0.2  # on standardised features, so that no lesson is learned by heart
SHIFTS = (-6.0, -3.0, -1.5, 0.0, 1.5, 3.0, 6.0)  # of the logit of recompute, which the warm start tries as well
HELD_OUT = 5  # every fifth lesson of each kind tells whether the network has learned or remembers


class Examples(NamedTuple):
    """One view of every lesson, padded to the largest: features [N, I, F], target [N, I, 3] (shares of the GPUs and of
    micro-batches), weight [N, I] (share of the bytes; 0 for padding), prior [N, I, 3] (logits; -30 for what is not
    allowed)."""

    features: Any
    target: Any
    weight: Any
    prior: Any


def examples_of(paths: list[Path]) -> Examples:
    rows = []
    for path in paths:
        with np.load(path) as file:
            arrays = dict(file)
        for device in sorted({name.split(".")[0] for name in arrays if name.endswith(".choice")}):
            mine = {name.partition(".")[2]: value for name, value in arrays.items() if name.startswith(f"{device}.")}
            view = unpacked(mine)
            around = Surroundings(*mine["surroundings"].tolist())
            features = interval_features(view, around)
            target = np.eye(CHOICES)[mine["choice"].astype(int)].mean(0)
            allowed = np.stack([np.ones(len(features), bool), view.may_offload, view.may_recompute], axis=1)
            prior = np.where(allowed, prior_logits(view, around), -30.0)
            rows.append((features, target, view.size_bytes / view.size_bytes.sum(), prior))
    longest = max(len(features) for features, *_ in rows)

    def stacked(index: int) -> np.ndarray:
        arrays = [np.asarray(row[index], float) for row in rows]
        return np.stack([np.pad(a, ((0, longest - len(a)), *((0, 0),) * (a.ndim - 1))) for a in arrays])

    return Examples(stacked(0), stacked(1), stacked(2), stacked(3))


def loss_of(network: ChoiceNetwork, parameters: Any, examples: Examples) -> tuple[jax.Array, jax.Array]:
    """(Cross-entropy, share of bytes that get the planner's choice), of the best shift; means over lessons."""
    added: Any = jax.vmap(lambda f, w: network.apply(parameters, f, w))(examples.features, examples.weight)
    logits = examples.prior + added
    weight = jnp.sqrt(examples.weight) / jnp.maximum(jnp.sqrt(examples.weight).sum(1, keepdims=True), 1e-9)

    def shifted(shift: jax.Array) -> tuple[jax.Array, jax.Array]:
        moved = logits + jnp.array([0.0, 0.0, 1.0]) * shift
        loss = -(weight[..., None] * examples.target * jax.nn.log_softmax(moved)).sum((1, 2))
        chosen = jax.nn.one_hot(moved.argmax(-1), CHOICES)
        return loss, (examples.weight[..., None] * chosen * examples.target).sum((1, 2))

    loss, same = jax.vmap(shifted)(jnp.array(SHIFTS))
    return -0.1 * jax.nn.logsumexp(-10 * loss, axis=0).mean(), same.max(0).mean()


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

    def step(carry, key):
        """One step on half of the lessons."""
        parameters, state = carry
        count = train.features.shape[0]
        picked = jax.random.choice(key, count, ((count + 1) // 2,), replace=False)
        batch = jax.tree.map(lambda values: values[picked], train)
        noise = NOISE * jax.random.normal(key, batch.features.shape)
        batch = batch._replace(features=batch.features + noise)
        gradient = jax.grad(lambda p: loss_of(network, p, batch)[0])(parameters)
        updates, state = optimiser.update(gradient, state, parameters)
        return (optax.apply_updates(parameters, updates), state), None

    judge = jax.jit(lambda p, examples: loss_of(network, p, examples))
    rounds = jax.jit(lambda carry, keys: jax.lax.scan(step, carry, keys)[0])
    keys = jax.random.split(jax.random.key(1), STEPS)
    best, best_loss, words = parameters, float("inf"), ""
    for number in range(0, STEPS + 1, EVERY):
        (a, b), (c, d) = judge(parameters, train), judge(parameters, test)
        if float(c) < best_loss:
            best, best_loss = parameters, float(c)
            words = (f"step {number}: loss {a:.3f}, {100 * b:.1f} % of the bytes as the planner; held out {c:.3f}, "
                     f"{100 * d:.1f} %")  # fmt: skip
        if number == 0:
            print(words)
        if number < STEPS:
            parameters, state = rounds((parameters, state), keys[number : number + EVERY])
    print(words)
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    save_weights(arguments.out, best, mean, scale)
    print(f"{len(paths)} lessons, {len(held)} of them held out; {arguments.out.stat().st_size} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
