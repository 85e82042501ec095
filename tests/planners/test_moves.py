"""Neighbours keep to what a problem allows, and a search asks for none of them twice."""

import numpy as np
import pytest
from planner_cases import cases, transformer

from tmojax.planners.gradient import find_starts
from tmojax.planners.local_search import PROPOSALS, SearchSettings, local_search
from tmojax.planners.moves import Moves
from tmojax.planners.simple import offload_everything
from tmojax.planners.workbench import Workbench
from tmojax.problem import Action
from tmojax.relax.coordinate import together
from tmojax.relax.decisions import Choice, keep_everything
from tmojax.relax.decode import DoesNotFit
from tmojax.simulate import simulate

CASES = cases()


@pytest.mark.parametrize("case", sorted(CASES))
def test_neighbours_keep_to_what_is_allowed(case):
    bench = Workbench(CASES[case])
    current = find_starts(bench, ())[0].candidate
    moves = Moves(bench, np.random.default_rng(0))
    kinds = set()
    for _ in range(150):
        move = moves.propose(current)
        kinds.add(move.kind)
        for device, decision in enumerate(move.decisions):
            view = bench.view(device)
            for choice in (decision.choice, decision.in_first, decision.in_last):
                assert view.may_recompute[choice == Choice.RECOMPUTE].all()
                assert view.may_offload[choice > Choice.RECOMPUTE].all()
                assert Action.OFFLOAD in bench.problem.actions or not (choice == Choice.OFFLOAD).any()
        found = bench.evaluate(move.decisions, move.coordination, move.lookahead_runs)
        if not isinstance(found, DoesNotFit) and found.step_s < float("inf"):
            current = found
    assert kinds == set(moves.weight)


def test_what_waits_is_changed():
    """One GPU sends everything away and waits for it, the others keep everything."""
    problem = transformer("prototype-4gpu-12.5", factor=0.9)
    bench = Workbench(problem)
    decisions = [keep_everything(bench.view(device)) for device in range(4)]
    decisions[2] = offload_everything(bench.view(2))
    start = bench.evaluate(tuple(decisions), together(problem), (1,) * 4, release_at_once=True)
    stall_s = simulate(problem, start.schedule).stall_s
    assert stall_s[2] > 0 and stall_s.sum() == stall_s[2]
    moves = Moves(bench, np.random.default_rng(0))
    changed = {"wait": set(), "one": set()}
    for _ in range(400):
        move = moves.propose(start)
        for device, (before, after) in enumerate(zip(start.decisions, move.decisions, strict=True)):
            if move.kind in changed and not before.same_as(after):
                changed[move.kind].add(device)
    assert changed == {"wait": {2}, "one": {0, 1, 2, 3}}


@pytest.mark.parametrize("case", sorted(CASES))
def test_a_search_evaluates_nothing_twice_and_counts_simulations(case, monkeypatch):
    bench = Workbench(CASES[case])
    start = find_starts(bench, ())[0].candidate
    asked = [(tuple(one.key for one in start.decisions), start.coordination)]
    evaluate, simulations = bench.evaluate, bench.simulations

    def watched(decisions, coordination, lookahead_runs):
        asked.append((tuple(one.key for one in decisions), coordination, lookahead_runs))
        return evaluate(decisions, coordination, lookahead_runs)

    monkeypatch.setattr(bench, "evaluate", watched)
    _, log = local_search(bench, start, SearchSettings(evaluations=60), 1)
    assert len(set(asked)) == len(asked) <= 1 + PROPOSALS * 60
    assert log.evaluations == bench.simulations - simulations <= 60
