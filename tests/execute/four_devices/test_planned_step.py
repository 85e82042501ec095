"""Steps by different plans give the same numbers and keep within the bytes that the checker counts."""

import jax
import numpy as np
import pytest
from checker_bytes import checker_bytes
from steps import OPTIMIZER, identical, largest_difference, perceptron, plan, planned

from tmojax.check import check
from tmojax.errors import InputError
from tmojax.execute.ledger import Ledger, MemoryExceeded

PLANS = [
    ("keep-all",),
    ("offload-all",),
    ("recompute-all",),
    ("oblivious",),
    ("offload-all", "recompute-all", "keep-all", "sqrt-n"),
]
# Float32 sums in another order: the ordinary step is fused across the ops of the plan.
TOLERANCE = 2e-5


@pytest.fixture(scope="module")
def case():
    return perceptron()


@pytest.fixture(scope="module")
def kept(case):
    """State, loss and gradients of two steps that keep everything."""
    return two_steps(case, case.problem(), plan(case.problem(), "keep-all"))


def two_steps(case, problem, schedule):
    step = planned(case, problem, schedule)
    first = step.step(case.batches(), gradients=True)
    second = step.step(case.batches(1))
    return step, first, second, step.state()


def test_the_kept_step_is_the_ordinary_step(case, kept):
    step = planned(case, case.problem(), plan(case.problem(), "keep-all"))
    result = step.step(case.batches(), gradients=True)
    params, state, gradients = case.unplanned(case.batches())
    assert largest_difference(step.state()[:2], (params, state)) < TOLERANCE
    names = sorted(result.gradients[0])
    sums = [result.gradients[0][name] / case.micro_batches for name in names]
    assert names == sorted(f"dense{i}.{part}.grad" for i in range(3) for part in ("kernel", "bias"))
    expected = [gradients[n.split(".")[0]][n.split(".")[1]] for n in names]
    assert largest_difference(sums, expected) < TOLERANCE
    losses = [float(case.loss(case.params, b)) for own in case.batches() for b in own]
    assert result.loss == pytest.approx(np.mean(losses), rel=1e-5)
    assert all(not accumulator.any() for accumulator in jax.tree.leaves(step.state()[2]))


@pytest.mark.parametrize("names", PLANS, ids="+".join)
def test_every_plan_gives_the_same_bits(case, kept, names):
    _, first, second, state = kept
    problem = case.problem()
    step, ours, later, reached = two_steps(case, problem, plan(problem, *names))
    assert identical(reached, state) and later.loss == second.loss
    for device in range(4):
        assert identical(ours.gradients[device], first.gradients[0])
        assert identical(step.state(device), state)
    assert ours.values == first.values


@pytest.mark.parametrize("name", ["ratio-sweep", "budget-milp"])
def test_plans_for_less_memory_that_order_their_links(case, kept, name):
    """Both offload and recompute here, and give the shared path to one GPU after another."""
    problem = case.problem(0.8)
    schedule = plan(problem, name)
    assert any(policy.kind != "fair" for policy in schedule.link_policies)
    step, _, _, reached = two_steps(case, problem, schedule)
    assert all(identical(step.state(device), kept[3]) for device in range(4)) and identical(reached, kept[3])


@pytest.mark.parametrize("segments", ["ops", "joined"])
@pytest.mark.parametrize("names", PLANS, ids="+".join)
def test_live_bytes_never_exceed_what_the_checker_counts(case, names, segments):
    problem = case.problem()
    schedule = plan(problem, *names)
    step = planned(case, problem, schedule, segments)
    results = [step.step(case.batches()), step.step(case.batches(1)), step.step(case.batches(2), measure=True)]
    report = check(problem, schedule)
    for result in results:
        for device, counts in enumerate(result.memory):
            for count, allowed in zip(counts, checker_bytes(problem, schedule, device), strict=True):
                assert count.planned_bytes.items() >= allowed.items()
                assert all(size <= count.planned_bytes[at] for at, size in count.counted_bytes.items())
        peaks = [max(c[device].counted_peak_bytes for c in result.memory) for device in range(4)]
        limits = [report.peak_bytes[memory.name] for memory in problem.machine.memories[:4]]
        assert all(0 < peak <= max(limits) for peak in peaks)


@pytest.mark.parametrize("segments", ["ops", "joined"])
def test_a_runtime_that_does_not_wait_for_room_is_found_out(case, monkeypatch, segments):
    """The count is of what is there: without the wait of semantics 5.1 it passes the plan, and that is an error."""
    problem = case.problem()
    step = planned(case, problem, plan(problem, "offload-all"), segments)
    step.step(case.batches())
    monkeypatch.setattr(Ledger, "make_room", lambda self, *where: None)
    with pytest.raises(MemoryExceeded, match=r"bytes are live at instruction \d+, and the plan counts \d+"):
        step.step(case.batches())
    with pytest.raises(InputError, match="nothing is loaded"):  # half a step leaves no state
        step.step(case.batches())


