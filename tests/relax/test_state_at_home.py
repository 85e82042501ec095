"""State that micro-batches use and that rests on the host: by hand, and where nothing else fits."""

from dataclasses import replace

import numpy as np
import pytest
from offered_orders import layers_with_weights, offering
from planner_cases import light

from tmojax.bounds import bound
from tmojax.check import check
from tmojax.ilp.from_schedule import decision_from_schedule
from tmojax.importers.micro_batch_orders import BreadthFirst
from tmojax.planners.orders import Orders
from tmojax.problem import Kind, Op, Phase, Problem, Program
from tmojax.problem.step_view import view_step
from tmojax.relax.coordinate import Coordination, assemble
from tmojax.relax.decisions import DeviceDecision, Rest, keep_everything
from tmojax.relax.decode import DeviceList, decode
from tmojax.simulate import simulate


def with_updates(problem: Problem) -> Problem:
    """The update of the last layer's weight at the end of the step."""
    program = problem.workload.programs[0]
    weight = next(t for t, spec in enumerate(program.tensors) if spec.name == "w4")
    update = Op("update", Phase.OPTIMIZER, 1.0, updates=(weight,), recomputable=False, step_op=True)
    program = Program(program.name, program.tensors, (*program.ops, update))
    return replace(problem, workload=replace(problem.workload, programs=(program,)))


def at_home(problem: Problem) -> tuple[DeviceDecision, DeviceList]:
    view = view_step(problem, 0)
    decision = replace(keep_everything(view), state_out=np.full(len(view.state_tensor), Rest.ON_HOST, np.int8))
    found = decode(problem, view, decision)
    assert isinstance(found, DeviceList)
    return decision, found


def copies(problem: Problem, found: DeviceList, kind: Kind) -> list[str]:
    tensors = problem.workload.programs[0].tensors
    rows = found.rows[found.rows["kind"] == kind]
    return [tensors[t].name for t in rows["tensor"] if tensors[t].name.startswith("w")]


def test_weights_come_for_every_use_and_go_back_when_they_have_changed():
    """Of five weights, three have room beside the loss; w4 is used last in forward and first in backward, so it stays.
    The first four come twice in a micro-batch, unless they are used again soon: w3 after 3 ops, more than two and an
    eighth of 11. Nothing is copied out but w4, once, behind its update."""
    problem = with_updates(layers_with_weights(1)).with_device_capacity(3100)
    decision, found = at_home(problem)
    assert sorted(copies(problem, found, Kind.PREFETCH)) == sorted([*["w0", "w1", "w2", "w3"] * 2, "w4", "w4"])
    assert copies(problem, found, Kind.OFFLOAD) == ["w4"]
    schedule = assemble(problem, [found], Coordination((0.0,)))
    assert check(problem, schedule).valid
    assert all(placement.memories == (1,) for placement in schedule.initial[0])
    assert decision_from_schedule(problem, view_step(problem, 0), schedule, 0).same_as(decision)


def test_with_room_for_all_every_weight_comes_once():
    problem = with_updates(layers_with_weights(4)).with_device_capacity(10**6)
    _, found = at_home(problem)
    assert sorted(copies(problem, found, Kind.PREFETCH)) == ["w0", "w1", "w2", "w3", "w4"]
    assert copies(problem, found, Kind.OFFLOAD) == ["w4"]


@pytest.mark.parametrize("kind", ["local-search", pytest.param("gradient", marks=pytest.mark.long)])
def test_models_larger_than_a_gpu(kind):
    """4000 bytes hold four of five weights, and two while the loss runs. Breadth-first, most cross once for all four
    micro-batches."""
    problem = offering(with_updates(layers_with_weights(4)).with_device_capacity(4000), BreadthFirst())
    orders = Orders(problem)
    first = orders.plan(light("ratio-sweep"))
    found = orders.plan(light(kind), seeds=(first,))
    assert first.schedule is not None and found.schedule is not None
    assert first.details["order"] == "breadth-first"
    assert first.step_s < 0.7 * first.details["order_step_s"]["default"]
    assert found.step_s <= first.step_s
    for result in (first, found):
        assert check(problem, result.schedule).valid
        assert simulate(problem, result.schedule).step_s == result.step_s >= bound(problem).bound_s
