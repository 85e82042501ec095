"""Lower bounds: hand-computed values, the published figures of the synthetic transformer, and properties."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from shared_path_machine import shared_path
from tiny_steps import tiny_problem

from tmojax.bounds import BoundStatus, bound
from tmojax.bounds.alike import LinearProgram
from tmojax.bounds.highs import INFINITY, LinearModel, SolverStatus, certified_bound
from tmojax.check import check
from tmojax.errors import InputError
from tmojax.importers.synthetic import SyntheticTransformer, synthetic_transformer
from tmojax.problem import (
    Action,
    Codec,
    Collective,
    CollectiveKind,
    Lifetime,
    Link,
    ListBuilder,
    Op,
    Phase,
    Placement,
    Problem,
    Program,
    Route,
    Schedule,
    Segment,
    Tensor,
    TensorKind,
    Workload,
    keep_all_footprint_bytes,
)
from tmojax.simulate import simulate

MOVE, BOTH = frozenset({Action.OFFLOAD}), frozenset({Action.OFFLOAD, Action.RECOMPUTE})


def transformer(micro_batches: int, factor: float = 1.33, *, duplex: bool = True, actions=MOVE) -> Problem:
    """Design section 6: 12 layers of 8 tensors, 4 GPUs, one path of 12.5 GB/s each way."""
    workload = synthetic_transformer(SyntheticTransformer(), 4, micro_batches)
    capacity = int(keep_all_footprint_bytes(workload, 0) / factor)
    return Problem("synthetic", workload, shared_path(4, capacity, 12.5e9, duplex=duplex), actions)


def forced_offload(seconds=(1.0, 1.0, 1.0), *, gpus: int = 1, recomputable: bool = False) -> Problem:
    """first writes a (100 B), middle needs all the memory, last reads a again; 50 B/s each way: 2 s out, 2 s in."""
    tensors = (Tensor("a", 100, TensorKind.ACTIVATION), Tensor("b", 10, TensorKind.ACTIVATION))
    ops = (
        Op("first", Phase.FORWARD, seconds[0], writes=(0,), recomputable=recomputable),
        Op("middle", Phase.FORWARD, seconds[1], writes=(1,), workspace_bytes=100),
        Op("last", Phase.BACKWARD, seconds[2], reads=(0, 1)),
    )
    workload = Workload("forced", (Program("p", tensors, ops),), (0,) * gpus, 1, "synthetic")
    return Problem("forced", workload, shared_path(gpus, 110, 50.0), BOTH if recomputable else MOVE)


def test_forced_offload_by_hand():
    # 1 s compute, 2 s until a is out, 1 s compute with all the memory, 2 s until it is back, 1 s compute.
    assert bound(forced_offload()).bound_s == pytest.approx(7.0)


def test_forced_offload_on_two_gpus_by_hand():
    # 100 B each go out over one link, until 3 s and 5 s, so that `middle` ends at 4 s and 6 s. From there 2 s until
    # they are back, and 1 s.
    report = bound(forced_offload(gpus=2))
    assert report.bound_s == pytest.approx(9.0)
    slow = bound(forced_offload((1.0, 1.0, 4.0), gpus=2))
    assert slow.bound_s == pytest.approx(12.0)


def test_uneven_gpus_form_classes():
    problem = forced_offload(gpus=3)
    memories = tuple(replace(m, capacity_bytes=1000) if m.name == "gpu1" else m for m in problem.machine.memories)
    report = bound(replace(problem, machine=replace(problem.machine, memories=memories)))
    assert report.details["device_classes"] == 2 and report.bound_s == pytest.approx(9.0)
    # With slower links the two that move a compete: `middle` ends at 1 + 20 + 1 s on one of them; then 10 s, and 1 s.
    links = tuple(replace(link, bandwidth_bytes_per_s=10.0) for link in problem.machine.links)
    slow = bound(replace(problem, machine=replace(problem.machine, memories=memories, links=links)))
    assert slow.bound_s == pytest.approx(33.0)


def test_recomputing_by_hand():
    # Running `first` again costs 1 s; moving a would cost 4 s.
    assert bound(forced_offload(recomputable=True)).bound_s == pytest.approx(4.0)


def test_without_memory_pressure_the_bound_is_compute():
    problem = transformer(2, 0.9)
    report = bound(problem)
    assert (
        report.bound_s == pytest.approx(0.7) and report.claimed == "compute" and report.gap(0.77) == pytest.approx(0.1)
    )


@pytest.mark.parametrize(
    "micro_batches, duplex, per_micro_batch_s",
    [(1, True, 0.639), (8, True, 0.432), (1, False, 0.805)],
)
def test_figures_of_the_synthetic_transformer(micro_batches, duplex, per_micro_batch_s):
    report = bound(transformer(micro_batches, duplex=duplex))
    assert report.status is BoundStatus.COMPLETE
    assert report.micro_batch_s == pytest.approx(per_micro_batch_s, abs=0.0006)
    assert report.repeated_s <= report.bound_s * (1 + 1e-9)
    assert {part.name for part in report.parts} == {"compute", "bytes", "windows"}


def test_recomputation_lowers_the_bound():
    allowed, forbidden = bound(transformer(1, actions=BOTH)).bound_s, bound(transformer(1)).bound_s
    assert 0.350 < allowed < 0.353 < forbidden


def test_unneeded_inputs_of_recomputations_are_not_free():
    """c = f(b), b = g(a): b is dead when c is dropped, so recomputing c takes b, or g as well."""
    tensors = tuple(Tensor(n, s, TensorKind.ACTIVATION) for n, s in (("a", 1), ("b", 50), ("c", 50), ("d", 1)))
    ops = (
        Op("make_a", Phase.FORWARD, 0.5, writes=(0,), recomputable=False),
        Op("make_b", Phase.FORWARD, 1.0, reads=(0,), writes=(1,)),
        Op("make_c", Phase.FORWARD, 0.25, reads=(1,), writes=(2,)),
        Op("peak", Phase.FORWARD, 1.0, reads=(0,), writes=(3,), workspace_bytes=100),
        Op("use", Phase.BACKWARD, 1.0, reads=(2, 3)),
    )
    workload = Workload("chain", (Program("p", tensors, ops),), (0,), 1, "synthetic")
    problem = Problem("chain", workload, shared_path(1, 102, 1e-3), frozenset({Action.RECOMPUTE}))
    assert bound(problem).bound_s == pytest.approx(3.75 + 1.25)


def test_collective_and_update_count_at_the_end():
    tensors = (
        Tensor("sum", 300, TensorKind.GRADIENT, Lifetime.STATE),
        Tensor("weight", 10, TensorKind.WEIGHT, Lifetime.STATE),
        Tensor("a", 10, TensorKind.ACTIVATION),
    )
    ops = (
        Op("forward", Phase.FORWARD, 1.0, reads=(1,), writes=(2,)),
        Op("backward", Phase.BACKWARD, 2.0, reads=(2,), updates=(0,), recomputable=False),
        Op("reduce", Phase.COLLECTIVE, 0.0, updates=(0,), recomputable=False, step_op=True, collective="reduce"),
        Op("update", Phase.OPTIMIZER, 0.5, reads=(0,), updates=(1,), recomputable=False, step_op=True),
    )
    collective = Collective("reduce", CollectiveKind.ALL_REDUCE, 300, (0, 1))
    workload = Workload("sync", (Program("p", tensors, ops),), (0, 0), 2, "synthetic", (collective,))
    problem = Problem("sync", workload, shared_path(2, 10_000, 100.0, peers=True), MOVE)
    # Each GPU sends 300 B; both share a link of 100 B/s in each direction: 6 s alone.
    assert bound(problem).bound_s == pytest.approx(2 * 3.0 + 6.0 + 0.5)


def test_copies_and_collectives_take_turns_on_the_lane_of_a_gpu_by_hand():
    tensors = (
        Tensor("s", 100, TensorKind.OPTIMIZER_STATE, Lifetime.STATE),
        Tensor("sum", 150, TensorKind.GRADIENT, Lifetime.STATE),
        Tensor("a", 10, TensorKind.ACTIVATION),
    )
    ops = (
        Op("first", Phase.FORWARD, 3.0, writes=(2,), recomputable=False),
        Op("middle", Phase.BACKWARD, 1.0, (2,), updates=(1,), workspace_bytes=100, recomputable=False),
        Op("reduce", Phase.COLLECTIVE, 0.0, updates=(1,), recomputable=False, step_op=True, collective="reduce"),
        Op("update", Phase.OPTIMIZER, 1.0, (1,), updates=(0,), recomputable=False, step_op=True),
    )
    collective = Collective("reduce", CollectiveKind.ALL_REDUCE, 150, (0, 1))
    workload = Workload("sync", (Program("p", tensors, ops),), (0, 0), 1, "synthetic", (collective,))
    machine = shared_path(2, 260, 10_000.0, lane_bytes_per_s=50.0, peers=True)
    # s is not there in middle. From its end at 4 s on, s comes back, 2 s, and the sums cross the same lane, 3 s.
    assert bound(Problem("sync", workload, machine, MOVE)).bound_s == pytest.approx(4.0 + 2.0 + 3.0)


def test_proved_infeasible_names_the_op():
    problem = transformer(1)
    report = bound(problem.with_device_capacity(1000))
    assert report.status is BoundStatus.INFEASIBLE and report.bound_s == float("inf")
    assert "op 'layer0." in report.message or "op 'layer" in report.message


def with_state(gpus: int) -> Problem:
    """first, then middle, which needs all the memory, then the update of s (100 B, 2 s each way)."""
    tensors = (Tensor("s", 100, TensorKind.OPTIMIZER_STATE, Lifetime.STATE), Tensor("a", 10, TensorKind.ACTIVATION))
    ops = (
        Op("first", Phase.FORWARD, 1.0, writes=(1,), recomputable=False),
        Op("middle", Phase.BACKWARD, 1.0, reads=(1,), workspace_bytes=100, recomputable=False),
        Op("update", Phase.OPTIMIZER, 1.0, updates=(0,), recomputable=False, step_op=True),
    )
    workload = Workload("state", (Program("p", tensors, ops),), (0,) * gpus, 1, "synthetic")
    return Problem("state", workload, shared_path(gpus, 110, 50.0), MOVE)


def test_state_leaves_before_the_peak_and_returns_for_the_update_by_hand():
    # Out 2 s, middle 1 s, in 2 s, update 1 s; or first 1 s, middle 1 s, in 2 s, update 1 s, out 2 s, which is more.
    problem = with_state(1)
    # In parts: half of it leaves while first runs, half after the update, while T is 1 + 1 + 2 + 1.
    assert bound(problem).bound_s == pytest.approx(5.0)
    build = ListBuilder()
    build.offload(0, 0, 1, 0)
    build.compute(0, 0)
    build.release(0, 0, 1)
    build.compute(1, 0)
    build.prefetch(0, 0, 0, 1)
    build.compute(2, 0)
    build.release(0, 0, 0)
    build.release(1, 0, 1)
    schedule = Schedule((build.build(),), ((Placement(0, (1,)),),))
    assert check(problem, schedule).valid, check(problem, schedule).text()
    assert simulate(problem, schedule).step_s == pytest.approx(6.0)


def test_state_of_two_gpus_shares_the_link_by_hand():
    # An exhaustive search finds nothing faster than 7 s.
    assert bound(with_state(2)).bound_s == pytest.approx(7.0)


def test_updates_that_do_not_fit_together_exchange_their_state_by_hand():
    tensors = (
        Tensor("s1", 100, TensorKind.OPTIMIZER_STATE, Lifetime.STATE),
        Tensor("s2", 100, TensorKind.OPTIMIZER_STATE, Lifetime.STATE),
        Tensor("a", 10, TensorKind.ACTIVATION),
    )
    ops = (
        Op("first", Phase.FORWARD, 1.0, writes=(2,), recomputable=False),
        Op("update1", Phase.OPTIMIZER, 1.0, updates=(0,), recomputable=False, step_op=True),
        Op("update2", Phase.OPTIMIZER, 1.0, updates=(1,), recomputable=False, step_op=True),
    )
    workload = Workload("two", (Program("p", tensors, ops),), (0,), 1, "synthetic")
    # 90 B of s2 are away in update1 and come in behind it, which takes 1.8 s, while as much of s1 leaves.
    assert bound(Problem("two", workload, shared_path(1, 110, 50.0), MOVE)).bound_s == pytest.approx(3.0 + 1.8)


def test_gradients_that_the_update_reads_take_room_by_hand():
    tensors = (
        Tensor("g1", 100, TensorKind.GRADIENT),
        Tensor("g2", 100, TensorKind.GRADIENT),
        Tensor("w", 10, TensorKind.WEIGHT, Lifetime.STATE),
    )
    ops = (
        Op("backward1", Phase.BACKWARD, 1.0, writes=(0,), recomputable=False),
        Op("backward2", Phase.BACKWARD, 1.0, writes=(1,), recomputable=False),
        Op("update1", Phase.OPTIMIZER, 1.0, (0,), updates=(2,), recomputable=False, step_op=True),
        Op("update2", Phase.OPTIMIZER, 1.0, (1,), updates=(2,), recomputable=False, step_op=True),
    )
    workload = Workload("kept", (Program("p", tensors, ops),), (0,), 1, "synthetic")
    # g1 leaves, 2 s, before backward2. Then g2 leaves while g1 comes in, 2 s, and g2 comes in, 2 s.
    report = bound(Problem("kept", workload, shared_path(1, 110, 50.0), MOVE))
    assert report.bound_s == pytest.approx(4.0 + 3 * 2.0, rel=2e-6)


def test_a_gradient_that_was_summed_up_cannot_be_made_again_by_hand():
    tensors = (
        Tensor("g", 100, TensorKind.GRADIENT),
        Tensor("h", 10, TensorKind.GRADIENT),
        Tensor("w", 10, TensorKind.WEIGHT, Lifetime.STATE),
    )
    reduce = dict(recomputable=False, step_op=True, collective="reduce")
    ops = (
        Op("backward", Phase.BACKWARD, 1.0, writes=(0,)),
        Op("other", Phase.BACKWARD, 1.0, writes=(1,)),
        Op("reduce", Phase.COLLECTIVE, 0.0, updates=(0, 1), **reduce),
        Op("update1", Phase.OPTIMIZER, 1.0, (1,), updates=(2,), workspace_bytes=100, recomputable=False, step_op=True),
        Op("update2", Phase.OPTIMIZER, 1.0, (0,), updates=(2,), recomputable=False, step_op=True),
    )
    collective = Collective("reduce", CollectiveKind.ALL_REDUCE, 10, (0, 1))
    workload = Workload("kept", (Program("p", tensors, ops),), (0, 0), 1, "synthetic", (collective,))
    machine = shared_path(2, 120, 1e4, lane_bytes_per_s=50.0, peers=True)
    # update1 begins when the sums are there, 0.2 s after 2 s. g, which is away in it, comes in by a copy, 2 s.
    report = bound(Problem("kept", workload, machine, BOTH))
    assert report.bound_s >= 2.2 + 1.0 + 2.0 + 1.0 - 1e-6


def test_sharding_falls_back_to_compute():
    report = bound(replace(transformer(1), actions=MOVE | {Action.SHARD}))
    assert report.status is BoundStatus.COMPUTE_ONLY and report.bound_s == pytest.approx(0.35)
    assert report.claimed == "compute" and report.message


def squeezed(actions) -> Problem:
    """As `forced_offload`, with a codec that halves a; middle leaves no room for what is left of it either."""
    problem = forced_offload()
    ops = problem.workload.programs[0].ops
    program = replace(problem.workload.programs[0], ops=(ops[0], replace(ops[1], workspace_bytes=150), ops[2]))
    machine = replace(shared_path(1, 160, 50.0), codecs=(Codec("half", 1, 2, 1e9, 1e9),))
    workload = replace(problem.workload, programs=(program,))
    return Problem("squeezed", workload, machine, frozenset(actions))


def test_compression_by_hand():
    # a takes 2 s each way, half of it 1 s; encoding and decoding take 1e-7 s and are not counted.
    problem = squeezed(MOVE | {Action.COMPRESS})
    assert bound(squeezed(MOVE)).bound_s == pytest.approx(7.0)
    assert bound(problem).bound_s == pytest.approx(5.0)
    build = ListBuilder()
    build.compute(0, 0)
    build.encode(0, 0, 1, 0)
    build.release(0, 0, 1)
    build.offload(0, 0, 1, 0, form=0)
    build.release(0, 0, 1, form=0)
    build.compute(1, 0)
    build.prefetch(0, 0, 0, 1, form=0)
    build.decode(0, 0, 1, 0)
    build.compute(2, 0)
    for tensor, memory, form in ((0, 1, -1), (1, 1, -1), (0, 1, 0), (0, 0, 0)):
        build.release(tensor, 0, memory, form=form)
    schedule = Schedule((build.build(),), ((),))
    assert check(problem, schedule).valid
    assert bound(problem).bound_s <= simulate(problem, schedule).step_s == pytest.approx(5.0, abs=1e-6)


def with_peer(actions) -> Problem:
    """Two GPUs, the second with room to spare, and a link of 100 B/s from each to the other."""
    problem = forced_offload(gpus=2)
    machine = problem.machine
    memories = tuple(replace(m, capacity_bytes=1000) if m.name == "gpu1" else m for m in machine.memories)
    first = len(machine.links)
    links = (*machine.links, Link("there", 100.0), Link("back", 100.0))
    routes = (*machine.routes, Route(1, 2, (first,), (0, 3)), Route(2, 1, (first + 1,), (2, 1)))
    machine = replace(machine, memories=memories, links=links, routes=routes)
    return replace(problem, machine=machine, actions=frozenset(actions))


def test_copies_to_a_peer_by_hand():
    # 1 s compute, 1 s until a is with the peer, 1 s, 1 s back, 1 s; over the host's links it takes 2 s each way.
    problem = with_peer(MOVE | {Action.PEER})
    assert bound(with_peer(MOVE)).bound_s == pytest.approx(7.0)
    assert bound(problem).bound_s == pytest.approx(5.0)
    one, two = ListBuilder(), ListBuilder()
    one.compute(0, 0)
    one.wait(1, 2)  # the engine out of gpu0
    one.offload(0, 0, 1, 2)
    one.release(0, 0, 1)
    one.compute(1, 0)
    one.prefetch(0, 0, 2, 1)
    one.signal(2, after=one.release(0, 0, 2))
    one.compute(2, 0)
    one.release(0, 0, 1)
    one.release(1, 0, 1)
    two.signal(1, after=two.lend(100, 0, 7))
    for op in range(3):
        two.compute(op, 0)
    two.release(0, 0, 2)
    two.release(1, 0, 2)
    two.wait(2, 1)
    two.reclaim(7)
    schedule = Schedule((one.build(), two.build()), ((), ()))
    assert check(problem, schedule).valid, check(problem, schedule).text()
    assert bound(problem).bound_s <= simulate(problem, schedule).step_s == pytest.approx(5.0)


@pytest.mark.parametrize("more", [Action.PEER, Action.COMPRESS])
def test_more_actions_never_raise_the_bound(more):
    problem = transformer(2, 2.0)
    machine = shared_path(4, problem.capacity_bytes(0), 12.5e9, peers=True)
    problem = replace(problem, machine=replace(machine, codecs=(Codec("most", 3, 4, 1e9, 1e9),)))
    compute_s = 0.7
    allowed = bound(replace(problem, actions=MOVE | {more})).bound_s
    assert compute_s < allowed <= bound(problem).bound_s * (1 + 1e-9)


def test_other_orders():
    problem = transformer(1)
    program = problem.workload.programs[0]
    program = replace(program, orders={"same": (Segment(0, len(program.ops), 0),)})
    problem = replace(problem, workload=replace(problem.workload, programs=(program,)))
    assert bound(problem, order="same").bound_s == bound(problem).bound_s == bound(transformer(1)).bound_s
    with pytest.raises(InputError, match="no order"):
        bound(problem, order="unknown")


def test_a_time_limit_still_proves_something():
    problem = transformer(8)
    short, full = bound(problem, time_limit_s=1e-6), bound(problem)
    assert short.status is BoundStatus.TIME_LIMIT and 2.8 - 1e-9 <= short.bound_s <= full.bound_s * (1 + 1e-9)


@settings(max_examples=8, deadline=None)
@given(seed=st.integers(0, 10_000), state=st.booleans(), gpus=st.integers(1, 2))
def test_more_of_anything_never_raises_the_bound(seed, state, gpus):
    problem = tiny_problem(seed, gpus=gpus, micro_batches=2, layers=4, actions=set(MOVE), state=state, squeeze=0.6)
    value = bound(problem).bound_s * (1 + 1e-6)
    larger = problem.with_device_capacity(problem.capacity_bytes(0) + 1_000_000)
    links = tuple(
        replace(link, bandwidth_bytes_per_s=1.5 * link.bandwidth_bytes_per_s) for link in problem.machine.links
    )
    faster = replace(problem, machine=replace(problem.machine, links=links))
    for easier in (larger, faster, replace(problem, actions=BOTH)):
        # The search of part `whole` ends after a number of nodes, wherever it is then.
        assert max(part.step_s for part in bound(easier).parts if part.name != "whole") <= value


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**31 - 1))
def test_certified_bound_holds_for_any_multipliers(seed):
    rng = np.random.default_rng(seed)
    columns, rows = int(rng.integers(1, 6)), int(rng.integers(1, 6))
    matrix, cost = rng.normal(size=(rows, columns)), rng.normal(size=columns)
    point = rng.random(columns)
    model = LinearModel()
    index = model.add_columns(columns, 0.0, 1.0, cost)
    lower = np.where(rng.random(rows) < 0.5, matrix @ point - rng.random(rows), -INFINITY)
    upper = np.where(rng.random(rows) < 0.5, matrix @ point + rng.random(rows), INFINITY)
    for row in range(rows):
        model.add_row(lower[row], upper[row], (index, matrix[row]))
    answer = model.solve(time_limit_s=10.0)
    assert answer.status is SolverStatus.OPTIMAL and answer.bound == pytest.approx(answer.objective, abs=1e-6)
    entries = np.arange(columns + 1) * rows, np.tile(np.arange(rows), columns), matrix.T.ravel()
    program = LinearProgram(*entries, cost, np.zeros(columns), np.ones(columns), lower, upper)
    assert certified_bound(rng.normal(size=rows), program) <= answer.objective + 1e-9
