"""Copies that are encoded, lie on a drive, or in the memory of a peer, on real arrays."""

import itertools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from steps import OPTIMIZER, identical, largest_difference, perceptron, plan

from tmojax import PLANNERS, Action, InputError
from tmojax.check import check
from tmojax.execute import MeasuredTimes, PlannedStep
from tmojax.execute.codecs import Recodings
from tmojax.problem import INSTRUCTION, Codec, Kind, Link, ListBuilder, Memory, Route
from tmojax.problem.machine import MemoryKind

HALF = Codec("bfloat16", 1, 2, 1e12, 1e12)


@pytest.fixture(scope="module")
def case():
    return perceptron(gpus=2)


def with_codec(problem, codec=HALF):
    return replace(problem, machine=replace(problem.machine, codecs=(codec,)))


def with_drive(problem):
    """The machine with a drive under its host, next to the engines that it has."""
    machine = problem.machine
    host, drive = machine.devices[0].host_memory, len(machine.memories)
    links, engines = len(machine.links), len(machine.engines)
    return replace(
        problem,
        machine=replace(
            machine,
            memories=(*machine.memories, Memory("drive", MemoryKind.NVME, 10**9)),
            links=(*machine.links, Link("drive.write", 1e9), Link("drive.read", 1e9)),
            engines=(*machine.engines, "drive.write", "drive.read"),
            routes=(
                *machine.routes,
                Route(host, drive, (links,), (engines,)),
                Route(drive, host, (links + 1,), (engines + 1,)),
            ),
        ),
    )  # fmt: skip


def longest_idle(problem, own, micro_batch=0):
    """(tensor, place after its last use in forward, place of its next use) of the activation that idles longest."""
    program = problem.workload.program(0)
    found = []
    for tensor, spec in enumerate(program.tensors):
        if spec.kind != "activation":
            continue
        uses = [
            i for i, row in enumerate(own)
            if row["kind"] == Kind.COMPUTE and row["micro_batch"] == micro_batch
            and tensor in (*program.ops[row["op"]].reads, *program.ops[row["op"]].writes)
        ]  # fmt: skip
        found += [(b - a, tensor, a + 1, b) for a, b in itertools.pairwise(uses)]
    _, tensor, gone, back = max(found)
    return tensor, gone, back


def inserted(problem, schedule, device, away, home):
    """The schedule with `away(builder, tensor)` behind the last use of a tensor, `home` ahead of the next one."""
    own = schedule.lists[device]
    tensor, gone, back = longest_idle(problem, own)
    parts = []
    for fill in (away, home):
        builder = ListBuilder()
        fill(builder, tensor)
        parts.append(builder.build())
    rows = np.concatenate([own[:gone], parts[0], own[gone:back], parts[1], own[back:]]).astype(INSTRUCTION)
    lists = tuple(rows if d == device else other for d, other in enumerate(schedule.lists))
    return replace(schedule, lists=lists), tensor


def run(case, problem, schedule, **settings):
    """Two steps, by joined ops and op by op; returns the latter."""
    report = check(problem, schedule)
    assert report.valid, report.text()
    states = []
    for segments in ("joined", "ops"):
        step = PlannedStep(case.compiled, problem, schedule, segments=segments, **settings)
        step.load(case.params, OPTIMIZER.init(case.params))
        for _ in range(2):
            result = step.step(case.batches(), measure=True)
            for counts in result.memory:
                for count in counts:
                    assert all(size <= count.planned_bytes[at] for at, size in count.counted_bytes.items())
        states.append(step.state())
    assert MeasuredTimes(problem, schedule, result).step_s > 0
    # A number on the edge between two of the codec's may fall to the other side.
    assert largest_difference(states[0][0], states[1][0]) < (2e-2 if problem.machine.codecs else 2e-5)
    return step, result


@pytest.fixture(scope="module")
def kept(case):
    problem = case.problem(1.5)
    schedule = plan(problem, "keep-all")
    return problem, schedule, run(case, problem, schedule)[0].state()


