"""Training steps that the authors of Harmony (VLDB 2022) profiled layer by layer: github.com/msr-fiddle/harmony.

The profiles give, per layer and micro-batch size, the time of forward and of backward (which recomputes the layer
first), the peak bytes of both, and the bytes of the input, weights and optimizer state, in fp32 on a GTX 1080 Ti.
What is made of them: two ops a layer and micro-batch, weights, gradients and optimizer state as STATE, and one update a
layer at the end of the step. The last layer, the loss, runs in backward only, as Harmony schedules it. What a layer
needs beyond its inputs, outputs, weights and gradients is its workspace.

Harmony updates on the CPU, which a machine cannot express; here the GPU updates, in the time that Adam takes to move
its bytes (the roofline of `gpu`). Times of forward and backward are as profiled, whatever the machine's GPUs are.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path

from tmojax.errors import InputError
from tmojax.importers.g10 import read_gzipped
from tmojax.importers.jax_roofline import MEMORY_EFFICIENCY, find_gpu
from tmojax.problem import (
    Collective,
    CollectiveKind,
    Lifetime,
    Op,
    Phase,
    Program,
    Tensor,
    TensorKind,
    Workload,
)
from tmojax.problem.strict_json import shorten
from tmojax.problem.typed_json import reader

PACKAGED = ("gpt2_xl", "bert_large_seq512")
PROFILED_ON = "GTX-1080-Ti"


@dataclass(frozen=True)
class Layer:
    """One layer; the keys of the dictionaries are micro-batch sizes. Times in seconds, sizes in bytes."""

    id: int
    forward_s: dict[str, float]
    backward_s: dict[str, float]
    forward_peak_bytes: dict[str, int]
    backward_peak_bytes: dict[str, int]
    input_bytes: dict[str, int]
    weight_bytes: int
    optimizer_state_bytes: int
    update_on_cpu_s: float


@dataclass(frozen=True)
class Profile:
    model: str
    source: str
    note: str
    units: str
    microbatch_sizes_forward: tuple[int, ...]
    microbatch_sizes_backward: tuple[int, ...]
    layers: tuple[Layer, ...]


@dataclass(frozen=True)
class HarmonyWorkload:
    """`kind = "harmony"`: a model profiled for Harmony, data-parallel on all GPUs of the machine.

    `profile`: a name of PACKAGED, or the path of a file of the same form (`.json` or `.json.gz`). `batch`: samples of
    one micro-batch on one GPU; the profile must have that size. `gpu`: row of the GPU table whose memory bandwidth
    times the update.
    """

    profile: str = "gpt2_xl"
    batch: int = 1
    gpu: str = PROFILED_ON

    def __post_init__(self) -> None:
        """Raises InputError for a profile that is neither packaged nor a path, a batch below 1, an unknown GPU."""
        if self.profile not in PACKAGED and not self.profile.endswith((".json", ".json.gz")):
            raise InputError(
                f"profile: {self.profile!r} is unknown; choose one of {', '.join(PACKAGED)}, or a path that ends in "
                f".json or .json.gz"
            )
        if self.batch < 1:
            raise InputError(f"batch: {self.batch} must be at least 1")
        find_gpu(self.gpu)


def read_profile(name: str, folder: Path) -> Profile:
    """A packaged profile, or a file whose path is relative to `folder`. Raises InputError naming file and field."""
    path = files("tmojax") / "data" / "harmony" / f"{name}.profile.json.gz" if name in PACKAGED else folder / name
    content = read_gzipped(path)
    try:
        profile = reader(Profile)(content, "profile")
    except InputError as error:
        raise InputError(f"{path}: {error}") from None
    if not profile.layers:
        raise InputError(f"{path}: profile.layers: is empty; a model has at least one layer")
    return profile


def harmony_workload(spec: HarmonyWorkload, gpus: int, micro_batches: int, folder: Path) -> Workload:
    """The step on `gpus` equal GPUs. Gradients accumulate in place; with several GPUs each layer's are summed over them
    as soon as the last micro-batch has made them.

    Raises InputError for a bad file and for a micro-batch size that it lacks.
    """
    profile = read_profile(spec.profile, folder)
    size = str(spec.batch)
    for position, layer in enumerate(profile.layers):
        for name in ("forward_s", "backward_s", "forward_peak_bytes", "backward_peak_bytes", "input_bytes"):
            known = getattr(layer, name)
            if size not in known:
                raise InputError(
                    f"workload.batch: {spec.batch} is not in {name} of layer {position} of profile {spec.profile}; "
                    f"it has {shorten(', '.join(known))}"
                )
    tensors, ops, collectives = _tables(profile, size, gpus, spec.gpu)
    return Workload(
        f"{profile.model}, batch {spec.batch} (Harmony)",
        (Program(f"{profile.model} data parallel", tuple(tensors), tuple(ops)),),
        (0,) * gpus,
        micro_batches,
        f"profile: {profile.model}, micro-batch {spec.batch} on {PROFILED_ON} ({profile.source}); update: roofline of "
        f"{spec.gpu}",
        tuple(collectives),
    )


def _tables(profile: Profile, size: str, gpus: int, gpu: str) -> tuple[list[Tensor], list[Op], list[Collective]]:
    tensors: list[Tensor] = []

    def add(name: str, size_bytes: int, kind: TensorKind, lifetime: Lifetime = Lifetime.MICRO_BATCH) -> int:
        replica = name if gpus > 1 and kind in (TensorKind.WEIGHT, TensorKind.OPTIMIZER_STATE) else ""
        tensors.append(Tensor(name, size_bytes, kind, lifetime, replica_group=replica))
        return len(tensors) - 1

    layers = profile.layers
    inputs = [
        add(f"layer{n}.input", layer.input_bytes[size], TensorKind.ACTIVATION if n else TensorKind.INPUT)
        for n, layer in enumerate(layers)
    ]
    state: list[dict[TensorKind, int]] = []  # of each layer; a layer without parameters has none
    for n, layer in enumerate(layers):
        sizes = {
            TensorKind.WEIGHT: layer.weight_bytes,
            TensorKind.GRADIENT: layer.weight_bytes,
            TensorKind.OPTIMIZER_STATE: layer.optimizer_state_bytes,
        }
        state.append(
            {kind: add(f"layer{n}.{kind}", size_bytes, kind, Lifetime.STATE) for kind, size_bytes in sizes.items()
             if size_bytes}
        )  # fmt: skip

    ops: list[Op] = []

    def workspace_bytes(op: Op, peak_bytes: int) -> int:
        """What the profiled peak has beyond the tensors that the op itself names."""
        named = sum(tensors[t].size_bytes for t in (*op.reads, *op.writes, *op.updates))
        return max(0, peak_bytes - named)

    def run(op: Op, peak_bytes: int) -> None:
        ops.append(replace(op, workspace_bytes=workspace_bytes(op, peak_bytes)))

    last = len(layers) - 1
    for n, layer in enumerate(layers[:-1]):
        weight = [state[n][kind] for kind in (TensorKind.WEIGHT,) if kind in state[n]]
        run(
            Op(f"layer{n}.forward", Phase.FORWARD, layer.forward_s[size], reads=(inputs[n], *weight),
               writes=(inputs[n + 1],), layer=f"layer{n}"),
            layer.forward_peak_bytes[size],
        )  # fmt: skip
    collectives: list[Collective] = []
    arriving: tuple[int, ...] = ()  # gradient of the layer's output; the last layer is the loss and has none
    for n in range(last, -1, -1):
        layer = layers[n]
        weight = [state[n][kind] for kind in (TensorKind.WEIGHT,) if kind in state[n]]
        gradient = tuple(state[n][kind] for kind in (TensorKind.GRADIENT,) if kind in state[n])
        leaving = (add(f"d_layer{n}.input", layer.input_bytes[size], TensorKind.GRADIENT),) if n else ()
        run(
            Op(f"layer{n}.backward", Phase.BACKWARD, layer.backward_s[size], reads=(inputs[n], *weight, *arriving),
               writes=leaving, updates=gradient, recomputable=not gradient, layer=f"layer{n}"),
            layer.backward_peak_bytes[size],
        )  # fmt: skip
        arriving = leaving
        if gradient and gpus > 1:
            name = f"gradient.layer{n}"
            collectives.append(Collective(name, CollectiveKind.ALL_REDUCE, layer.weight_bytes, tuple(range(gpus))))
            ops.append(
                Op(f"layer{n}.all_reduce", Phase.COLLECTIVE, 0.0, updates=gradient, recomputable=False, step_op=True,
                   collective=name, layer="synchronisation")
            )  # fmt: skip
    bandwidth = MEMORY_EFFICIENCY * find_gpu(gpu).memory_bandwidth_bytes_per_s
    for n, kinds in enumerate(state):
        if kinds:
            # Weight, gradient and state are read; all are written, the gradient to zero for the next step.
            traffic_bytes = 2 * sum(tensors[t].size_bytes for t in kinds.values())
            ops.append(
                Op(f"layer{n}.update", Phase.OPTIMIZER, traffic_bytes / bandwidth, updates=tuple(kinds.values()),
                   recomputable=False, step_op=True, layer=f"layer{n}", memory_traffic_bytes=traffic_bytes)
            )  # fmt: skip
    return tensors, ops, collectives
