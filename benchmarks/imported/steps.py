"""Training steps imported from JAX at full size, for the benchmarks."""

from __future__ import annotations

from pathlib import Path

from tmojax.build import build_problem
from tmojax.config import load_config
from tmojax.problem import Problem

ROOT = Path(__file__).parents[2]

# Changes to configs/runs/quickstart.toml
OVERRIDES = {
    "GPT-2, 4 GPUs, K=8": [],
    "GPT-2 XL, 4 GPUs, K=4": [
        "workload.model=gpt2-xl", "workload.batch=1", "micro_batches=4", "capacity.footprint_factor=1.5",
    ],
    "Llama-7B, 8 GPUs, K=16": [
        "workload.model=llama-7b", "workload.batch=1", "micro_batches=16", "machine.preset=rtxpro6000x8-one-root",
        "capacity.footprint_factor=1.5",
    ],
    "GPT-2, half-duplex, K=2": ["micro_batches=2", "machine.preset=rtx4090x4-one-uplink-half-duplex"],
    "GPT-2, uneven risers, K=2": [
        "micro_batches=2", "machine.preset=uneven-risers-x6", "capacity.footprint_factor=2",
    ],
}  # fmt: skip


def imported(name: str) -> Problem:
    """Import one of the steps (2 to 15 s)."""
    return build_problem(load_config(ROOT / "configs" / "runs" / "quickstart.toml", OVERRIDES[name])).problem
