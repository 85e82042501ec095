"""Rounded decisions are allowed, fit as far as they can, and come in a fixed order without repetitions."""

import sys
from pathlib import Path

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

sys.path.append(str(Path(__file__).parents[1] / "cost"))

from periodic_cases import transformer_problem, views_of

from tmojax.relax.decisions import Choice, DeviceDecision
from tmojax.relax.periodic import Descent, optimise, relax_problem
from tmojax.relax.rounding import THRESHOLDS, resident_bytes, round_device, round_solution, wanted_from
from tmojax.relax.template import build_template

PROBLEM = transformer_problem(3, 2, 2, 1.5, ("offload", "recompute"))
VIEWS = views_of(PROBLEM)
VIEW = VIEWS[0]
COUNT = len(VIEW.size_bytes)
ALLOWED = np.stack([np.ones(COUNT, bool), VIEW.may_offload, VIEW.may_recompute | ~VIEW.needed], axis=1)


@given(seed=st.integers(0, 10_000), thresholds=st.sampled_from(THRESHOLDS), factor=st.floats(1.0, 4.0))
@settings(deadline=None, max_examples=60)
def test_roundings_are_allowed_and_fit_if_anything_does(seed, thresholds, factor):
    soft = np.random.default_rng(seed).dirichlet((0.5, 0.5, 0.5), COUNT)
    capacity = VIEW.keep_bytes.max() / factor
    at_home, everywhere = np.zeros(len(VIEW.state_tensor), np.int8), np.full(len(VIEW.slot_s), capacity)
    decision = round_device(VIEW, soft, ALLOWED, everywhere, at_home, thresholds)
    assert ALLOWED[np.arange(COUNT), decision.choice].all()
    least = resident_bytes(VIEW, np.where(VIEW.may_offload, Choice.OFFLOAD, Choice.KEEP)).max()
    most = resident_bytes(VIEW, decision.choice).max()
    # Recompute chains can need more than a decision without them; without any, whatever fits is found.
    if not (decision.choice == Choice.RECOMPUTE).any():
        assert most <= max(capacity, least)
    twice = round_device(VIEW, soft, ALLOWED, everywhere, at_home, thresholds)
    assert decision.same_as(twice)


@given(seed=st.integers(0, 10_000))
@settings(deadline=None, max_examples=40)
def test_resident_bytes_and_wishes_agree_with_the_decode(seed):
    rng = np.random.default_rng(seed)
    choice = np.array([rng.choice(np.flatnonzero(row)) for row in ALLOWED], np.int8)
    template = build_template(PROBLEM, VIEW, DeviceDecision(choice, np.zeros(0, np.int8)))
    sizes = np.array([tensor.size_bytes for tensor in PROBLEM.workload.program(0).tensors])
    change = np.zeros(len(template.runs) + 1)
    np.add.at(change, template.life_start, sizes[template.life_tensor])
    np.add.at(change, template.life_end + 1, -sizes[template.life_tensor])
    profile = np.cumsum(change)
    first = template.first_run[VIEW.slot_op]
    np.testing.assert_allclose(resident_bytes(VIEW, choice), profile[first])
    wanted = wanted_from(VIEW, choice)
    for tensor, back in zip(template.gap_tensor, template.gap_to, strict=True):
        index = int(np.flatnonzero(VIEW.tensor == tensor)[0])
        assert wanted[index] == int(np.searchsorted(first, back))


def test_roundings_of_a_solution_are_distinct_and_repeatable():
    model = relax_problem(PROBLEM, VIEWS, most_slots=60)
    solution = optimise(model, restarts=2, steps=60, settings=Descent(bins=24))
    found = round_solution(model, solution, VIEWS, most=12)
    assert 2 <= len(found) <= 12
    keys = {(*(decision.key for decision in decisions), starts) for decisions, starts in found}
    assert len(keys) == len(found)
    again = round_solution(model, solution, VIEWS, most=12)
    for (first, starts), (second, other) in zip(found, again, strict=True):
        assert starts == other and starts[0] == 0.0 and min(starts) >= 0.0
        assert all(a.same_as(b) for a, b in zip(first, second, strict=True))
    assert any(decisions[0].same_as(decisions[1]) for decisions, _ in found)
    assert len(round_solution(model, solution, VIEWS, most=3)) == 3
