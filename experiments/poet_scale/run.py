"""POET's README instance and tighter ones on HiGHS: sizes, times and gaps, for results/ and README.md.

    python experiments/poet_scale/run.py [--only NAME]

Each case is solved in a process of its own and cached; a case that is in results/ is not solved again.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path

import numpy as np
from network import Network, energy_of, graph_of, paging_of, resnet18_cifar
from published import published_model

from tmojax.bounds.highs import LinearModel, solver_version
from tmojax.ilp.checkmate_graph import StageGraph
from tmojax.ilp.checkmate_model import checkmate_model, read_plan, unit_s
from tmojax.ilp.checkmate_rounding import plan_of_dropped, plan_peak_bytes
from tmojax.ilp.poet_model import poet_model, read_paging_plan, stage_periods_s
from tmojax.ilp.poet_start import paging_start
from tmojax.planners.checkmate import start_values

HERE = Path(__file__).parent
GAP, THREADS = 1e-4, 1


@dataclass(frozen=True)
class Case:
    """formulation: `published` (full matrices, big-M) or `stages` (tmojax). objective: `energy`, `time` (paging takes
    time), or `recompute` (Checkmate's, no paging). ram_bytes: the budget."""

    formulation: str
    objective: str
    ram_bytes: int
    time_limit_s: float

    @property
    def name(self) -> str:
        return f"{self.formulation}-{self.objective}-{self.ram_bytes}"


README_BYTES = 3_000_000
CASES = (
    Case("published", "energy", README_BYTES, 600),
    Case("stages", "energy", README_BYTES, 600),
    Case("stages", "time", README_BYTES, 600),
    *(Case("stages", "recompute", ram, 120) for ram in (2_200_000, 1_500_000)),
    *(Case("stages", objective, ram, 120) for objective in ("energy", "time") for ram in (2_200_000, 1_500_000)),
    Case("published", "energy", 2_200_000, 120),
)


def build(case: Case, network: Network, graph: StageGraph) -> tuple[LinearModel, np.ndarray | None, object]:
    """(model, start, columns) of a case."""
    if case.formulation == "published":
        return published_model(network, case.ram_bytes, 7.6), None, None
    energy, never = energy_of(network), np.full(network.size, np.inf)
    rerun, page = {
        "energy": (network.node_joule, energy.in_joule + energy.out_joule),
        "time": (network.node_s, network.in_s + network.out_s),
        "recompute": (network.node_s, never),
    }[case.objective]
    plan = paging_start(graph, case.ram_bytes, rerun, page)
    if case.objective == "recompute":
        model, remat = checkmate_model(graph, case.ram_bytes)
        return model, start_values(model.columns, remat, plan), remat
    model, columns = poet_model(
        graph, case.ram_bytes, paging_of(network), energy=energy if case.objective == "energy" else None
    )
    start = start_values(model.columns, columns.remat, plan)
    if plan is not None and start is not None:
        for index, flags in ((columns.come, plan.come), (columns.go, plan.go)):
            start[index[index >= 0]] = flags[index >= 0]
    return model, start, columns


def solve(case: Case) -> dict:
    network = resnet18_cifar()
    graph = graph_of(network)
    clock = time.perf_counter()
    model, start, columns = build(case, network, graph)
    build_s = time.perf_counter() - clock
    cpu_clock = time.process_time()
    answer = model.solve(time_limit_s=case.time_limit_s, threads=THREADS, gap=GAP, start=start)
    result = {
        **asdict(case), "nodes": network.size, "columns": answer.columns, "integer_columns": answer.integer_columns,
        "rows": answer.rows, "build_s": build_s, "solve_s": answer.solve_s, "status": answer.status.value,
        "cpu_s": time.process_time() - cpu_clock,
        "value": answer.objective if len(answer.values) else None, "bound": answer.bound,
        "gap": answer.gap if len(answer.values) else None, "gap_limit": GAP, "threads": THREADS,
        "started": start is not None, "solver": solver_version(), "date": date.today().isoformat(),
        "machine": f"{os.cpu_count()} CPU cores ({platform.system()} {platform.machine()})",
    }  # fmt: skip
    if len(answer.values) and case.formulation == "stages":
        plan = (read_plan if case.objective == "recompute" else read_paging_plan)(graph, columns, answer.values)  # type: ignore[arg-type]
        result |= {
            "runs_again": int(plan.run.sum()) - graph.stages, "paged_out": int(plan.go.sum()),
            "paged_in": int(plan.come.sum()), "peak_bytes": plan_peak_bytes(graph, plan),
            "step_over_compute": float(stage_periods_s(graph, plan, paging_of(network)).sum()) / unit_s(graph),
        }  # fmt: skip
    return result


def table(results: list[dict]) -> str:
    network = resnet18_cifar()
    graph = graph_of(network)
    keep = plan_peak_bytes(graph, plan_of_dropped(graph, np.zeros(network.size, bool)))
    first = results[0]
    lines = [
        f"{first['machine']}, {first['date']}; {first['solver']}, {first['threads']} thread, relative gap "
        f"{first['gap_limit']:g}. Keeping everything takes {keep:,} bytes.",
        "",
        "| formulation | minimises | budget, bytes | of keep-all | columns | integer | rows | build s | solve s "
        "| of CPU s | ended | gap | runs again | paged out | time / compute |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for r in results:
        gap = "-" if r["gap"] is None else f"{r['gap']:.2e}"
        plan = [str(r.get("runs_again", "-")), str(r.get("paged_out", "-"))]
        plan.append(f"{r['step_over_compute']:.4f}" if "step_over_compute" in r else "-")
        cells = [
            r["formulation"], r["objective"], f"{r['ram_bytes']:,}", f"{r['ram_bytes'] / keep:.2f}",
            f"{r['columns']:,}", f"{r['integer_columns']:,}", f"{r['rows']:,}", f"{r['build_s']:.1f}",
            f"{r['solve_s']:.1f}", f"{r['cpu_s']:.1f}", r["status"], gap, *plan,
        ]  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="solve just the case of this name, in this process")
    only = parser.parse_args().only
    folder = HERE / "results"
    folder.mkdir(exist_ok=True)
    if only:
        case = next(case for case in CASES if case.name == only)
        text = json.dumps(solve(case), indent=1) + "\n"
        (folder / f"{case.name}.json").write_text(text)
        return
    for case in CASES:
        if not (folder / f"{case.name}.json").exists():
            print(case.name, flush=True)
            subprocess.run([sys.executable, __file__, "--only", case.name], check=True)
    results = [json.loads((folder / f"{case.name}.json").read_text()) for case in CASES]
    readme = HERE / "README.md"
    begin, end = "<!-- written by run.py: begin -->", "<!-- written by run.py: end -->"
    head, rest = readme.read_text().split(begin)
    readme.write_text(head + begin + "\n\n" + table(results) + "\n\n" + end + rest.split(end)[1])


if __name__ == "__main__":
    main()
