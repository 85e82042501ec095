"""Imported steps that several tests look at, and what they ask of them."""

from functools import cache

import optax

from tmojax.importers.jax_importer import import_train_step
from tmojax.models import build_model
from tmojax.problem import Lifetime, keep_all_footprint_bytes


@cache
def imported(name, gpu, micro_batches=1, gpus=1, coarsen="none", **options):
    model = build_model(name, **options)
    return import_train_step(
        model.loss, model.params, model.batch, optax.adamw(1e-4), gpu=gpu, micro_batches=micro_batches, gpus=gpus,
        coarsen=coarsen, name=name,
    )  # fmt: skip


def gpt2(**options):
    return imported("gpt2", "A100-SXM4-40GB", **options)


def program_of(step):
    return step.workload.programs[0]


def temporaries_bytes(step):
    """Peak of keep-all less what persists: what XLA calls temporary memory, because the state is donated."""
    state = sum(t.size_bytes for t in program_of(step).tensors if t.lifetime is Lifetime.STATE)
    return keep_all_footprint_bytes(step.workload, 0) - state


def bytes_of(step, kind):
    return sum(t.size_bytes for t in program_of(step).tensors if t.kind is kind and t.lifetime is Lifetime.STATE)
