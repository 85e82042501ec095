"""Arenas of public placement instances, and of the plans of a run.

    python benchmarks/arena/placement.py [RUN_FOLDER] [--effort STEPS]

Instances: tests/arena/data. With a run folder (`python -m tmojax.run CONFIG` makes one) also every plan in it, in the
memory of the first GPU. Every placement is judged by `find_faults`.
"""

from __future__ import annotations

import argparse
import platform
import time
from collections.abc import Sequence
from pathlib import Path

import numba
import numpy as np

from tmojax.arena import Block, blocks_of, find_faults, place_blocks, place_first_fit, read_blocks
from tmojax.problem.io import read_plan, read_problem

INSTANCES = Path(__file__).parents[2] / "tests" / "arena" / "data"


def row(name: str, blocks: Sequence[Block], alignment_bytes: int, capacity_bytes: int | None, effort: int) -> str:
    start = time.perf_counter()
    arena = place_blocks(blocks, alignment_bytes=alignment_bytes, effort=effort)
    place_s = time.perf_counter() - start
    assert not find_faults(blocks, arena.offsets, alignment_bytes=alignment_bytes)
    first_fit = place_first_fit(blocks, alignment_bytes=alignment_bytes).arena_bytes
    share = f"{arena.arena_bytes / capacity_bytes:.3f}" if capacity_bytes else ""
    peak = arena.peak_live_bytes
    return (f"| {name} | {len(blocks)} | {peak} | {first_fit} | {first_fit / peak:.3f} | {arena.arena_bytes} | "
            f"{arena.arena_bytes / peak:.3f} | {share} | {place_s:.2f} |")  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description="Arenas of public placement instances, and of the plans of a run.")
    parser.add_argument("run", type=Path, nargs="?", help="folder of a run")
    parser.add_argument("--effort", type=int, default=300_000_000, help="steps of the search for one placement")
    options = parser.parse_args()
    run, effort = options.run, options.effort
    print(f"Python {platform.python_version()}, numba {numba.__version__}, NumPy {np.__version__}\n")
    # Compiles everything, so that the times below are without it.
    place_blocks(read_blocks(INSTANCES / "A.1048576.csv")[0], effort=100_000)
    print("| instance | blocks | peak | first-fit | / peak | ours | / peak | / capacity | s |")
    print("|---|---|---|---|---|---|---|---|---|")
    for path in sorted(INSTANCES.glob("*.csv")):
        print(row(path.stem, read_blocks(path)[0], 1, int(path.stem.split(".")[1]), effort), flush=True)
    if run:
        problem = read_problem(run / "problem.json")
        for path in sorted((run / "plans").glob("*.json")):
            blocks = next(iter(blocks_of(problem, read_plan(path).schedule).values()))
            print(row(path.stem, blocks, 256, None, effort), flush=True)


if __name__ == "__main__":
    main()
