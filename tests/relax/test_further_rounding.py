"""Fractions of six choices become allowed decisions, with the encoded bytes of what stays encoded counted."""

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
from further_steps import HALF, further_problem
from hypothesis import given, settings
from hypothesis import strategies as st

sys.path.append(str(Path(__file__).parents[1] / "cost"))

from periodic_cases import transformer_problem

from tmojax.planners.gradient import made_to_fit
from tmojax.planners.workbench import Workbench
from tmojax.problem.step_view import view_step
from tmojax.relax.decisions import CODED, Choice, DeviceDecision
from tmojax.relax.decode import DoesNotFit
from tmojax.relax.rounding import THRESHOLDS, resident_bytes, round_device
from tmojax.relax.template import build_template

PROBLEM = further_problem(5, 1.2)
VIEW = view_step(PROBLEM, 0)
COUNT = len(VIEW.tensor)
WAYS = np.isin(np.arange(6), (Choice.OFFLOAD, Choice.PEER, *CODED))
ALLOWED = np.where(WAYS, VIEW.may_offload[:, None], True)
ALLOWED[:, Choice.RECOMPUTE] = VIEW.may_recompute | ~VIEW.needed
TRANSFORMER = transformer_problem(3, 1, 2, 1.5, ("recompute", "compress"))
TRANSFORMER = replace(TRANSFORMER, machine=replace(TRANSFORMER.machine, codecs=(HALF,)))
PLAIN_VIEW = view_step(TRANSFORMER, 0)


@given(seed=st.integers(0, 10_000), thresholds=st.sampled_from(THRESHOLDS))
@settings(deadline=None, max_examples=60)
def test_roundings_are_allowed_and_go_where_most_goes(seed, thresholds):
    soft = np.random.default_rng(seed).dirichlet((0.5,) * 6, COUNT) * ALLOWED
    room = np.full(len(VIEW.slot_s), VIEW.keep_bytes.max() / 1.2)
    decision = round_device(VIEW, soft, ALLOWED, room, np.zeros(len(VIEW.state_tensor), np.int8), thresholds, 0.5)
    assert ALLOWED[np.arange(COUNT), decision.choice].all()
    gone = np.flatnonzero(WAYS[decision.choice])
    np.testing.assert_array_equal(soft[gone][:, WAYS].max(axis=1), soft[gone, decision.choice[gone]])


@given(seed=st.integers(0, 10_000))
@settings(deadline=None, max_examples=40)
def test_resident_bytes_agree_with_the_decode(seed):
    view = PLAIN_VIEW
    rng = np.random.default_rng(seed)
    options = np.zeros((len(view.tensor), 6), bool)
    options[:, Choice.KEEP] = True
    options[:, Choice.RECOMPUTE] = view.may_recompute | ~view.needed
    options[:, Choice.COMPRESS] = view.may_offload & view.needed
    choice = np.array([rng.choice(np.flatnonzero(row)) for row in options], np.int8)
    template = build_template(TRANSFORMER, view, DeviceDecision(choice, np.zeros(0, np.int8)))
    change = np.zeros(len(template.runs) + 1)
    np.add.at(change, template.life_start, template.life_bytes)
    np.add.at(change, template.life_end + 1, -template.life_bytes)
    exact = np.cumsum(change)[template.first_run[view.slot_op]]
    np.testing.assert_allclose(resident_bytes(view, choice, 0.5), exact, atol=len(choice))


def test_lenders_are_repaired_with_what_they_have_left():
    """Where borrowing does not fit into the lender at first, the lender sends its own tensors away."""
    fitted = 0
    for seed in range(30):
        bench = Workbench(further_problem(seed, 1.25))
        if bench.device_count < 2:
            continue
        decisions = []
        for device in range(bench.device_count):
            view = bench.view(device)
            wanted = Choice.PEER if device % 2 == 0 else Choice.KEEP
            choice = np.where(view.needed, np.where(view.may_offload, wanted, Choice.KEEP), Choice.RECOMPUTE)
            lender = 1 if device % 2 == 0 else -1
            decisions.append(
                DeviceDecision(choice.astype(np.int8), np.zeros(len(view.state_tensor), np.int8), lender=lender)
            )
        if not isinstance(bench.lists(tuple(decisions)), DoesNotFit):
            continue
        fitted += not isinstance(bench.lists(made_to_fit(bench, tuple(decisions), None)), DoesNotFit)
    assert fitted >= 1
