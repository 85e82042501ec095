"""Find the optima of the library again:  python tests/tiny_instances/recompute.py [--check N | --count N]

Without an option, every instance of optima.json is solved again and compared. `--check N` does so for every N-th.
`--count N` makes a new library of N instances: random arguments in turn, those kept whose search ends within its limits
and that keeping everything does not solve.
"""

import argparse
import itertools
import json
import random
import sys
import time
from pathlib import Path

from tiny_generator import PATHS, tiny_instance

from tmojax.planners.base import Status
from tmojax.planners.exhaustive import Exhaustive
from tmojax.problem.io import problem_hash

LIBRARY = Path(__file__).parent / "optima.json"
OFFLOAD, BOTH = ["offload"], ["offload", "recompute"]


def search() -> Exhaustive:
    return Exhaustive(most_partial=25_000, most_simulations=8_000)


# (gpus, micro-batches, layers, actions, state, collective), the first ones more often
SHAPES = [
    (2, 1, 3, BOTH, False, False), (1, 2, 2, BOTH, False, False), (2, 1, 3, OFFLOAD, False, False),
    (1, 2, 3, OFFLOAD, False, False), (2, 2, 2, BOTH, False, False), (1, 1, 4, BOTH, False, False),
    (2, 1, 3, BOTH, False, False), (1, 1, 2, BOTH, True, False), (2, 1, 2, BOTH, False, True),
    (1, 1, 3, BOTH, False, False), (2, 2, 2, OFFLOAD, False, False), (2, 1, 2, OFFLOAD, True, False),
    (1, 2, 2, OFFLOAD, True, False), (2, 1, 2, BOTH, True, False),
]  # fmt: skip


def arguments():
    """Arguments of `tiny_instance` for ever: every combination in turn, with other random numbers each time."""
    rng = random.Random(0)
    for number in itertools.count():
        gpus, micro_batches, layers, actions, state, collective = SHAPES[number % len(SHAPES)]
        paths = PATHS if gpus == 2 else ("shared", "half", "lanes", "two-level-half")
        yield dict(seed=number, gpus=gpus, micro_batches=micro_batches, layers=layers, actions=actions,
                   path=paths[number // len(SHAPES) % len(paths)], state=state, collective=collective,
                   latency=rng.random() < 0.3, squeeze=rng.choice([0.5, 0.7, 0.9, 1.0]))  # fmt: skip


def make(count: int) -> list[dict]:
    found: list[dict] = []
    for given in arguments():
        problem = tiny_instance(**given)
        begin = time.perf_counter()
        result = search().plan(problem)
        kept = result.status is Status.OPTIMAL and result.step_s > _compute_s(problem) * (1 + 1e-9)
        if kept:
            found.append({"arguments": given, "optimum_s": result.step_s, "bound_s": result.details["bound_s"],
                          "problem_sha256": problem_hash(problem)})  # fmt: skip
        took_s = time.perf_counter() - begin
        print(f"{len(found)}: seed {given['seed']} {result.status.name} {took_s:.1f} s", file=sys.stderr)
        if len(found) >= count:
            return found
    return found


def _compute_s(problem) -> float:
    from tmojax.bounds import bound

    return next(part.step_s for part in bound(problem).parts if part.name == "compute")


def read() -> list[dict]:
    return json.loads(LIBRARY.read_text())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, help="make a new library of so many instances")
    parser.add_argument("--check", type=int, default=1, help="solve every N-th instance again")
    options = parser.parse_args()
    if options.count:
        lines = ",\n".join(json.dumps(item) for item in make(options.count))
        LIBRARY.write_text(f"[\n{lines}\n]\n")
        return 0
    wrong = 0
    for item in read()[:: options.check]:
        problem = tiny_instance(**item["arguments"])
        result = search().plan(problem)
        same = problem_hash(problem) == item["problem_sha256"] and result.status is Status.OPTIMAL
        if not same or abs(result.step_s / item["optimum_s"] - 1) > 1e-9:
            wrong += 1
            print(f"{item['arguments']}: {result.status} {result.step_s}, the library has {item['optimum_s']}")
    print(f"{wrong} differ")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
