"""Step times with the default order of micro-batches and with breadth-first ones. See README.md.

A row is one case in one order. It is kept in results/, and not computed again while its configuration is the same.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path

from experiments.recorded import planned, put_between_marks
from tmojax.bounds import bound
from tmojax.build import build_problem
from tmojax.config import load_config
from tmojax.planners.gradient import LocalSearch
from tmojax.planners.local_search import SearchSettings
from tmojax.planners.ratio import RatioSweep
from tmojax.problem import keep_all_footprint_bytes
from tmojax.problem.in_order import in_order, offered_orders
from tmojax.problem.strict_json import readable_text, write_text
from tmojax.report.provenance import provenance
from tmojax.report.summary import json_values

HERE = Path(__file__).resolve().parent
SUITE = HERE.parents[1] / "configs" / "bench"
SEED = 0


@dataclass(frozen=True)
class Case:
    """An instance of the suite with changes; `words` for the table."""

    name: str
    words: str
    config: str
    orders: str
    overrides: tuple[str, ...] = ()

    @property
    def all_overrides(self) -> list[str]:
        return [*self.overrides, f"micro_batch_orders={self.orders}"]


TWO_GPUS = ("machine.gpus.first.count=1", "machine.gpus.second.count=1")
CASES = (
    Case("harmony-gpt2-xl-k4-f3", "GPT-2 XL (Harmony), four GTX 1080 Ti, K = 4, footprint / 3",
         "harmony-gpt2-xl-4gpu-1080ti-k4-f3", "[{}, {group=2}]"),
    Case("harmony-gpt2-xl-k16-f3", "the same, K = 16", "harmony-gpt2-xl-4gpu-1080ti-k16-f3", "[{}, {group=4}]"),
    Case("harmony-gpt2-xl-k4-f2", "GPT-2 XL (Harmony), four V100, K = 4, footprint / 2", "harmony-gpt2-xl-4gpu-k4-f2",
         "[{}, {group=2}]"),
    Case("llama-2gpu-k4-f2", "Llama-7B, two RTX PRO 6000, K = 4, footprint / 2", "llama-7b-8gpu-two-roots-k4-f2",
         "[{group=2}, {}]", TWO_GPUS),
    Case("llama-1gpu-k16-f3", "Llama-7B, GH200, K = 16, footprint / 3", "llama-7b-1gpu-gh200-k4-f2",
         "[{group=2}, {group=4}]", ("capacity.footprint_factor=3", "micro_batches=16")),
    Case("harmony-bert-k16-f1.33", "BERT-large (Harmony), four V100, K = 16, footprint / 1.33",
         "harmony-bert-large-4gpu-k16-f1.33", "[{group=2}, {group=4}]"),
    Case("gpt2-k4-f2", "GPT-2, four GPUs, K = 4, footprint / 2", "gpt2-4gpu-k4-f2", "[{group=2}]"),
)  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--case", action="append", choices=[c.name for c in CASES], help="repeatable; default: all")
    parser.add_argument("-o", dest="overrides", action="append", default=[], help="a change of every configuration")
    parser.add_argument("--evaluations", type=int, default=200, help="of the local search")
    parser.add_argument("--out", type=Path, default=HERE / "results")
    given = parser.parse_args()
    for case in CASES:
        if given.case is None or case.name in given.case:
            run(case, given.overrides, given.evaluations, given.out)
    rows = [json.loads(path.read_text()) for path in sorted(given.out.glob("*.json"))]
    text = table(rows)
    write_text(given.out / "table.md", text)
    if given.out == HERE / "results":
        put_between_marks(HERE / "README.md", text)
    mistakes = [f"{row['case']}, {row['order']}: {mistake}" for row in rows for mistake in row["mistakes"]]
    print("\n".join(mistakes) or f"{len(rows)} rows; every plan is valid")
    return 1 if mistakes else 0


def run(case: Case, more: list[str], evaluations: int, out: Path) -> None:
    """Plan every order of a case on its own and write the rows that are missing."""
    config = load_config(SUITE / f"{case.config}.toml", [*case.all_overrides, *more])
    posed = {key: value for key, value in config.document.items() if key not in ("planners", "output", "name")}
    definition = json_values({**posed, "evaluations": evaluations})
    built = None
    for order in ("default", *(spec.name for spec in config.micro_batch_orders)):
        path = out / f"{case.name}.{order}.json"
        if path.exists() and json.loads(path.read_text())["definition"] == definition:
            continue
        built = built or build_problem(config)
        problem = built.problem
        assert order in offered_orders(problem.workload)
        begin = time.process_time()
        inside = in_order(problem, order).problem
        proved = bound(problem, order=order)
        first, record, _ = planned(RatioSweep(), inside, proved.bound_s, (), SEED)
        seeds = (first,) if first is not None and record["valid"] else ()
        search = LocalSearch(search=replace(SearchSettings(), evaluations=evaluations))
        _, searched, _ = planned(search, inside, proved.bound_s, seeds, SEED)
        found = provenance(seed=SEED, command_line=())
        row = {
            "case": case.name,
            "order": order,
            "definition": definition,
            "footprint_bytes": keep_all_footprint_bytes(problem.workload, 0, order),
            "capacity_bytes": problem.capacity_bytes(0),
            "bound_s": proved.bound_s,
            "bound_status": str(proved.status),
            "heuristic_s": record["step_s"],
            "searched_s": searched["step_s"],
            "mistakes": [*record["mistakes"], *searched["mistakes"]],
            "cpu_s": time.process_time() - begin,
            "commit": found["git_commit"],
        }
        out.mkdir(parents=True, exist_ok=True)
        write_text(path, readable_text(json_values(row)))
        print(f"{case.name}, {order}: {record['step_s']}, {searched['step_s']} s", file=sys.stderr, flush=True)


def table(rows: list[dict]) -> str:
    """Markdown: cases, and of each its orders."""
    lines = [
        "| case | capacity | order | keep-all footprint | ratio-sweep | local-search | against default | bound |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for case in CASES:
        mine = {row["order"]: row for row in rows if row["case"] == case.name}
        default = mine.get("default")
        for order, row in sorted(mine.items(), key=lambda item: (item[0] != "default", item[0])):
            shown = [f"{row[key]:.4g} s" if row[key] else "none" for key in ("heuristic_s", "searched_s", "bound_s")]
            change = ""
            if default is not None and default is not row and row["searched_s"] and default["searched_s"]:
                change = f"{100 * (row['searched_s'] / default['searched_s'] - 1):+.1f} %"
            first = (case.words, f"{row['capacity_bytes'] / 1e9:.1f} GB") if order == "default" else ("", "")
            footprint = f"{row['footprint_bytes'] / 1e9:.1f} GB"
            lines.append("| " + " | ".join([*first, order, footprint, *shown[:2], change, shown[2]]) + " |")
    commits = sorted({row["commit"][:7] for row in rows if row["commit"]})
    seconds = sum(row["cpu_s"] for row in rows)
    return "\n".join([f"{len(rows)} rows, {seconds / 60:.0f} CPU minutes. Commits {', '.join(commits)}.", "", *lines])


if __name__ == "__main__":
    sys.exit(main())
