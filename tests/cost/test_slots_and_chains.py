"""Merged slots are on the safe side; recompute chains say who is wanted when."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from periodic_cases import transformer_problem, views_of

from tmojax.cost.chains import can_be_dropped, find_chains
from tmojax.cost.slots import merge_slots

VIEW = views_of(transformer_problem(3, 1, 2, 1.5, ("offload", "recompute")))[0]


@given(most=st.integers(4, 80))
@settings(deadline=None, max_examples=30)
def test_merging_keeps_time_and_never_hides_memory(most):
    slots = merge_slots(VIEW, most)
    assert len(slots.slot_s) == min(most, len(VIEW.slot_s))
    assert slots.slot_s.sum() == pytest.approx(VIEW.slot_s.sum())
    assert (np.diff(slots.group) >= 0).all() and slots.group[-1] == len(slots.slot_s) - 1
    assert slots.group[VIEW.forward_end - 1] < slots.group[VIEW.forward_end]
    for place in range(len(slots.slot_s)):
        inside = slots.group == place
        assert slots.base_bytes[place] >= VIEW.base_bytes[inside].max()
    # With everything kept, the merged profile is at least the fine one.
    idle = (np.arange(len(slots.slot_s))[:, None] > slots.idle_from) & (
        np.arange(len(slots.slot_s))[:, None] < slots.idle_to
    )
    kept = slots.base_bytes + idle @ (VIEW.size_bytes * VIEW.needed)
    assert (kept[slots.group] >= VIEW.keep_bytes).all()


def test_without_merging_slots_are_those_of_the_view():
    slots = merge_slots(VIEW, 10_000)
    assert (slots.group == np.arange(len(VIEW.slot_s))).all()
    assert (slots.base_bytes == VIEW.base_bytes).all()


def test_paths_lead_to_tensors_wanted_earlier():
    slots = merge_slots(VIEW, 10_000)
    possible = can_be_dropped(VIEW)
    chains = find_chains(VIEW, slots, possible)
    assert len(chains.owner) and (np.diff(chains.length) >= 0).all()
    for owner, slot, length, first, rest in zip(
        chains.owner, chains.slot, chains.length, chains.first, chains.rest, strict=True
    ):
        assert owner in VIEW.recompute_inputs[first] and possible[first]
        assert slot < slots.idle_to[owner] or not VIEW.needed[owner]
        assert (rest == -1) == (length == 1)
        if rest >= 0:
            assert chains.owner[rest] == first and chains.slot[rest] == slot and chains.length[rest] == length - 1


def test_long_chains_are_cut_between_layers():
    view = views_of(transformer_problem(12, 1, 2, 1.5, ("recompute",)))[0]
    anchors = view.may_recompute & ~can_be_dropped(view)
    assert 0 < anchors.sum() <= 12  # at most one tensor in a layer of eight