def encoded_to_host(problem, schedule, to=None):
    """GPU 0 encodes an activation, sends it to the host, and the reverse."""
    here, there = problem.machine.devices[0].memory, problem.machine.devices[0].host_memory

    def away(b, t):
        b.encode(t, 0, here, 0)
        b.release(t, 0, here)
        b.offload(t, 0, here, there, form=0)
        b.release(t, 0, here, form=0)

    def home(b, t):
        b.prefetch(t, 0, there, here, form=0)
        b.release(t, 0, there, form=0)
        b.decode(t, 0, here, 0)
        b.release(t, 0, here, form=0)

    return inserted(problem, schedule, 0, away, home)


def test_an_encoded_copy_goes_to_the_host_and_returns(case, kept):
    problem, schedule, state = kept
    problem = with_codec(problem)
    changed, tensor = encoded_to_host(problem, schedule)
    step, result = run(case, problem, changed)
    # bfloat16 keeps eight bits: one activation of one micro-batch is off by 2^-9, and AdamW normalises the gradient.
    assert not identical(step.state(), state)
    assert largest_difference(step.state()[0], state[0]) < 2e-2
    size = problem.workload.program(0).tensors[tensor].size_bytes
    host = problem.machine.devices[0].host_memory
    assert result.memory[0][host].counted_peak_bytes < size + result.memory[1][host].counted_peak_bytes
    assert identical(step.state(0), step.state(1))


@pytest.mark.parametrize(
    ("codec", "message"),
    [
        (replace(HALF, name="zstd"), r"encode of '.*': codec 'zstd' has no meaning for real numbers.*bfloat16"),
        (
            replace(HALF, name="float8_e5m2", numerator=1, denominator=8),
            r"encode of '.*': codec .* makes \d+ bytes of \d+.*ratio to 1/4",
        ),
    ],
)
def test_codecs_that_are_none_are_refused_before_anything_runs(case, kept, codec, message):
    problem, schedule, _ = kept
    problem = with_codec(problem, codec)
    changed, _ = encoded_to_host(problem, schedule)
    with pytest.raises(InputError, match=f"gpu0 #\\d+: {message}"):
        PlannedStep(case.compiled, problem, changed)


def test_a_tensor_rests_on_a_drive(case, kept, tmp_path):
    """From the GPU to the host, from there to the drive, and back the same way; no bit changes."""
    problem, schedule, state = kept
    problem = with_drive(problem)
    schedule = replace(schedule, link_policies=())
    here, host = problem.machine.devices[0].memory, problem.machine.devices[0].host_memory
    drive = len(problem.machine.memories) - 1

    def away(b, t):
        b.offload(t, 0, here, host)
        b.release(t, 0, here)
        b.offload(t, 0, host, drive)
        b.release(t, 0, host)

    def home(b, t):
        b.prefetch(t, 0, drive, host)
        b.release(t, 0, drive)
        b.prefetch(t, 0, host, here)
        b.release(t, 0, host)

    changed, tensor = inserted(problem, schedule, 0, away, home)
    step, result = run(case, problem, changed, nvme_folder=tmp_path)
    assert identical(step.state(), state)
    size = problem.workload.program(0).tensors[tensor].size_bytes
    assert result.memory[0][drive].counted_peak_bytes == size == result.memory[0][drive].planned_peak_bytes
    (folder,) = tmp_path.iterdir()
    assert [file.stat().st_size for file in folder.iterdir()] == [size]  # one file for both steps
    with pytest.raises(InputError, match=r"nvme_folder: 'None' is no folder, and the plan uses memory 'drive'"):
        PlannedStep(case.compiled, problem, changed)


def test_state_rests_on_a_drive(case, kept, tmp_path):
    """An optimizer state that begins and ends every step on the drive."""
    problem, schedule, state = kept
    problem = with_drive(problem)
    here, host = problem.machine.devices[0].memory, problem.machine.devices[0].host_memory
    drive = len(problem.machine.memories) - 1
    program = problem.workload.program(0)
    tensor = next(
        t for t, spec in enumerate(program.tensors) if spec.kind == "optimizer_state" and spec.size_bytes > 64
    )
    own = schedule.lists[0]
    use = next(i for i, r in enumerate(own) if r["kind"] == Kind.COMPUTE
               and tensor in (*program.ops[r["op"]].reads, *program.ops[r["op"]].updates))  # fmt: skip
    first, last = ListBuilder(), ListBuilder()
    first.prefetch(tensor, 0, drive, host)
    first.prefetch(tensor, 0, host, here)
    first.release(tensor, 0, host)
    last.offload(tensor, 0, here, host)
    last.offload(tensor, 0, host, drive)
    last.release(tensor, 0, here)
    last.release(tensor, 0, host)
    rows = np.concatenate([own[:use], first.build(), own[use : use + 1], last.build(), own[use + 1 :]])
    initial = tuple(
        replace(p, memories=(drive,)) if p.tensor == tensor else p for p in schedule.initial[0]
    )  # fmt: skip
    changed = replace(
        schedule, lists=(rows.astype(INSTRUCTION), *schedule.lists[1:]), initial=(initial, *schedule.initial[1:]),
        link_policies=(),
    )  # fmt: skip
    step, _ = run(case, problem, changed, nvme_folder=tmp_path)
    assert identical(step.state(), state)


