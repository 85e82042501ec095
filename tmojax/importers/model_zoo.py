"""A workload from a network's name and sizes: the model zoo traced by the JAX importer; imports JAX only then."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from tmojax.errors import InputError
from tmojax.importers.jax_roofline import find_gpu
from tmojax.problem import Machine, Workload
from tmojax.units import parse_bytes

if TYPE_CHECKING:
    from tmojax.importers.jax_importer import ImportedStep

OPTIMIZERS = ("adamw", "adam", "sgd")
LEARNING_RATE = 1e-4


@dataclass(frozen=True)
class ModelWorkload:
    """`kind = "model"`: a network of the model zoo, traced at its real size.

    `batch`, `dtype` and `sizes` as in `tmojax.models.build_model`. `optimizer`: one of OPTIMIZERS. `gpu`: row of the
    GPU table whose rates give the durations; empty: that of each GPU of the machine. `bucket`: gradients are
    synchronised in pieces of this size. `coarsen`: "none", or "layer" to merge the ops of a layer.
    """

    model: str
    batch: int = 8
    dtype: str = "bfloat16"
    sizes: dict[str, int] = field(default_factory=dict)
    optimizer: str = "adamw"
    gpu: str = ""
    bucket: str = "25 MB"
    coarsen: str = "none"

    def __post_init__(self) -> None:
        """Raises InputError for an unknown optimizer or GPU and a wrong quantity; the model zoo checks the rest."""
        if self.optimizer not in OPTIMIZERS:
            raise InputError(f"optimizer: {self.optimizer!r} is unknown; choose one of {', '.join(OPTIMIZERS)}")
        if self.gpu:
            find_gpu(self.gpu)
        parse_bytes(self.bucket, "bucket")


def import_model(spec: ModelWorkload, machine: Machine, micro_batches: int) -> tuple[Workload, list[str]]:
    """The data-parallel step of a model; one program for each GPU model of the machine."""
    imported = import_traced_model(spec, machine, micro_batches)
    return imported.workload, imported.report.lines()


def import_traced_model(spec: ModelWorkload, machine: Machine, micro_batches: int) -> ImportedStep:
    """As `import_model`, with the traced step of the first GPU model, which can be executed."""
    import optax

    from tmojax.importers.jax_importer import import_train_step
    from tmojax.models import build_model

    unknown = {"batch", "dtype", "name"} & spec.sizes.keys()
    if unknown:
        raise InputError(f"workload.sizes.{min(unknown)}: is not a size; set workload.{min(unknown)}")
    try:
        model = build_model(spec.model, batch=spec.batch, dtype=spec.dtype, **spec.sizes)
        gpu_names = [spec.gpu or device.model for device in machine.devices]
        optimizer = {"adamw": optax.adamw, "adam": optax.adam, "sgd": optax.sgd}[spec.optimizer](LEARNING_RATE)
        imported = {
            name: import_train_step(
                model.loss,
                model.params,
                model.batch,
                optimizer,
                gpu=name,
                micro_batches=micro_batches,
                gpus=len(gpu_names),
                bucket_bytes=parse_bytes(spec.bucket),
                coarsen=spec.coarsen,
                name=spec.model,
            )
            for name in dict.fromkeys(gpu_names)
        }
    except InputError as error:
        raise InputError(f"workload: {error}") from None
    steps = [step.workload for step in imported.values()]
    position = {name: index for index, name in enumerate(imported)}
    workload = replace(
        steps[0],
        programs=tuple(
            replace(
                step.programs[0], name=f"{step.programs[0].name} on {name}" if len(steps) > 1 else step.programs[0].name
            )
            for name, step in zip(imported, steps, strict=True)
        ),
        device_program=tuple(position[name] for name in gpu_names),
        duration_source="; ".join(step.duration_source for step in steps),
    )
    return replace(next(iter(imported.values())), workload=workload)
