"""PyTorch steps by a plan: the same gradients bit for bit, never more memory than planned, clear errors."""

import copy
import json
import os
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch", reason="PyTorch is an optional extra: pip install 'tmojax[torch]'")
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed._tools.mem_tracker import MemTracker
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch_plans import (
    GPU,
    NETWORKS,
    any_plan,
    batch_of,
    batches_of,
    imported_step,
    machine_of,
    network,
    ordinary_gradients,
    planned,
    problem_of,
)

from tmojax.check import check
from tmojax.errors import InputError
from tmojax.execute_torch import PlannedTorchStep
from tmojax.execute_torch.host_pool import HostPool
from tmojax.execute_torch.ledger import MemoryExceeded
from tmojax.execute_torch.turns import find_turns
from tmojax.importers.torch_importer import import_torch_step
from tmojax.problem import Kind, LinkPolicy, LinkPolicyKind, ListBuilder, Problem, Schedule
from tmojax.problem.io import PlanFile, problem_hash, write_plan, write_problem
from tmojax.problem.schedule import INSTRUCTION
from tmojax.report.links import shared_links

CASES = [
    ("mlp", "keep-all", 1.0),
    ("mlp", "offload-all", 0.8),
    ("mlp", "ratio-sweep", 0.85),
    ("gpt2", "offload-all", 0.7),
    ("gpt2", "recompute-all", 0.85),
    ("gpt2-dropout", "ratio-sweep", 0.75),
    ("resnet", "recompute-all", 0.7),
    ("resnet", "ratio-sweep", 0.75),
    ("vit", "offload-all", 0.7),
]


def run(name, imported, problem, plan, micro_batches=1):
    """(gradients, outcome) of one planned step."""
    module, loss, _ = network(name)
    torch.manual_seed(1)
    outcome = PlannedTorchStep(imported, problem, plan).step(module, loss, batches_of(name, micro_batches))
    return [p.grad for p in module.parameters() if p.grad is not None], outcome


def require_right(name, gradients, outcome, micro_batches=1):
    expected = ordinary_gradients(name, batches_of(name, micro_batches))
    assert all(torch.equal(a, b) for a, b in zip(gradients, expected, strict=True))
    assert outcome.counted_bytes and outcome.counted_peak_bytes > 0
    for position, counted in outcome.counted_bytes.items():
        assert counted <= outcome.planned_bytes[position]
    assert outcome.host_bytes <= outcome.planned_host_bytes


@pytest.mark.parametrize(("name", "planner", "factor"), CASES)
def test_gradients_are_equal_and_memory_is_within_the_plan(name, planner, factor):
    imported = imported_step(name)
    problem = problem_of(imported, factor)
    gradients, outcome = run(name, imported, problem, planned(problem, planner))
    require_right(name, gradients, outcome)
    assert outcome.planned_peak_bytes <= problem.capacity_bytes(0)


def test_what_is_kept_counts_exactly_as_planned():
    """Storages of every kernel of the transformer are in the plan, so the two counts are one number."""
    imported = imported_step("gpt2")
    problem = problem_of(imported)
    _, outcome = run("gpt2", imported, problem, planned(problem, "keep-all"))
    assert outcome.counted_peak_bytes == outcome.planned_peak_bytes == problem.capacity_bytes(0)


@pytest.mark.parametrize("name", NETWORKS)
def test_pytorchs_own_tracker_counts_the_same(name):
    """The peak of the ordinary step, measured by PyTorch, is that of the step that keeps everything."""
    module, loss, batch = network(name)
    for parameter in module.parameters():
        parameter.grad = torch.zeros_like(parameter)
    tracker = MemTracker()
    tracker.track_external(module, *(p.grad for p in module.parameters()), *batch.values())
    with tracker:
        value = loss(module, batch)
        value.backward()
    theirs = tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"]
    problem = problem_of(imported_step(name))
    _, outcome = run(name, imported_step(name), problem, planned(problem, "keep-all"))
    assert outcome.counted_peak_bytes == theirs