def test_a_planned_loan_runs(case):
    """The planner parks what a small GPU cannot hold in the memory of a large one; no bit changes."""
    problem, _, state = problem_with_peers(case)
    schedule = PLANNERS["peer-offload"]().plan(problem).schedule
    assert schedule is not None and (schedule.lists[1]["kind"] == Kind.LEND).any()
    step, result = run(case, problem, schedule)
    assert identical(step.state(0), state) and identical(step.state(1), state)
    lender = problem.machine.devices[1].memory
    assert result.memory[0][lender].counted_peak_bytes > 0
    assert result.memory[0][lender].counted_peak_bytes <= result.memory[0][lender].planned_peak_bytes


def problem_with_peers(case):
    """GPU 0 has 90 % of the footprint, GPU 1 more than it needs; they reach each other."""
    problem = case.problem(1.5)
    state = run(case, problem, plan(problem, "keep-all"))[0].state()
    first, second = (device.memory for device in problem.machine.devices)
    memories = list(problem.machine.memories)
    memories[first] = replace(memories[first], capacity_bytes=case.footprint_bytes * 9 // 10)
    memories[second] = replace(memories[second], capacity_bytes=2 * case.footprint_bytes)
    machine = replace(problem.machine, memories=tuple(memories))
    return replace(problem, machine=machine, actions=frozenset({Action.OFFLOAD, Action.PEER})), first, state


def test_a_plan_that_compresses_runs(case, kept):
    _, _, state = kept
    problem = with_codec(case.problem(0.9))
    problem = replace(problem, actions=frozenset({Action.OFFLOAD, Action.RECOMPUTE, Action.COMPRESS}))
    schedule = PLANNERS["compress-all"]().plan(problem).schedule
    assert schedule is not None and (schedule.lists[0]["kind"] == Kind.ENCODE).any()
    step, _ = run(case, problem, schedule)
    # Two steps, several activations and weights in bfloat16: two digits are left of an update by AdamW.
    difference = largest_difference(step.state()[0], state[0])
    assert 0 < difference < 5e-2


def test_encoded_integers_are_refused():
    recodings = Recodings((HALF,), jax.devices())
    with pytest.raises(InputError, match=r"gpu0 #3: codec 'bfloat16' converts floating-point numbers, .* int32"):
        recodings.of(0, 0, jax.ShapeDtypeStruct((4,), jnp.int32), "gpu0 #3")


@pytest.mark.parametrize("name", ["bfloat16", "float8_e4m3fn"])
def test_codecs_keep_what_the_type_keeps_and_saturate(name):
    values = np.array([0.0, 1.0, -1.5, 3e38, -3e38, np.inf, np.nan], np.float32)
    size = jnp.dtype(name).itemsize
    recoding = Recodings((Codec(name, size, 4, 1e9, 1e9),), jax.devices()).of(
        0, 0, jax.ShapeDtypeStruct(values.shape, jnp.float32), "gpu0 #0"
    )  # fmt: skip
    encoded = recoding.encode(jax.device_put(values, jax.devices()[0]))
    assert encoded.nbytes == recoding.encoded_bytes == len(values) * size
    back = np.asarray(recoding.decode(encoded))
    largest = float(jnp.finfo(name).max)
    np.testing.assert_array_equal(back[:3], values[:3])
    assert (np.abs(back[3:5]) <= largest).all() and (np.abs(back[3:5]) >= min(largest, 2e38)).all()
    assert not np.isfinite(back[5:]).any()
