"""Tensors in the memory of a peer, and encoded ones: every list that decodes is valid and does not deadlock."""

import numpy as np
import pytest
from further_steps import further_problem, random_decision

from tmojax.check import check
from tmojax.planners.workbench import Workbench
from tmojax.problem import Kind, LinkPolicyKind
from tmojax.relax.coordinate import Coordination
from tmojax.relax.decode import DoesNotFit


def random_plan(seed: int, factor: float):
    """(bench, decisions): GPUs with even numbers borrow from GPU 1."""
    bench = Workbench(further_problem(seed, factor))
    rng = np.random.default_rng(seed)
    count = bench.device_count
    lenders = [1 if device % 2 == 0 and count > 1 else -1 for device in range(count)]
    decisions = tuple(random_decision(bench.view(d), rng, lenders[d], int(rng.integers(2))) for d in range(count))
    return bench, decisions


@pytest.mark.parametrize("factor", [0.8, 1.0, 1.2, 1.4])
def test_decoded_plans_are_valid_and_do_not_deadlock(factor):
    seen = {kind: 0 for kind in (Kind.LEND, Kind.ENCODE, Kind.DECODE)}
    decoded = 0
    for seed in range(25):
        bench, decisions = random_plan(seed, factor)
        count = bench.device_count
        for coordination in (
            Coordination((0.0,) * count),
            Coordination(tuple(0.3 * g for g in range(count)), LinkPolicyKind.FCFS),
            Coordination((0.0,) * count, LinkPolicyKind.ORDER),
        ):
            found = bench.evaluate(decisions, coordination)
            if isinstance(found, DoesNotFit):
                assert found.bytes_over > 0
                break
            lends = any((rows["kind"] == Kind.LEND).any() for rows in found.schedule.lists)
            if coordination.policy is LinkPolicyKind.ORDER and lends:
                assert found.step_s == float("inf")
                continue
            report = check(bench.problem, found.schedule)
            assert report.valid, (seed, [v.message for v in report.violations[:3]])
            assert found.step_s < float("inf"), seed
        else:
            decoded += 1
            for kind in seen:
                seen[kind] += sum(int((rows["kind"] == kind).any()) for rows in found.schedule.lists)
    assert decoded >= 4 and (factor < 1.2 or min(seen.values()) > 0), (decoded, seen)
