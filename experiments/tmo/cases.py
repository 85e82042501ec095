"""The rows of the table: model, footprint, and micro-batches between two gradient synchronisations."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

# Sizes whose footprint in single precision is about 1.33 times the 16 GiB of a V100.
MODELS = (("gpt2-medium", 4), ("bert-large", 12), ("resnet152", 120))
FOOTPRINTS = (1.33, 1.5, 2.0)
MICRO_BATCHES = (1, 2, 4, 8, 16)


@dataclass(frozen=True)
class Case:
    """One row. `overrides` are as for tmojax.run -o."""

    model: str
    batch: int
    footprint: float
    micro_batches: int

    @property
    def name(self) -> str:
        return f"{self.model}-{self.footprint:g}-k{self.micro_batches}"

    @property
    def overrides(self) -> tuple[str, ...]:
        return (
            f'workload.model="{self.model}"',
            f"workload.batch={self.batch}",
            f"capacity.footprint_factor={self.footprint}",
            f"micro_batches={self.micro_batches}",
        )


CASES = tuple(
    Case(model, batch, footprint, count)
    for footprint, count, (model, batch) in product(FOOTPRINTS, MICRO_BATCHES, MODELS)
)
