"""How GPUs that start together drift apart under fcfs: time per micro-batch against K, for two selections.

Offload only, 1.33 times too little memory, full duplex. Writes results/fcfs-drift.json and prints a table.
"""

from __future__ import annotations

from pathlib import Path

from tmojax.build import build_problem
from tmojax.config import load_config
from tmojax.planners.fluid import Oblivious
from tmojax.planners.simple import offload_everything
from tmojax.planners.workbench import Workbench
from tmojax.problem import LinkPolicyKind
from tmojax.problem.strict_json import readable_text, write_text
from tmojax.relax.coordinate import together
from tmojax.relax.decode import DoesNotFit

HERE = Path(__file__).resolve().parent
CONFIG = HERE.parents[1] / "configs" / "runs" / "coordination.toml"
COUNTS = (1, 2, 4, 8, 16, 32)


def main() -> None:
    found: dict[str, list[float]] = {"oblivious": [], "whatever must leave": []}
    for count in COUNTS:
        problem = build_problem(load_config(CONFIG, (f"micro_batches={count}",))).problem
        bench = Workbench(problem)
        planned = Oblivious().plan(problem).candidate
        assert planned is not None
        everything = tuple(offload_everything(bench.view(device)) for device in range(bench.device_count))
        for name, decisions in zip(found, (planned.decisions, everything), strict=True):
            plan = bench.evaluate(decisions, together(problem, LinkPolicyKind.FCFS))
            assert not isinstance(plan, DoesNotFit)
            found[name].append(plan.step_s / count)
    value = {"micro_batches": list(COUNTS), "micro_batch_s": found}
    write_text(HERE / "results" / "fcfs-drift.json", readable_text(value))
    print("| selection | " + " | ".join(f"K = {count}" for count in COUNTS) + " |")
    for name, times in found.items():
        print(f"| {name} | " + " | ".join(f"{time_s:.4f}" for time_s in times) + " |")


if __name__ == "__main__":
    main()
