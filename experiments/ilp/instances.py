"""The problems of the comparison: what each changes in a run configuration of the repository."""

from __future__ import annotations

from dataclasses import dataclass

BASE = "configs/runs/coordination.toml"
BOTH = 'actions=["offload", "recompute"]'


@dataclass(frozen=True)
class Instance:
    """`words` describe it in tables; `overrides` are as for tmojax.run -o, on top of `config`. long: also with the
    longest time limit."""

    name: str
    words: str
    overrides: tuple[str, ...]
    config: str = BASE
    long: bool = False


def _prototype(actions: str, factor: str, micro_batches: int, preset: str, *more: str) -> tuple[str, ...]:
    allowed = 'actions=["offload"]' if actions == "offload" else BOTH
    return (allowed, f"capacity.footprint_factor={factor}", f"micro_batches={micro_batches}",
            f"machine.preset={preset}", *more)  # fmt: skip


TWO_GPUS = "machine.gpus.rtx4090.count=2"
SMALL = ("workload.tokens=1024", "workload.width=512")

INSTANCES = (
    Instance(
        "tiny", "1 layer, 2 GPUs, offload only, 1.5 x, K = 1",
        _prototype("offload", "1.5", 1, "rtx4090x4-one-uplink", TWO_GPUS, *SMALL, "workload.layers=1",
                   "workload.compute_s=0.002"),
    ),
    Instance(
        "middle", "4 layers, 2 GPUs, all actions, 2 x, K = 2",
        _prototype("all", "2", 2, "rtx4090x4-one-uplink", TWO_GPUS, "workload.layers=4", "workload.compute_s=0.1"),
        long=True,
    ),
    Instance(
        "offload-k1", "prototype, offload only, 1.33 x, K = 1",
        _prototype("offload", "1.33", 1, "prototype-4gpu-12.5"), long=True,
    ),
    Instance(
        "offload-k8", "prototype, offload only, 1.33 x, K = 8", _prototype("offload", "1.33", 8, "prototype-4gpu-12.5")
    ),
    Instance(
        "all-3-k8", "prototype, all actions, 3 x, K = 8", _prototype("all", "3", 8, "prototype-4gpu-12.5"), long=True
    ),
    Instance(
        "half-duplex", "prototype, half duplex, all actions, 2 x, K = 1",
        _prototype("all", "2", 1, "prototype-4gpu-12.5-half-duplex"),
    ),
    Instance(
        "uneven", "12 layers, 6 GPUs on uneven risers, all actions, 2 x, K = 4",
        _prototype("all", "2", 4, "uneven-risers-x6"),
    ),
    Instance(
        "dual-socket", "12 layers, 4 V100 on two sockets, offload only, 1.33 x, K = 1",
        _prototype("offload", "1.33", 1, "dual-socket-v100x4"),
    ),
    Instance("gpt2", "GPT-2 of the quickstart, 4 GPUs, all actions, 3 x, K = 8", (), "configs/runs/quickstart.toml"),
)  # fmt: skip
