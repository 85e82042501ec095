"""Plans with a peer and with codecs whose every time can be checked by hand."""

from dataclasses import replace

import numpy as np
import pytest
from further_steps import problem_of, step

from tmojax.check import check
from tmojax.errors import InputError
from tmojax.planners.workbench import Workbench
from tmojax.problem import Kind, Lifetime, Op, Phase, Problem, Tensor, TensorKind
from tmojax.relax.coordinate import together
from tmojax.relax.decisions import Choice, DeviceDecision, Rest, keep_everything
from tmojax.relax.decode import DoesNotFit


def evaluated(problem: Problem, choice: Choice, lender: int = -1):
    """The plan in which device 0 does so with its tensor, and the others keep theirs."""
    bench = Workbench(problem)
    decisions = [keep_everything(bench.view(device)) for device in range(bench.device_count)]
    decisions[0] = DeviceDecision(np.array([choice], np.int8), np.zeros(0, np.int8), lender=lender)
    found = bench.evaluate(tuple(decisions), together(problem))
    if not isinstance(found, DoesNotFit):
        assert check(problem, found.schedule).valid
    return found


def test_a_tensor_at_a_peer():
    # a: written at 1, at the peer at 3, g 3-5, back at 7, h 7-8. The peer has just the 20 bytes that it lends.
    problem = problem_of((step(20, 20), step(10, 0)), (20, 30))
    found = evaluated(problem, Choice.PEER, 1)
    assert found.step_s == pytest.approx(8.0)
    lent = found.schedule.lists[1]
    assert lent["kind"].tolist()[:2] == [Kind.LEND, Kind.SIGNAL] and lent["kind"][-1] == Kind.RECLAIM
    assert lent["size_bytes"][0] == 20
    less = evaluated(problem_of((step(20, 20), step(10, 0)), (20, 29)), Choice.PEER, 1)
    assert less == DoesNotFit(1, 0, 0, 1)


def test_what_fits_is_not_lent():
    found = evaluated(problem_of((step(20, 20), step(10, 0)), (40, 10)), Choice.PEER, 1)
    assert found.step_s == pytest.approx(4.0)
    assert not any((rows["kind"] == Kind.LEND).any() for rows in found.schedule.lists)


def test_a_tensor_kept_encoded():
    # f 0-1, encode 1-2, g 2-4, decode 4-6, h 6-7; 40 and 20 bytes while encoding, 20 and 40 of workspace in g.
    assert evaluated(problem_of((step(40, 40),), (60,)), Choice.COMPRESS).step_s == pytest.approx(7.0)
    assert evaluated(problem_of((step(40, 40),), (59,)), Choice.COMPRESS) == DoesNotFit(0, 0, 0, 1)


@pytest.mark.parametrize("micro_batches", [1, 3])
def test_state_kept_encoded_until_its_update(micro_batches):
    # encode m 0-1, then 4 s of f, g, h for each micro-batch, decode m for 2 s, update for 1 s. 40 and 20 bytes while it
    # is encoded and decoded; 20, 1 of a and 39 of workspace in g.
    forward = step(1, 39)
    tensors = (*forward.tensors, Tensor("m", 40, TensorKind.OPTIMIZER_STATE, Lifetime.STATE))
    ops = (*forward.ops, Op("update", Phase.OPTIMIZER, 1.0, updates=(1,), step_op=True))
    problem = problem_of((replace(forward, tensors=tensors, ops=ops),), (60,))
    problem = replace(problem, workload=replace(problem.workload, micro_batches=micro_batches))
    bench = Workbench(problem)
    encoded = replace(keep_everything(bench.view(0)), state_out=np.array([Rest.ENCODED], np.int8))
    found = bench.evaluate((encoded,), together(problem))
    assert not isinstance(found, DoesNotFit)
    assert check(problem, found.schedule).valid
    assert found.step_s == pytest.approx(4.0 + 4.0 * micro_batches)
    kinds = found.schedule.lists[0]["kind"]
    assert ((kinds == Kind.ENCODE).sum(), (kinds == Kind.DECODE).sum()) == (1, 1)
    smaller = Workbench(problem.with_device_capacity(59))
    assert isinstance(smaller.evaluate((encoded,), together(problem)), DoesNotFit)
    assert isinstance(bench.evaluate((keep_everything(bench.view(0)),), together(problem)), DoesNotFit)


def test_an_encoded_tensor_on_the_host():
    # f 0-1, encode 1-2, 20 bytes out 2-4, g 4-6, back 6-8, decode 8-10, h 10-11. Plain it is 12.
    problem = problem_of((step(40, 60),), (60,))
    assert evaluated(problem, Choice.OFFLOAD_COMPRESSED).step_s == pytest.approx(11.0)
    assert evaluated(problem, Choice.OFFLOAD).step_s == pytest.approx(12.0)
    kept = evaluated(problem, Choice.COMPRESS)
    assert isinstance(kept, DoesNotFit) and kept.bytes_over == 20


@pytest.mark.parametrize(("lender", "message"), [(0, "cannot lend to device 0"), (-1, "cannot lend"), (7, "cannot")])
def test_a_lender_must_be_another_device(lender, message):
    with pytest.raises(InputError, match=message):
        evaluated(problem_of((step(20, 20), step(10, 0)), (20, 30)), Choice.PEER, lender)


def test_who_borrows_does_not_lend():
    problem = problem_of((step(20, 20), step(20, 20)), (20, 20))
    both = tuple(
        DeviceDecision(np.array([Choice.PEER], np.int8), np.zeros(0, np.int8), lender=lender) for lender in (1, 0)
    )
    with pytest.raises(InputError, match="its lender, device 1, borrows itself"):
        Workbench(problem).evaluate(both, together(problem))


def test_a_codec_must_exist():
    problem = problem_of((step(40, 40),), (60,))
    problem = replace(problem, machine=replace(problem.machine, codecs=()))
    with pytest.raises(InputError, match=r"codec: 0; machine .* has 0 codecs"):
        evaluated(problem, Choice.COMPRESS)
