"""In which order the stages of a pipeline compute and send.

Compute follows GPipe or 1F1B. Sends are put where a run with the given compute times and transfers that take no time
would make them; they stand in the same sequence on all stages, so no two stages wait for each other's send.
"""

from __future__ import annotations

from dataclasses import dataclass

from tmojax.errors import InputError

ORDERS = ("gpipe", "1f1b")
# Blocks without compute still follow one another.
LEAST_S = 1e-9


@dataclass(frozen=True)
class Send:
    """`tensor` of every micro-batch goes from stage `source` to stage `destination`; `forward`: forward makes it."""

    tensor: int
    source: int
    destination: int
    forward: bool


def compute_order(order: str, stage: int, stages: int, micro_batches: int) -> list[tuple[bool, int]]:
    """(is forward, micro-batch) of one stage. 1F1B: as many forwards first as stages follow, then one of each in turn.

    Raises InputError for an unknown order.
    """
    if order not in ORDERS:
        raise InputError(f"pipeline.order: {order!r} is unknown; choose one of {', '.join(ORDERS)}")
    first = micro_batches if order == "gpipe" else min(micro_batches, stages - 1 - stage)
    blocks = [(True, k) for k in range(first)]
    for k in range(micro_batches):
        if first + k < micro_batches:
            blocks.append((True, first + k))
        blocks.append((False, k))
    return blocks


def stage_orders(
    order: str, seconds: list[tuple[float, ...]], sends: list[Send], micro_batches: int
) -> list[list[tuple[bool, int] | tuple[Send, int]]]:
    """Per stage, its blocks of compute and the sends in which it joins, in list order.

    seconds [stages]: (forward, backward) of a stage and micro-batch.
    """
    stages = len(seconds)
    queues = [compute_order(order, stage, stages, micro_batches) for stage in range(stages)]
    waits_for = {
        (stage, forward): {s.source for s in sends if s.destination == stage and s.forward is forward}
        for stage in range(stages)
        for forward in (True, False)
    }
    start: dict[tuple[int, bool, int], float] = {}
    end: dict[tuple[int, bool, int], float] = {}
    done = [0] * stages
    while sum(done) < sum(map(len, queues)):
        before = sum(done)
        for stage, queue in enumerate(queues):
            while done[stage] < len(queue):
                forward, k = queue[done[stage]]
                needed = [(source, forward, k) for source in waits_for[stage, forward]]
                if done[stage]:
                    needed.append((stage, *queue[done[stage] - 1]))
                if not all(key in end for key in needed):
                    break
                key = (stage, forward, k)
                start[key] = max((end[one] for one in needed), default=0.0)
                end[key] = start[key] + max(LEAST_S, seconds[stage][0 if forward else 1])
                done[stage] += 1
        if sum(done) == before:
            raise InputError(
                "pipeline: stages need each other's results in a circle; forward must go from first to last"
            )
    # Of what happens at one moment, transfers come first: a block that starts then may need them.
    events: list[list[tuple[tuple, tuple[bool, int] | tuple[Send, int]]]] = [
        [((start[stage, forward, k], 1), (forward, k)) for forward, k in queue] for stage, queue in enumerate(queues)
    ]
    for position, send in enumerate(sends):
        for k in range(micro_batches):
            key = (end[send.source, send.forward, k], 0, k, position)
            for stage in (send.source, send.destination):
                events[stage].append((key, (send, k)))
    return [[what for _, what in sorted(some, key=lambda event: event[0])] for some in events]
