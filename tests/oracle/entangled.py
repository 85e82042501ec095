"""Random two-GPU schedules whose lists use each other's copies and memory, with signals and waits at random places.

Unlike `tiny_schedules` nothing is made valid on purpose: some are, most are not, and the difference is one signal.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from plan_text import Plan
from small_plans import KEEP, RECOMPUTE, SWAP, layer
from two_gpu_plans import REDUCE

from tmojax.errors import InputError
from tmojax.problem import Problem, Schedule, validate_problem

STREAMS = ("compute", "comm", "out0", "in0", "out1", "in1")


def _insert(rng: np.random.Generator, lines: list[str], *new: str, first: int = 0) -> list[int]:
    """Put lines at random places behind each other; returns their places."""
    places = []
    for line in new:
        first = int(rng.integers(first, len(lines) + 1))
        lines.insert(first, line)
        places.append(first)
        first += 1
    return places


def _link(rng: np.random.Generator, lists: list[list[str]], event: int, giver: int, before: int, after: int) -> None:
    """A signal of one list behind line `before` and a wait of the other ahead of its line `after`."""
    label = f"e{event}"
    lines = lists[giver]
    if ": " in lines[before]:
        label = lines[before].partition(": ")[0]
    else:
        lines[before] = f"{label}: {lines[before]}"
    lines.insert(before + 1, f"signal {event} {label}")
    stream = str(rng.choice(STREAMS)) if rng.random() < 0.3 else _stream_of(lists[1 - giver][after], 1 - giver)
    lists[1 - giver].insert(after, f"wait {event} {stream}")


def _stream_of(line: str, device: int) -> str:
    text = line.partition(": ")[2] or line
    if text.startswith(("offload", "prefetch")):
        return f"{'out' if text.startswith('offload') else 'in'}{device}"
    return "compute"


def _signalled(line: str) -> bool:
    text = line.partition(": ")[2] or line
    return not text.startswith("signal")


def entangled(rng: np.random.Generator) -> tuple[Problem, Schedule] | None:
    base = (KEEP, SWAP, RECOMPUTE)
    if rng.random() < 0.2:
        lists, problem, initial = [list(text) for text in REDUCE.lines], REDUCE.problem, list(REDUCE.initial)
    else:
        chosen = [base[int(rng.integers(3))] for _ in range(2)]
        problem = layer(gpus=2)
        lists = [[line.replace("gpu0", f"gpu{d}") for line in plan.lines[0]] for d, plan in enumerate(chosen)]
        initial = [{"w": tuple(m.replace("gpu0", f"gpu{d}") for m in plan.initial[0]["w"])}
                   for d, plan in enumerate(chosen)]  # fmt: skip
    reader = int(rng.integers(2))
    owner = 1 - reader
    events = iter(range(1, 20))
    if rng.random() < 0.5:  # one list copies what the other one makes
        tensor = str(rng.choice(["w", "w", "a", "b", "g", "x"]))
        source = str(rng.choice([f"gpu{owner}", f"gpu{owner}", "host"]))
        by = f"owner=gpu{owner}"
        where = _insert(rng, lists[reader], f"prefetch {tensor} {source} gpu{reader} {by}",
                        f"release {tensor} gpu{reader} {by}")  # fmt: skip
        if rng.random() < 0.3:
            lists[reader].insert(where[1], f"offload {tensor} gpu{reader} host {by} part=0/2")
            where = [where[0], where[1], where[1] + 1]
            lists[reader].append(f"release {tensor} host {by} part=0/2")
        if rng.random() < 0.8:  # what is read is there
            give = int(rng.integers(len(lists[owner])))
            if _signalled(lists[owner][give]):
                _link(rng, lists, next(events), owner, give, where[0])
                where = [place + 1 for place in where]
        if rng.random() < 0.8:  # and stays until it has been read
            target = int(rng.integers(len(lists[owner])))
            give = int(rng.choice([where[0], where[-1]]))
            _link(rng, lists, next(events), reader, give, target)
        if tensor == "w" and source == "host" and rng.random() < 0.7:
            initial[owner] = {"w": tuple(sorted({*initial[owner]["w"], "host"}))}
    else:  # one list keeps a copy in the other one's memory
        size, tensor = (400, "a") if rng.random() < 0.6 else (300, "b")
        loans = [size] if rng.random() < 0.7 else [size // 2, size - size // 2]
        lines = lists[reader]
        there = _insert(rng, lines, f"offload {tensor} gpu{reader} gpu{owner}", f"release {tensor} gpu{owner}",
                        first=len(lines) // 3)  # fmt: skip
        for number, part in enumerate(loans):
            if rng.random() < 0.1:
                part -= 1
            places = _insert(rng, lists[owner], f"lend {part} gpu{reader} {number}", f"reclaim {number}")
            if rng.random() < 0.9:
                _link(rng, lists, next(events), reader, there[1], places[1])
            if rng.random() < 0.9:
                give = places[0] - int(rng.integers(2))
                if give >= 0 and _signalled(lists[owner][give]):
                    _link(rng, lists, next(events), owner, give, there[0])
                    there = [place + 1 for place in there]
    plan = Plan(problem, tuple(tuple(lines) for lines in lists), tuple(initial))
    try:
        return problem, plan.schedule()
    except KeyError:
        return None


def with_aliases(rng: np.random.Generator, problem: Problem) -> Problem | None:
    """The problem with some tensors in one storage; None if these tensors may not share one."""
    program = problem.workload.programs[0]
    chosen = set(rng.choice(len(program.tensors), int(rng.integers(2, 4)), replace=False).tolist())
    tensors = tuple(replace(t, alias_group="one") if n in chosen else t for n, t in enumerate(program.tensors))
    workload = replace(problem.workload, programs=(replace(program, tensors=tensors),))
    result = replace(problem, workload=workload)
    try:
        validate_problem(result)
    except InputError:
        return None
    return result
