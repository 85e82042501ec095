"""Bytes at every position as the checker counts them: an independent reading of a list."""

from tmojax.check.graph import Graph
from tmojax.check.rules import Findings
from tmojax.check.shared import SharedLog
from tmojax.check.static import Static
from tmojax.check.walk import ListWalk


def checker_bytes(problem, schedule, device) -> list[dict[int, int]]:
    """Per memory {position that allocates: bytes}, -1 for the start."""
    static, findings = Static(problem), Findings()
    graph = Graph([len(rows) for rows in schedule.lists])
    walk = ListWalk(
        static, device, schedule.lists[device], schedule.initial[device], graph, SharedLog(static, schedule), findings,
        problem.workload.sequence(device, schedule.order),
    )  # fmt: skip
    walk.run()
    assert not findings.violations
    found = [{-1: size} for size in walk.initial_bytes]
    live = [0] * len(found)
    frees: list[tuple[int, int, int]] = []
    for position, memory, _, size in walk.state.ledger.log:
        # What a position frees is still there at that position.
        for _, place, freed in [f for f in frees if f[0] < position]:
            live[place] += freed
        frees = [f for f in frees if f[0] >= position]
        if size <= 0:
            frees.append((position, memory, size))
        else:
            live[memory] += size
            found[memory][position] = live[memory]
    return found
