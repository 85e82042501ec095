"""The checker against an oracle that plays every order of events, on random short schedules, valid and broken."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from agreement import verdict
from entangled import entangled, with_aliases
from exploring import explore
from faults import broken
from plan_text import Plan
from small_plans import with_memory
from test_mutations import ALL
from tiny_schedules import valid_schedule, with_orders
from two_gpu_plans import LOAN, READER, STAGED, VALID

from tmojax.check import Rule, check
from tmojax.problem import Problem, Schedule


def random_case(seed: int) -> tuple[str, Problem, Schedule]:
    """(names of its faults, problem, schedule): decoded and hand-written ones, most broken, and entangled lists."""
    rng = np.random.default_rng(seed)
    names, entwined = [], rng.random() < 0.5
    found = entangled(rng) if entwined else None
    problem, schedule = found or valid_schedule(rng)
    if rng.random() < (0.3 if entwined else 0.7):
        name, (problem, schedule) = broken(rng, problem, schedule)
        names.append(name)
    if rng.random() < 0.2:
        problem = with_aliases(rng, problem) or problem
    if rng.random() < 0.15 and not schedule.link_policies and "no route" not in explore(problem, schedule, 1).fault:
        schedule = with_orders(problem, schedule, rng)
    return " and ".join(names), problem, schedule


def agree(seeds: range) -> tuple[Counter[str], Counter[str]]:
    """How many cases there were per verdict, and per fault that was tried."""
    verdicts: Counter[str] = Counter()
    faults: Counter[str] = Counter()
    for seed in seeds:
        name, problem, schedule = random_case(seed)
        try:
            verdicts[verdict(problem, schedule)] += 1
        except AssertionError as error:
            raise AssertionError(f"seed {seed} ({name or 'as generated'}): {error}") from error
        faults[name] += 1
    return verdicts, faults


def test_checker_and_oracle_agree():
    verdicts, faults = agree(range(600))
    assert verdicts["valid"] > 100 and verdicts["invalid"] > 300, verdicts
    assert verdicts["undecided"] + verdicts["valid so far"] < 20, verdicts
    assert len(faults) > 50, faults


@pytest.mark.long
@pytest.mark.timeout(3600)  # two minutes of one core; on shared ones much more
def test_checker_and_oracle_agree_on_many_schedules():
    verdicts, faults = agree(range(1000, 21_400))
    assert sum(verdicts.values()) - verdicts["form"] >= 20_000
    assert verdicts["valid"] > 3_000 and verdicts["invalid"] > 10_000, verdicts
    assert verdicts["undecided"] + verdicts["valid so far"] < 400, verdicts
    assert len(faults) > 90, faults


@pytest.mark.parametrize("name", VALID)
def test_nothing_goes_wrong_with_plans_that_are_right(name):
    plan = VALID[name]
    outcome = explore(plan.problem, plan.schedule(), 100_000)
    assert not outcome.fault and outcome.complete, outcome


@pytest.mark.parametrize("name", ALL)
def test_something_goes_wrong_with_every_changed_plan(name):
    plan, _ = ALL[name]
    assert explore(plan.problem, plan.schedule(), 100_000).fault


FAULTS = {
    "missing data": READER.replace("offload w gpu1 host owner=gpu0 part=0/2", device=1)
    .replace("release w host owner=gpu0 part=0/2", device=1)
    .replace("prefetch w host gpu1 owner=gpu0", "prefetch b host gpu1 owner=gpu0", device=1)
    .replace("here: release w gpu1 owner=gpu0", "here: release b gpu1 owner=gpu0", device=1),
    "read copy becomes stale": READER.replace("wait 1 compute"),
    "more borrowed than lent": LOAN.replace("lend 400 gpu0 7", "lend 399 gpu0 7", device=1),
    "stuck": STAGED.replace("signal 2 early"),
    "memory full": with_memory(LOAN, "gpu1", capacity_bytes=2099),
}


@pytest.mark.parametrize("name", FAULTS)
def test_the_oracle_names_what_goes_wrong(name):
    plan = FAULTS[name]
    assert explore(plan.problem, plan.schedule(), 100_000).fault == name


def shared_storage(plan: Plan, *names: str) -> Plan:
    """The plan with some tensors in one alias group."""
    workload = plan.problem.workload
    program = workload.programs[0]
    tensors = tuple(replace(t, alias_group="one" if t.name in names else "") for t in program.tensors)
    workload = replace(workload, programs=(replace(program, tensors=tensors),))
    return replace(plan, problem=replace(plan.problem, workload=workload))


def test_a_write_of_an_alias_must_not_meet_a_read_by_another_list():
    """gpu1 reads `w` in gpu0's memory while gpu0 may write `b`, which lies in the same storage."""
    plan = READER.replace("prefetch w host gpu1 owner=gpu0", "prefetch w gpu0 gpu1 owner=gpu0", device=1)
    assert check(plan.problem, plan.schedule()).valid
    shared = shared_storage(plan, "w", "b")
    rules = {violation.rule for violation in check(shared.problem, shared.schedule()).violations}
    assert rules == {Rule.CROSS_LIST_RACE}
    assert explore(shared.problem, shared.schedule()).fault == "copy in use is overwritten"
