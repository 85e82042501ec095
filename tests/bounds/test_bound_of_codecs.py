"""What the bound says of codecs, by hand."""

from dataclasses import replace

import pytest
from shared_path_machine import shared_path

from tmojax.bounds import bound
from tmojax.problem import Action, Codec, Lifetime, Op, Phase, Problem, Program, Tensor, TensorKind, Workload


def problem(tensors, ops, actions, micro_batches=1):
    """One GPU of 120 bytes; a codec that halves 100 bytes in 1 s and is twice as fast in the other direction; a link
    that is hardly one."""
    workload = Workload("coded", (Program("p", tensors, ops),), (0,), micro_batches, "synthetic")
    machine = replace(shared_path(1, 120, 1e-3), codecs=(Codec("half", 1, 2, 100.0, 200.0),))
    return Problem("coded", workload, machine, frozenset(actions))


@pytest.mark.parametrize("actions", [{Action.COMPRESS}, {Action.COMPRESS, Action.RECOMPUTE}])
def test_an_activation_is_encoded_and_decoded_by_hand(actions):
    """While `peak` runs 40 of 100 bytes have to go: 80 % of them are encoded, in 0.8 s, and decoded, in 0.4 s; or 40 %
    of a run of `wide`, in 2.4 s."""
    tensors = (Tensor("a", 100, TensorKind.ACTIVATION),)
    ops = (
        Op("wide", Phase.FORWARD, 6.0, writes=(0,)),
        Op("peak", Phase.FORWARD, 1.0, workspace_bytes=60, recomputable=False),
        Op("last", Phase.BACKWARD, 1.0, reads=(0,), recomputable=False),
    )
    assert bound(problem(tensors, ops, actions)).bound_s == pytest.approx(8.0 + 0.8 + 0.4)


def test_state_is_encoded_once_and_decoded_for_its_update_by_hand():
    """As above in each of two micro-batches; the state is encoded once. It is encoded in the first and decoded in the
    last."""
    tensors = (Tensor("m", 100, TensorKind.OPTIMIZER_STATE, Lifetime.STATE),)
    ops = (
        Op("peak", Phase.FORWARD, 1.0, workspace_bytes=60, recomputable=False),
        Op("update", Phase.OPTIMIZER, 1.0, reads=(0,), updates=(0,), recomputable=False, step_op=True),
    )
    report = bound(problem(tensors, ops, {Action.COMPRESS, Action.OFFLOAD}, micro_batches=2))
    in_parts = next(part.step_s for part in report.parts if part.name == "windows")
    # Some 0.004 bytes take the link.
    assert in_parts == pytest.approx(3.0 + 0.8 + 0.4, rel=1e-4)


def test_peers_may_do_the_work():
    tensors = (Tensor("a", 100, TensorKind.ACTIVATION),)
    ops = (
        Op("wide", Phase.FORWARD, 6.0, writes=(0,), recomputable=False),
        Op("peak", Phase.FORWARD, 1.0, workspace_bytes=60, recomputable=False),
        Op("last", Phase.BACKWARD, 1.0, reads=(0,), recomputable=False),
    )
    assert bound(problem(tensors, ops, {Action.COMPRESS, Action.PEER})).bound_s == pytest.approx(8.0)