@settings(max_examples=8, deadline=None)
@given(name=st.sampled_from(NETWORKS), seed=st.integers(0, 10**6))
def test_any_decisions_give_the_same_gradients(name, seed):
    imported = imported_step(name)
    problem = problem_of(imported, 2.0)
    plan = any_plan(problem, seed)
    assert check(problem, plan).valid
    require_right(name, *run(name, imported, problem, plan))


@pytest.mark.long
@settings(max_examples=150, deadline=None)
@given(name=st.sampled_from(NETWORKS), seed=st.integers(0, 10**6))
def test_many_decisions_give_the_same_gradients(name, seed):
    problem = problem_of(imported_step(name), 2.0)
    require_right(name, *run(name, imported_step(name), problem, any_plan(problem, seed)))


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, *gradients):
        (x,) = ctx.saved_tensors
        return 2 * x * gradients[0]


class OwnFunction(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(16, 32), nn.Linear(32, 16)
        self.first.weight.requires_grad_(False)

    def forward(self, x):
        return self.second(Square.apply(self.first(x)))


class OwnCheckpoint(OwnFunction):
    def forward(self, x):
        return checkpoint(super().forward, x, use_reentrant=False)


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm, self.head = nn.LSTM(16, 16, 2), nn.Linear(16, 4)

    def forward(self, x):
        return self.head(self.lstm(x)[0])


TEACHER = nn.Linear(16, 16)


def mean_square(module, x):
    return module(x).square().mean()


def lower_precision(module, x):
    with torch.autocast("cpu", torch.bfloat16):
        y = module(x)
    return y.float().square().mean()


def from_a_teacher(module, x):
    return F.mse_loss(module(x), TEACHER(x).detach())


@pytest.mark.parametrize(
    ("make", "loss", "fake"),
    [
        (OwnFunction, mean_square, True),
        (OwnCheckpoint, mean_square, True),
        (lambda: nn.Sequential(nn.Linear(16, 32), nn.SiLU(), nn.Linear(32, 16)), from_a_teacher, True),
        (lambda: nn.TransformerEncoderLayer(16, 4, 32, 0.1, batch_first=True), mean_square, True),
        (lambda: nn.Sequential(nn.Linear(16, 64), nn.LayerNorm(64), nn.Linear(64, 4)), lower_precision, False),
        (Recurrent, mean_square, False),
    ],
    ids=["function", "checkpoint", "teacher", "encoder", "autocast", "lstm"],
)
def test_kinds_of_modules(make, loss, fake):
    torch.manual_seed(0)
    module, batch = make(), torch.randn(4, 8, 16)
    plain = copy.deepcopy(module)
    imported = import_torch_step(module, loss, batch, gpu=GPU, fake=fake)
    problem = problem_of(imported, 2.0)
    torch.manual_seed(1)
    value = loss(plain, batch)
    value.backward()
    for plan in (planned(problem, "offload-all"), planned(problem, "recompute-all"), any_plan(problem, 7)):
        torch.manual_seed(1)
        outcome = PlannedTorchStep(imported, problem, plan).step(module, loss, [batch])
        assert outcome.losses == (float(value.detach()),)
        for ours, theirs in zip(module.parameters(), plain.parameters(), strict=True):
            assert torch.equal(ours.grad, theirs.grad) if theirs.grad is not None else not ours.requires_grad
        assert all(count <= outcome.planned_bytes[i] for i, count in outcome.counted_bytes.items())


def test_kernels_that_return_more_than_fake_tensors_know_are_told():
    module, batch = Recurrent(), torch.randn(4, 8, 16)
    imported = import_torch_step(module, mean_square, batch, gpu=GPU)
    problem = problem_of(imported)
    with pytest.raises(InputError, match="with fake=False"):
        PlannedTorchStep(imported, problem, planned(problem, "keep-all")).step(module, mean_square, [batch])


def test_micro_batches_are_averaged():
    imported = imported_step("gpt2", micro_batches=3)
    problem = problem_of(imported, 0.7)
    gradients, outcome = run("gpt2", imported, problem, planned(problem, "offload-all"), 3)
    require_right("gpt2", gradients, outcome, 3)
    assert len(outcome.losses) == 3


def trained(steps, imported_with, planner, factor, **settings):
    """(parameters, optimizer state, expected ones, outcomes, planned step): AdamW by a plan, and without one."""
    (module, loss, batch), (plain, _, _) = network("gpt2"), network("gpt2")
    optimizer, other = (torch.optim.AdamW(m.parameters(), lr=0.01) for m in (module, plain))
    for own, its in ((module, optimizer), (plain, other)):
        loss(own, batch).backward()
        its.step()
    imported = import_torch_step(module, loss, batch, gpu=GPU, optimizer=optimizer)
    problem = problem_of(imported, factor)
    given = {"optimizer": optimizer} if imported_with else {}
    step = PlannedTorchStep(imported, problem, planned(problem, planner), **given)
    outcomes = []
    for seed in range(steps):
        outcomes.append(step.step(module, loss, [batch_of("gpt2", seed)]))
        if not imported_with:
            optimizer.step()
        other.zero_grad()
        loss(plain, batch_of("gpt2", seed)).backward()
        other.step()
    return module, optimizer, plain, other, outcomes, step


def moments(optimizer):
    return [state[name] for state in optimizer.state.values() for name in ("exp_avg", "exp_avg_sq", "step")]


def test_training_is_the_same():
    """Three steps with AdamW, whose state the plan counts and leaves alone, give the same parameters."""
    module, _, plain, _, _, _ = trained(3, False, "recompute-all", 0.95)
    assert all(torch.equal(a, b) for a, b in zip(module.parameters(), plain.parameters(), strict=True))


@pytest.mark.parametrize("planner", ["offload-all", "ratio-sweep"])
def test_optimizer_state_moves(planner):
    """It rests on the host while forward and backward run; the update is part of the step."""
    module, optimizer, plain, other, outcomes, step = trained(3, True, planner, 0.6)
    assert all(torch.equal(a, b) for a, b in zip(module.parameters(), plain.parameters(), strict=True))
    for outcome in outcomes:
        assert all(count <= outcome.planned_bytes[i] for i, count in outcome.counted_bytes.items())
        assert outcome.host_bytes <= outcome.planned_host_bytes
    if planner == "offload-all":  # the other one leaves it on the device between steps
        assert any(state.untyped_storage().nbytes() == 0 for state in moments(optimizer))
    step.state_on_device()
    assert all(torch.equal(a, b) for a, b in zip(moments(optimizer), moments(other), strict=True))


def test_optimizer_state_needs_the_optimizer():
    with pytest.raises(InputError, match=r"moves 'optimizer state of .*; give the optimizer to PlannedTorchStep"):
        trained(1, False, "offload-all", 0.6)
    imported = imported_step("gpt2")
    problem = problem_of(imported)
    optimizer = torch.optim.AdamW(network("gpt2")[0].parameters())
    with pytest.raises(InputError, match="optimizer: the step was imported without one"):
        PlannedTorchStep(imported, problem, planned(problem, "keep-all"), optimizer=optimizer)


def test_another_optimizer_state_is_refused():
    module, loss, batch = network("mlp")
    optimizer = torch.optim.AdamW(module.parameters())
    loss(module, batch).backward()
    optimizer.step()
    imported = import_torch_step(module, loss, batch, gpu=GPU, optimizer=optimizer)
    problem = problem_of(imported)
    plan = planned(problem, "keep-all")
    other = torch.optim.SGD(module.parameters(), momentum=0.9)
    with pytest.raises(InputError, match=r"has 0 bytes, and \d+ when it was imported"):
        PlannedTorchStep(imported, problem, plan, optimizer=other).step(module, loss, [batch])
    step = PlannedTorchStep(imported, problem, plan, optimizer=optimizer)
    step.step(module, loss, [batch])
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    with pytest.raises(InputError, match="is another tensor than in the last step"):
        step.step(module, loss, [batch])


def test_buffers_of_the_host_are_used_again():
    imported = imported_step("mlp")
    problem = problem_of(imported, 0.8)
    step = PlannedTorchStep(imported, problem, planned(problem, "offload-all"))
    module, loss, batch = network("mlp")
    for _ in range(3):
        step.step(module, loss, [batch])
    made, again = step.host_buffers
    assert 0 < made < again


def test_the_pool_stays_within_its_limit():
    pool = HostPool(100, pinned=False)
    first, second = pool.take(60), pool.take(40)
    pool.give_back(first)
    assert pool.take(60) is first and (pool.allocated, pool.reused, pool.most_bytes) == (2, 1, 100)
    pool.give_back(first)
    pool.give_back(second)
    other = pool.take(50)  # a buffer of another size: the free one of 60 goes
    assert pool.take(40) is second and other.content.nbytes == 50
    pool.give_back(other)
    assert pool.take(50) is other


def test_buffers_of_the_module_are_updated_once():
    """Recomputation runs no kernel again that changes running statistics."""
    imported = imported_step("resnet")
    problem = problem_of(imported, 0.7)
    (module, loss, batch), (plain, _, _) = network("resnet"), network("resnet")
    PlannedTorchStep(imported, problem, planned(problem, "recompute-all")).step(module, loss, [batch])
    loss(plain, batch)
    for ours, theirs in zip(module.buffers(), plain.buffers(), strict=True):
        assert torch.equal(ours, theirs)


def test_ops_are_timed():
    imported = imported_step("mlp")
    problem = problem_of(imported)
    module, loss, batch = network("mlp")
    step = PlannedTorchStep(imported, problem, planned(problem, "keep-all"))
    outcome = step.step(module, loss, [batch], measure=True)
    assert set(outcome.op_s) == set(imported.op_of) and all(seconds > 0 for seconds in outcome.op_s.values())
    measured = imported.with_durations(outcome.op_s).workload
    assert all(measured.programs[0].ops[op].duration_s == seconds for op, seconds in outcome.op_s.items())
    assert measured.duration_source.startswith("measured")


def test_more_memory_than_planned_is_an_error():
    """The count is of real storages: a workload that forgets what ops need is found out."""
    imported = imported_step("gpt2")
    program = imported.workload.programs[0]
    forgetful = tuple(replace(op, workspace_bytes=0) for op in program.ops)
    imported = replace(imported, workload=replace(imported.workload, programs=(replace(program, ops=forgetful),)))
    problem = problem_of(imported)
    module, loss, batch = network("gpt2")
    with pytest.raises(MemoryExceeded, match="bytes are live on the device at instruction"):
        PlannedTorchStep(imported, problem, planned(problem, "keep-all")).step(module, loss, [batch])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU that PyTorch sees")
@pytest.mark.parametrize("planner", ["offload-all", "recompute-all", "ratio-sweep"])
def test_on_a_gpu(planner):
    module, loss, batch = network("gpt2")
    plain = copy.deepcopy(module).cuda()
    imported = import_torch_step(module.cuda(), loss, {key: value.cuda() for key, value in batch.items()}, gpu=GPU)
    problem = problem_of(imported, 0.9)
    step = PlannedTorchStep(imported, problem, planned(problem, planner))
    for _ in range(3):
        outcome = step.step(module, loss, [batch])
    loss(plain, {key: value.cuda() for key, value in batch.items()}).backward()
    for ours, theirs in zip(module.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)  # some kernels add in any order
    assert all(count <= outcome.planned_bytes[i] for i, count in outcome.counted_bytes.items())


# --- two ranks -----------------------------------------------------------------------------------------------------


def mixed_plan(problem: Problem) -> Schedule:
    """Rank 0 offloads, rank 1 recomputes; rank 1 starts backward when rank 0 has ended its forward pass."""
    one, other = planned(problem, "offload-all"), planned(problem, "recompute-all")
    first, second = one.lists[0].copy(), other.lists[1].copy()
    program = problem.workload.program(0)
    backward = next(i for i, op in enumerate(program.ops) if op.phase == "backward")
    start = int(np.flatnonzero((second["kind"] == Kind.COMPUTE) & (second["op"] == backward))[0])
    end = int(np.flatnonzero((first["kind"] == Kind.COMPUTE) & (first["op"] == backward - 1))[0])
    builder = ListBuilder()
    builder.signal(0, end)
    builder.wait(0, 0)
    signal, wait = builder.build()
    return Schedule(
        (np.insert(first, end + 1, signal).astype(INSTRUCTION), np.insert(second, start, wait).astype(INSTRUCTION)),
        (one.initial[0], other.initial[1]),
    )


def two_ranks(name, problem, plan, folder):
    """What two processes print that run a step by a plan."""
    report = check(problem, plan)
    assert report.valid, report.violations[:3]
    write_problem(folder / "problem.json", problem)
    write_plan(folder / "plan.json", PlanFile(plan, problem_hash(problem), "mixed", "feasible"))
    here = Path(__file__).parent
    command = [sys.executable, "-W", "error::UserWarning:tmojax", str(here / "torch_rank.py")]
    files = [str(folder / "meeting"), name, str(folder / "problem.json"), str(folder / "plan.json")]
    ranks = [
        subprocess.Popen([*command, str(rank), *files], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                         env=os.environ | {"OMP_NUM_THREADS": "1"})
        for rank in range(2)
    ]  # fmt: skip
    found = []
    for rank in ranks:
        out, error = rank.communicate(timeout=300)
        assert rank.returncode == 0, error
        found.append(json.loads(out.splitlines()[-1]))
    assert all(one["equal"] and one["within"] for one in found)
    return found


@pytest.mark.parametrize("name", ["gpt2", pytest.param("resnet", marks=pytest.mark.long)])
def test_two_ranks_with_different_plans(name, tmp_path):
    problem = problem_of(imported_step(name, gpus=2, micro_batches=2), 0.9)
    found = two_ranks(name, problem, mixed_plan(problem), tmp_path)
    assert found[0]["host_bytes"] > 0 == found[1]["host_bytes"]
    assert found[0]["peak_bytes"] != found[1]["peak_bytes"]


def taking_turns():
    """(problem, plan, sequence): two ranks offload over one path to the host, one copy of each in turn."""
    problem = problem_of(imported_step("mlp", gpus=2, micro_batches=2), 0.8)
    problem = replace(problem, machine=machine_of("prototype-4gpu-12.5", 2)).with_device_capacity(
        problem.capacity_bytes(0)
    )
    plan = planned(problem, "offload-all")
    (link,) = shared_links(problem)[:1]

    def crosses(device, index):
        row = plan.lists[device][index]
        if row["kind"] not in (Kind.OFFLOAD, Kind.PREFETCH):
            return False
        return link in problem.machine.route(int(row["memory"]), int(row["to_memory"])).links

    own = [[(d, i) for i in range(len(rows)) if crosses(d, i)] for d, rows in enumerate(plan.lists)]
    sequence = tuple(place for pair in zip(*own, strict=True) for place in pair)
    return problem, plan, link, sequence


def ordered(problem, plan, link, sequence):
    policies = [LinkPolicy()] * len(problem.machine.links)
    policies[link] = LinkPolicy(LinkPolicyKind.ORDER, 1, (), sequence)
    return replace(plan, link_policies=tuple(policies))


def test_two_ranks_take_their_turns(tmp_path):
    problem, plan, link, sequence = taking_turns()
    found = two_ranks("mlp", problem, ordered(problem, plan, link, sequence), tmp_path)
    for step in range(2):
        spans = {}
        for device, one in enumerate(found):
            count = len(one["spans"]) // 2
            for index, begin_s, end_s in one["spans"][step * count : (step + 1) * count]:
                spans[device, index] = begin_s, end_s
        times = [spans[place] for place in sequence]
        assert len(times) > 10
        assert all(later[0] >= earlier[1] for earlier, later in pairwise(times))


def test_turns_that_a_list_in_order_cannot_keep_are_told():
    problem, plan, link, sequence = taking_turns()
    kept = find_turns(problem, ordered(problem, plan, link, sequence))
    assert kept.told == () and len(kept.before) == len(sequence) - 1
    found = find_turns(problem, ordered(problem, plan, link, sequence[::-1]))
    assert found.before == {} and "the order of a list contradict" in found.told[0]


def test_lists_that_block_each_other_in_order_are_refused():
    """Each waits, on the stream of its copies, for an op that the other runs after its own wait: streams resolve it."""
    problem, plan, _, _ = taking_turns()
    first = problem.machine.devices[0]
    engine = 2 + problem.machine.route(first.memory, first.host_memory).engines[0]
    lists = []
    for device, rows in enumerate(plan.lists):
        at = int(np.flatnonzero(rows["kind"] == Kind.COMPUTE)[3])
        builder = ListBuilder()
        builder.wait(1 - device, engine + 2 * device)
        wait = builder.build()
        builder = ListBuilder()
        builder.signal(device, at + 2)
        rows = np.insert(rows, at + 2, builder.build())
        lists.append(np.insert(rows, at, wait).astype(INSTRUCTION))
    with pytest.raises(InputError, match="in a way that only separate streams resolve"):
        find_turns(problem, replace(plan, lists=tuple(lists)))


# --- errors --------------------------------------------------------------------------------------------------------


def changed(plan: Schedule, change) -> Schedule:
    rows = plan.lists[0].copy()
    change(rows)
    return replace(plan, lists=(rows,))


def offload_row(plan: Schedule) -> int:
    return int(np.flatnonzero(plan.lists[0]["kind"] == Kind.OFFLOAD)[0])


@pytest.fixture(scope="module")
def offloaded():
    imported = imported_step("gpt2")
    problem = problem_of(imported, 0.8)
    return imported, problem, planned(problem, "offload-all")


def test_a_plan_of_another_step_is_refused(offloaded):
    imported, problem, plan = offloaded
    with pytest.raises(InputError, match="the plan is of another step"):
        PlannedTorchStep(imported_step("mlp"), problem, plan)
    with pytest.raises(InputError, match=r"of problem .*, not of this one"):
        PlannedTorchStep(imported, problem_of(imported, 0.9), PlanFile(plan, problem_hash(problem), "x", "feasible"))
    with pytest.raises(InputError, match="micro-batch"):
        PlannedTorchStep(imported_step("gpt2", micro_batches=2), problem, plan)


def test_a_name_that_is_missing_is_named(offloaded):
    imported, problem, plan = offloaded
    program = problem.workload.programs[0]
    index = len(program.tensors) // 2
    renamed = replace(program.tensors[index], name="h.7.fc:out")
    tensors = (*program.tensors[:index], renamed, *program.tensors[index + 1 :])
    other = replace(problem, workload=replace(problem.workload, programs=(replace(program, tensors=tensors),)))
    with pytest.raises(InputError, match=r"'h\.7\.fc:out': the plan is of another step"):
        PlannedTorchStep(imported, other, plan)


def test_another_number_of_ranks_is_refused():
    imported = imported_step("mlp", gpus=2)
    problem = problem_of(imported)
    with pytest.raises(InputError, match=r"1 take part and the plan is for 2 device"):
        PlannedTorchStep(imported, problem, planned(problem, "keep-all"))


def test_tensors_whose_memory_is_gone_are_named(offloaded):
    imported, problem, plan = offloaded
    step = PlannedTorchStep(imported, problem, plan)
    module, loss, batch = network("gpt2")
    key = min(batch)
    gone = batch[key].clone()
    gone.untyped_storage().resize_(0)
    with pytest.raises(InputError, match=r"batches\[0\]: the tensor has no memory, its storage was freed"):
        step.step(module, loss, [batch | {key: gone}])
    name, parameter = next(iter(module.named_parameters()))
    parameter.data.untyped_storage().resize_(0)
    with pytest.raises(InputError, match=f"{name}: the tensor has no memory"):
        step.step(module, loss, [batch])


def test_other_kernels_than_imported_are_refused(offloaded):
    imported, problem, plan = offloaded
    step = PlannedTorchStep(imported, problem, plan)
    module, loss, batch = network("gpt2")
    with pytest.raises(InputError, match="import it with the same module, loss and shapes"):
        step.step(module, lambda m, b: loss(m, b) * 2, [batch])
    with pytest.raises(InputError, match="import it with a batch of the same shapes"):
        step.step(module, loss, [{key: value[:2] for key, value in batch.items()}])
    with pytest.raises(InputError, match="2 given"):
        step.step(module, loss, [batch, batch])
    require_right("gpt2", *run("gpt2", imported, problem, plan))  # and nothing is left over from them


def test_turns_on_links_are_told(offloaded):
    imported, problem, plan = offloaded
    turns = replace(plan, link_policies=tuple(LinkPolicy(LinkPolicyKind.FCFS) for _ in problem.machine.links))
    with pytest.warns(UserWarning, match=f"turns on links .*{problem.machine.links[0].name}: fcfs.* are not enforced"):
        PlannedTorchStep(imported, problem, turns)


def test_parameters_cannot_be_moved(offloaded):
    imported, problem, plan = offloaded
    rows = plan.lists[0]
    weights = next(i for i, t in enumerate(problem.workload.programs[0].tensors) if t.name == "parameters and buffers")
    builder = ListBuilder()
    builder.offload(weights, 0, 0, problem.machine.devices[0].host_memory)
    builder.release(weights, 0, problem.machine.devices[0].host_memory)
    moved = replace(plan, lists=(np.concatenate([rows, builder.build()]),))
    assert check(problem, moved).valid
    with pytest.raises(InputError, match=r"'parameters and buffers' away from the device.*: use a plan that"):
        PlannedTorchStep(imported, problem, moved)


def test_gradients_under_way_cannot_be_moved(offloaded):
    imported, problem, plan = offloaded
    rows, program = plan.lists[0], problem.workload.programs[0]
    op = next(i for i, op in enumerate(program.ops) if op.phase == "backward" and op.writes)
    place = int(np.flatnonzero((rows["kind"] == Kind.COMPUTE) & (rows["op"] == op))[0])
    host = problem.machine.devices[0].host_memory
    builder = ListBuilder()
    builder.offload(program.ops[op].writes[0], 0, 0, host)
    builder.release(program.ops[op].writes[0], 0, host)
    with pytest.raises(InputError, match="a gradient that autograd passes on"):
        PlannedTorchStep(imported, problem, replace(plan, lists=(np.insert(rows, place + 1, builder.build()),)))


def test_what_python_holds_cannot_be_freed():
    imported = imported_step("gpt2")
    problem = problem_of(imported)
    plan, program = planned(problem, "keep-all"), problem.workload.programs[0]
    tensor = max(imported.held_to, key=lambda t: imported.held_to[t] - program.producer[t])
    made = program.producer[tensor]
    assert imported.held_to[tensor] > made + 2
    rows, host = plan.lists[0], problem.machine.devices[0].host_memory
    place = int(np.flatnonzero((rows["kind"] == Kind.COMPUTE) & (rows["op"] == made + 1))[0])
    builder = ListBuilder()
    builder.offload(tensor, 0, 0, host)
    builder.release(tensor, 0, 0)
    builder.prefetch(tensor, 0, host, 0)
    builder.release(tensor, 0, host)
    early = replace(plan, lists=(np.insert(rows, place + 1, builder.build()),))
    assert check(problem, early).valid
    with pytest.raises(InputError, match="while the module's own code still holds it"):
        PlannedTorchStep(imported, problem, early)


def test_aliases_cannot_be_moved_alone(offloaded):
    """The importer makes one tensor of a storage; a workload from elsewhere may name storages twice."""
    imported, problem, plan = offloaded
    program = problem.workload.programs[0]
    moved = int(plan.lists[0]["tensor"][offload_row(plan)])
    tensors = tuple(replace(t, alias_group="one") if i == moved else t for i, t in enumerate(program.tensors))
    workload = replace(problem.workload, programs=(replace(program, tensors=tensors),))
    with pytest.raises(InputError, match="shares its storage"):
        PlannedTorchStep(replace(imported, workload=workload), replace(problem, workload=workload), plan)


def test_a_plan_that_the_checker_rejects_is_refused(offloaded):
    imported, problem, plan = offloaded
    with pytest.raises(InputError, match="the checker rejects it"):
        PlannedTorchStep(imported, problem, changed(plan, lambda rows: rows["kind"].__setitem__(offload_row(plan), 3)))


def test_the_import_must_be_of_the_same_device():
    imported = imported_step("mlp")
    problem = problem_of(imported)
    elsewhere = replace(imported, traced=replace(imported.traced, device="cuda"))
    module, loss, batch = network("mlp")
    with pytest.raises(InputError, match="was imported on 'cuda'"):
        PlannedTorchStep(elsewhere, problem, planned(problem, "keep-all")).step(module, loss, [batch])
