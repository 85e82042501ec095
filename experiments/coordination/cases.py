"""The rows of the table: what each changes in configs/runs/coordination.toml."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

GPT2 = (
    'workload={kind="model", model="gpt2", batch=8, dtype="bfloat16", optimizer="adamw"}',
    "capacity.footprint_factor=3.0",
    'actions=["offload", "recompute"]',
)


@dataclass(frozen=True)
class Case:
    """One row. `problem`, `actions`, `footprint`, `duplex` are its labels; `overrides` are as for tmojax.run -o."""

    name: str
    problem: str
    actions: str
    footprint: str
    micro_batches: int
    duplex: str
    overrides: tuple[str, ...]


def _prototype(actions: str, footprint: str, micro_batches: int, duplex: str) -> Case:
    allowed = '["offload"]' if actions == "offload" else '["offload", "recompute"]'
    machine = "prototype-4gpu-12.5" + ("-half-duplex" if duplex == "half" else "")
    return Case(
        f"prototype-{actions}-{footprint}-k{micro_batches}-{duplex}",
        "prototype",
        actions,
        footprint,
        micro_batches,
        duplex,
        (
            f"actions={allowed}",
            f"capacity.footprint_factor={footprint}",
            f"micro_batches={micro_batches}",
            f"machine.preset={machine}",
        ),
    )


def _gpt2(micro_batches: int, duplex: str) -> Case:
    machine = "rtx4090x4-one-uplink" + ("-half-duplex" if duplex == "half" else "")
    changes = (f"micro_batches={micro_batches}", f"machine.preset={machine}")
    return Case(f"gpt2-all-3-k{micro_batches}-{duplex}", "GPT-2", "all", "3", micro_batches, duplex, GPT2 + changes)


CASES = (
    *(
        _prototype(*choice)
        for choice in product(("offload", "all"), ("1.33", "3"), (1, 8), ("full", "half"))
    ),
    *(_gpt2(*choice) for choice in product((8, 1), ("full", "half"))),
)
