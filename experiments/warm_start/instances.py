"""Problems to learn from: the transformer by formula and small traced networks of families that are not evaluated."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from tmojax.importers.machine_build import load_machine
from tmojax.importers.model_zoo import ModelWorkload, import_model
from tmojax.importers.synthetic import SyntheticTransformer, synthetic_transformer
from tmojax.planners.least_capacity import least_capacity
from tmojax.problem import Action, Problem, Workload, keep_all_footprint_bytes, largest_op_bytes

BOTH = frozenset({Action.OFFLOAD, Action.RECOMPUTE})
FACTORS = (1.33, 1.5, 2.0, 2.5, 3.0)
PRESETS = (
    "prototype-4gpu-12.5",
    "prototype-4gpu-12.5-half-duplex",
    "rtx4090x4-one-uplink",
    "rtx4090x4-one-uplink-half-duplex",
    "dual-socket-v100x4",
    "rtx3090x4-one-on-x1",
    "rtx3090x2-nvlink",
    "a100x8-pairs",
)
GPUS = ("RTX-4090", "RTX-3090", "A100-SXM4-40GB")  # whose rates give durations
NETWORKS = (
    ModelWorkload("llama-7b", 4, sizes={"layers": 6, "width": 1024, "heads": 16, "hidden": 2816, "sequence": 1024}),
    ModelWorkload("conformer-s", 32, sizes={"layers": 4, "frames": 800}),
    ModelWorkload("resnet50", 64, sizes={"stage1": 2, "stage2": 2, "stage3": 3, "stage4": 2}),
    ModelWorkload("densenet121", 64),
)


@dataclass(frozen=True)
class Lesson:
    """A problem to learn from; `family` is what its workload was made from."""

    name: str
    family: str
    problem: Problem


def lessons(seed: int = 0) -> Iterator[Lesson]:
    """Endless, deterministic for a seed: every other one is traced, of the network whose turn it is."""
    rng = np.random.default_rng(seed)
    traced: dict[tuple[str, str], Workload] = {}
    number = 0
    while True:
        machine = load_machine(str(rng.choice(PRESETS)))
        micro_batches, factor = int(rng.choice((1, 4))), float(rng.choice(FACTORS))
        gpu = str(rng.choice(GPUS))
        spec = SyntheticTransformer(
            layers=int(rng.integers(4, 17)),
            tokens=1024 * int(rng.integers(2, 13)),
            width=64 * int(rng.integers(8, 33)),
            compute_s=float(np.exp(rng.uniform(np.log(0.05), np.log(0.8)))),
            elementwise_share=float(rng.uniform(0.01, 0.15)),
            parameters=int(rng.choice((0, 10**8))),
        )
        if number % 2:
            network = NETWORKS[(number // 2) % len(NETWORKS)]
            key = (network.model, gpu)
            if key not in traced:
                traced[key], _ = import_model(replace(network, gpu=gpu), load_machine("rtx3090x2-nvlink"), 1)
            family, workload = network.model, _for_devices(traced[key], len(machine.devices), micro_batches)
        else:
            family, workload = "synthetic", synthetic_transformer(spec, len(machine.devices), micro_batches)
        problem = Problem(f"lesson {number}", workload, machine, BOTH)
        footprint = keep_all_footprint_bytes(workload, 0)
        wanted = max(int(footprint / factor), largest_op_bytes(workload, 0)[1])
        # Where no simple strategy fits, the least capacity that one needs, as in the benchmark suite.
        capacity, _ = least_capacity(problem.with_device_capacity(footprint), wanted)
        words = f"{number}-{family}-{machine.name}-k{micro_batches}-f{factor:g}"
        yield Lesson(words, family, problem.with_device_capacity(capacity))
        number += 1


def _for_devices(workload: Workload, devices: int, micro_batches: int) -> Workload:
    """The data-parallel step of one program on more devices."""
    collectives = tuple(replace(one, devices=tuple(range(devices))) for one in workload.collectives)
    return replace(workload, device_program=(0,) * devices, micro_batches=micro_batches, collectives=collectives)