def test_less_memory_is_really_used(case):
    """Offloading lowers the counted peak, and the arrays that exist agree with the count at every dispatch."""
    peaks = {}
    for name in ("keep-all", "offload-all"):
        problem = case.problem()
        step = planned(case, problem, plan(problem, name))
        peaks[name] = max(count.counted_peak_bytes for count in step.step(case.batches()).memory[0][:1])
    assert peaks["offload-all"] < peaks["keep-all"]


@pytest.mark.parametrize(("name", "segments"), [("offload-all", "ops"), ("keep-all", "joined")])
def test_the_count_agrees_with_the_arrays_that_exist(monkeypatch, name, segments):
    alone = perceptron(gpus=1, micro_batches=2)
    problem = alone.problem()
    step = planned(alone, problem, plan(problem, name), segments)
    memory = problem.machine.devices[0].memory
    other = {id(a) for a in jax.live_arrays()} - {id(a) for key, a in step._table.items() if key[3] == memory}
    beyond = []
    original = Ledger.allocate

    def watched(self, where, position, size_bytes):
        exact = sum(
            a.nbytes for a in jax.live_arrays()
            if id(a) not in other and a.sharding.memory_kind == "device" and jax.devices()[0] in a.devices()
        )  # fmt: skip
        if where == memory:
            beyond.append(exact - self._live[where])
        return original(self, where, position, size_bytes)

    monkeypatch.setattr(Ledger, "allocate", watched)
    step.step(alone.batches())
    # Temporaries of the compiler are counted and are no arrays: so at most as much.
    assert len(beyond) >= len(step.segments[0]) and max(beyond) <= 0


@pytest.mark.parametrize("segments", ["ops", "joined"])
def test_temporaries_of_the_compiler_are_counted(monkeypatch, segments):
    """What a program is counted with at its dispatch: its new arrays, and at least what JAX itself calls temporary."""
    alone = perceptron(gpus=1, micro_batches=2)
    problem = alone.problem()
    step = planned(alone, problem, plan(problem, "keep-all"), segments)
    counted = {}
    original = Ledger.allocate

    def noted(self, memory, position, size_bytes):
        counted[position] = counted.get(position, 0) + size_bytes
        return original(self, memory, position, size_bytes)

    monkeypatch.setattr(Ledger, "allocate", noted)
    step.step(alone.batches())
    tensors, temporary = problem.workload.programs[0].tensors, []
    for segment in step.segments[0]:
        created = {copy for node in segment.nodes for copy in node.creates} - set(segment.inside)
        new_bytes = sum(tensors[copy[1]].size_bytes for copy in created)
        temporary.append(segment.compiled.executable.memory_analysis().temp_size_in_bytes)
        assert counted[segment.position] - new_bytes >= temporary[-1]
    assert max(temporary) > 1000


def test_host_buffers_are_used_again(case):
    problem = case.problem()
    step = planned(case, problem, plan(problem, "offload-all"))
    step.step(case.batches())
    after_one = step.host_buffers
    for seed in range(3):
        step.step(case.batches(seed))
    assert [allocated for allocated, _ in step.host_buffers] == [allocated for allocated, _ in after_one]
    assert all(now[1] > before[1] for now, before in zip(step.host_buffers, after_one, strict=True))
    host = problem.machine.devices[0].host_memory
    limits = [max(one.planned_bytes[host].values()) for one in step._prepared.lists]
    assert all(pool.held_bytes <= limit for pool, limit in zip(step._pools, limits, strict=True))


def test_what_the_caller_gave_is_still_there(case):
    params, state = case.params, OPTIMIZER.init(case.params)
    problem = case.problem()
    step = planned(case, problem, plan(problem, "offload-all"))
    before = jax.tree.map(np.array, (params, state))
    batches = case.batches()
    copies = jax.tree.map(np.array, batches)
    step.step(batches)
    step.step(case.batches(5))
    assert identical((params, state), before) and identical(batches, copies)


@pytest.mark.long
def test_a_step_of_merged_ops_gives_the_same_numbers():
    merged = perceptron(gpus=2, coarsen="layer")
    problem = merged.problem()
    step = planned(merged, problem, plan(problem, "keep-all"))
    step.step(merged.batches())
    params, state, _ = merged.unplanned(merged.batches())
    assert largest_difference(step.state()[:2], (params, state)) < TOLERANCE
