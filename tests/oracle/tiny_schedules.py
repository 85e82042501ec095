"""Random valid schedules of a few dozen instructions: decoded steps, steps with orders of links, hand-written plans."""

from __future__ import annotations

from functools import cache

import numpy as np
from random_steps import random_choice, shared_path_machine
from two_gpu_plans import VALID

from tmojax.check import check
from tmojax.problem import (
    Action,
    Collective,
    CollectiveKind,
    Kind,
    Lifetime,
    LinkPolicy,
    LinkPolicyKind,
    Op,
    Phase,
    Problem,
    Program,
    Schedule,
    Tensor,
    TensorKind,
    Workload,
    keep_all_footprint_bytes,
    validate_problem,
)
from tmojax.problem.step_view import view_step
from tmojax.relax.coordinate import Coordination, assemble
from tmojax.relax.decisions import DeviceDecision
from tmojax.relax.decode import DoesNotFit, decode


def tiny_problem(rng: np.random.Generator) -> Problem:
    """A step of one to three layers on one or two GPUs, in the shape of `random_steps.random_problem`."""
    gpus, micro_batches = int(rng.choice([1, 1, 1, 2])), int(rng.choice([1, 1, 2]))
    depth = int(rng.integers(1, 4 - max(gpus, micro_batches) + 1))
    tensors = [Tensor("batch", int(rng.integers(1, 9)), TensorKind.INPUT)]
    ops: list[Op] = []

    def tensor(name: str, kind: TensorKind, lifetime: Lifetime = Lifetime.MICRO_BATCH) -> int:
        tensors.append(Tensor(name, int(rng.integers(1, 40)), kind, lifetime))
        return len(tensors) - 1

    weights = [tensor(f"w{i}", TensorKind.WEIGHT, Lifetime.STATE) for i in range(depth)]
    moments = [tensor(f"m{i}", TensorKind.OPTIMIZER_STATE, Lifetime.STATE) for i in range(depth)]
    value, saved = 0, []
    for i in range(depth):
        made = tensor(f"a{i}", TensorKind.ACTIVATION)
        ops.append(Op(f"f{i}", Phase.FORWARD, 0.1, (value, weights[i]), (made,), recomputable=bool(rng.random() < 0.9),
                      workspace_bytes=int(rng.integers(0, 10))))  # fmt: skip
        value = made
        saved.append(made)
    upstream, gradients = value, []
    for i in reversed(range(depth)):
        backed = tensor(f"g{i}", TensorKind.GRADIENT)
        reads = tuple(sorted({saved[i], upstream, weights[i]}))
        if micro_batches > 1:
            gradient = tensor(f"dw{i}", TensorKind.GRADIENT, Lifetime.STATE)
            ops.append(Op(f"b{i}", Phase.BACKWARD, 0.1, reads, (backed,), (gradient,), recomputable=False))
        else:
            gradient = tensor(f"dw{i}", TensorKind.GRADIENT)
            ops.append(Op(f"b{i}", Phase.BACKWARD, 0.1, reads, (backed, gradient)))
        upstream = backed
        gradients.append((i, gradient))
    if gpus > 1:
        ops.append(Op("sync", Phase.COLLECTIVE, 0.0, updates=(gradients[0][1],), recomputable=False, step_op=True,
                      collective="sync", workspace_bytes=int(rng.integers(0, 5))))  # fmt: skip
    for i, gradient in reversed(gradients):
        reads, resets = ((), (gradient,)) if micro_batches > 1 else ((gradient,), ())
        ops.append(Op(f"u{i}", Phase.OPTIMIZER, 0.1, reads, (), (weights[i], moments[i], *resets),
                      recomputable=False, step_op=True))  # fmt: skip
    program = Program("tiny", tuple(tensors), tuple(ops))
    collectives = (Collective("sync", CollectiveKind.ALL_REDUCE, 10, tuple(range(gpus))),) if gpus > 1 else ()
    workload = Workload("tiny", (program,), (0,) * gpus, micro_batches, "synthetic", collectives)
    capacity = max(1, int(keep_all_footprint_bytes(workload, 0) / rng.choice([0.9, 1.0, 1.2, 1.5, 2.0])))
    box = shared_path_machine(gpus, capacity)
    result = Problem("tiny", workload, box, frozenset((Action.OFFLOAD, Action.RECOMPUTE)))
    validate_problem(result)
    return result


def decoded(rng: np.random.Generator) -> tuple[Problem, Schedule] | None:
    """A random step, decoded from random decisions; None when they do not fit."""
    step = tiny_problem(rng)
    lists = []
    for device in range(step.workload.device_count):
        view = view_step(step, device)
        rests = [[0, 2], [0, 1, 2]]
        state_out = np.array([rng.choice(rests[int(resting)]) for resting in view.state_resting], np.int8)
        decision = DeviceDecision(random_choice(view, rng), state_out)
        found = decode(step, view, decision, release_at_once=bool(rng.random() < 0.5))
        if isinstance(found, DoesNotFit):
            return None
        lists.append(found)
    shares = (0.0, *rng.choice([0.0, 0.1], len(lists) - 1).tolist())
    schedule = assemble(step, lists, Coordination(shares))
    return step, with_orders(step, schedule, rng) if rng.random() < 0.2 else schedule


def with_orders(step: Problem, schedule: Schedule, rng: np.random.Generator) -> Schedule:
    """The schedule with one transfer at a time (or two) over every link, in an order that the lists allow."""
    transfers: list[list[tuple[int, int]]] = []
    for device, rows in enumerate(schedule.lists):
        moves = np.isin(rows["kind"], (int(Kind.OFFLOAD), int(Kind.PREFETCH)))
        transfers.append([(device, index) for index in np.flatnonzero(moves).tolist()])
    order = []
    while any(transfers):  # a random merge of the lists
        queue = transfers[int(rng.choice([n for n, q in enumerate(transfers) if q]))]
        order.append(queue.pop(0))
    policies = []
    for link in range(len(step.machine.links)):
        users = []
        for device, index in order:
            row = schedule.lists[device][index]
            if link in step.machine.route(int(row["memory"]), int(row["to_memory"])).links:
                users.append((device, index))
        slots = int(rng.integers(1, 3))
        policies.append(LinkPolicy(LinkPolicyKind.ORDER, slots, sequence=tuple(users)))
    return Schedule(schedule.lists, schedule.initial, tuple(policies), schedule.order)


@cache
def hand_written() -> tuple[tuple[Problem, Schedule], ...]:
    """Encoded and sliced copies, loans, copies that two GPUs use, collectives."""
    return tuple((plan.problem, plan.schedule()) for plan in VALID.values())


def valid_schedule(rng: np.random.Generator) -> tuple[Problem, Schedule]:
    """A random valid schedule with its problem."""
    while True:
        if rng.random() < 0.35:
            plans = hand_written()
            return plans[int(rng.integers(len(plans)))]
        found = decoded(rng)
        if found is not None and check(*found).valid:
            return found
