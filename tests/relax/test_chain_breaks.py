"""Chains of recomputation are broken where memory is short, and nowhere else; a recomputation that does not fit names
the op that wants it."""

import numpy as np
from hypothesis import example, given, settings
from hypothesis import strategies as st
from random_steps import random_problem

from tmojax.problem import Action, Op, Phase, Problem, Program, Tensor, TensorKind, Workload
from tmojax.problem.step_view import view_step
from tmojax.relax.chain_breaks import break_chains
from tmojax.relax.decisions import Choice, DeviceDecision
from tmojax.relax.decode import DoesNotFit, decode
from tmojax.relax.rounding import resident_bytes

LAYERS, SIZE = 6, 10


def chain() -> Problem:
    """Six layers in a row; the backward op of each reads what its forward op wrote, the last one's first."""
    tensors, ops = [Tensor("batch", 1, TensorKind.INPUT)], []
    for layer in range(LAYERS):
        tensors.append(Tensor(f"a{layer}", SIZE, TensorKind.ACTIVATION))
        ops.append(Op(f"f{layer}", Phase.FORWARD, 1.0, reads=(layer,), writes=(layer + 1,)))
    for layer in reversed(range(LAYERS)):
        tensors.append(Tensor(f"g{layer}", 1, TensorKind.GRADIENT))
        gradient = (len(tensors) - 2,) if layer < LAYERS - 1 else ()
        ops.append(Op(f"b{layer}", Phase.BACKWARD, 1.0, reads=(layer + 1, *gradient), writes=(len(tensors) - 1,)))
    problem = random_problem(0)
    machine = problem.machine
    program = Program("chain", tuple(tensors), tuple(ops))
    workload = Workload("chain", (program,), (0,) * len(machine.devices), 1, "test")
    return Problem("chain", workload, machine, frozenset({Action.OFFLOAD, Action.RECOMPUTE}))


def all_recomputed(view) -> np.ndarray:
    return np.where(view.may_recompute | ~view.needed, Choice.RECOMPUTE, Choice.KEEP).astype(np.int8)


def test_a_chain_is_broken_as_often_as_memory_asks():
    view = view_step(chain(), 0)
    choice = all_recomputed(view)
    whole = resident_bytes(view, choice).max()
    for capacity in (whole, whole - SIZE, view.base_bytes.max() + SIZE):
        room = np.full(len(view.slot_s), capacity)
        broken = break_chains(view, choice, room)
        assert (resident_bytes(view, broken) <= room).all()
        offloaded = int((broken == Choice.OFFLOAD).sum())
        assert offloaded == 0 if capacity == whole else 0 < offloaded < LAYERS
        assert set(broken[broken != choice].tolist()) <= {int(Choice.OFFLOAD)}


def test_a_recomputation_that_does_not_fit_names_the_op_that_wants_it():
    problem = chain()
    view = view_step(problem, 0)
    decision = DeviceDecision(all_recomputed(view), np.zeros(0, np.int8))
    names = [op.name for op in problem.workload.program(0).ops]
    fits = next(capacity for capacity in range(1, 200)
                if not isinstance(decode(problem, view, decision, capacity_bytes=capacity), DoesNotFit))  # fmt: skip
    found = decode(problem, view, decision, capacity_bytes=fits - 1)
    assert isinstance(found, DoesNotFit)
    # The first backward op with a dropped input has the whole chain made again before it.
    wanted_by, failing = names[found.wanted_by], names[found.op]
    assert wanted_by.startswith("b") and names.index(failing) <= names.index(wanted_by)


@given(seed=st.integers(0, 400), share=st.floats(0.0, 1.0), dropped=st.floats(0.0, 1.0))
@example(seed=63, share=0.0, dropped=1.0)  # what is gone before the worst place leaves something there
@settings(deadline=None, max_examples=60)
def test_what_fits_with_everything_offloaded_fits_or_no_more_helps(seed, share, dropped):
    problem = random_problem(seed)
    view = view_step(problem, 0)
    rng = np.random.default_rng(seed)
    recomputed = (view.may_recompute & (rng.random(len(view.tensor)) < dropped)) | ~view.needed
    choice = np.where(recomputed, Choice.RECOMPUTE, Choice.KEEP).astype(np.int8)
    most, least = resident_bytes(view, choice).max(), view.base_bytes.max()
    room = np.full(len(view.slot_s), least + share * (most - least))
    broken = break_chains(view, choice, room)
    assert np.array_equal(broken, break_chains(view, choice, room))
    changed = broken != choice
    assert (broken[changed] == Choice.OFFLOAD).all() and view.may_offload[changed].all()
    over = np.maximum(resident_bytes(view, broken) - room, 0.0)
    if not over.any():
        return
    there = np.flatnonzero(view.may_offload & (broken != Choice.OFFLOAD))
    for index in there.tolist():  # what is left cannot be had by one more tensor at the worst place
        other = broken.copy()
        other[index] = Choice.OFFLOAD
        after = np.maximum(resident_bytes(view, other) - room, 0.0)
        assert after.sum() >= over.sum() - 1e-6 or after.argmax() != over.argmax() or after.max() >= over.max() - 1e-6
