"""How often each planner attains the optimum:  python tests/tiny_instances/table.py [--every N] [KIND ...]

Planners run with the little effort that tests give them (`planner_cases.light`). Needs tests/planners and tests/relax
on the module path, as pytest puts them.
"""

import argparse
import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1] / name) for name in ("planners", "relax")]

from planner_cases import light  # noqa: E402
from recompute import read  # noqa: E402
from tiny_generator import tiny_instance  # noqa: E402

from tmojax.check import check  # noqa: E402
from tmojax.planners.registry import PLANNERS  # noqa: E402

KINDS = [kind for kind in PLANNERS if kind != "exhaustive"]  # which made the library


def ratio(kind: str, item: dict) -> float:
    """Plan of a planner over the optimum, inf without one. AssertionError: it is invalid, or faster."""
    problem = tiny_instance(**item["arguments"])
    result = light(kind).plan(problem, seed=1)
    if result.schedule is None:
        return float("inf")
    report = check(problem, result.schedule)
    assert report.valid, (kind, item["arguments"], report.text())
    found = result.step_s / item["optimum_s"]
    assert found >= 1 - 1e-9, (kind, item["arguments"], found)
    return found


def table(items: list[dict], kinds: list[str]) -> list[str]:
    """Lines of text, planners in the order given."""
    heads = ("planner", f"has a plan, of {len(items)}", "attains the optimum", "median", "worst")
    lines = ["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
    for kind in kinds:
        ratios = sorted(ratio(kind, item) for item in items)
        plans = [value for value in ratios if value < float("inf")]
        attained = sum(value <= 1 + 1e-9 for value in plans)
        middle, worst = (plans[len(plans) // 2], plans[-1]) if plans else (float("nan"), float("nan"))
        lines.append(f"| {kind} | {len(plans)} | {attained} | {middle:.3f} | {worst:.3f} |")
        print(lines[-1], file=sys.stderr, flush=True)
    return lines


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--every", type=int, default=1, help="only every N-th instance")
    parser.add_argument("kinds", nargs="*", default=KINDS)
    options = parser.parse_args()
    print("\n".join(table(read()[:: options.every], options.kinds)))
