from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tmojax.build import build_problem
from tmojax.check import check
from tmojax.config import load_config
from tmojax.errors import InputError
from tmojax.importers.harmony import HarmonyWorkload, harmony_workload
from tmojax.importers.machine_build import load_machine
from tmojax.importers.pipeline import balanced_cuts, pipeline_workload
from tmojax.importers.pipeline_order import Send, compute_order, stage_orders
from tmojax.importers.synthetic import SyntheticTransformer, synthetic_transformer
from tmojax.planners.registry import PLANNERS
from tmojax.problem import (
    Action,
    Lifetime,
    Phase,
    Problem,
    Tensor,
    TensorKind,
    keep_all_footprint_bytes,
    validate_workload,
)
from tmojax.simulate import simulate

SPEC = SyntheticTransformer(layers=4, gradient_scale=1.0, parameters=4_000_000)


def pipeline(order, stages=4, micro_batches=6, spec=SPEC):
    return pipeline_workload(synthetic_transformer(spec, 1, micro_batches), stages, order)


@pytest.mark.parametrize("order", ["gpipe", "1f1b"])
def test_every_op_runs_once_for_each_micro_batch_on_one_stage(order):
    source = synthetic_transformer(SPEC, 1, 6).program(0)
    workload = pipeline(order)
    validate_workload(workload)
    ran = sorted(op.name for program in workload.programs for op in program.ops if not op.collective)
    assert ran == sorted(f"mb{k}.{op.name}" for k in range(6) for op in source.ops)
    total_s = sum(op.duration_s for program in workload.programs for op in program.ops)
    assert total_s == pytest.approx(6 * 0.350)


def test_only_the_residual_stream_and_its_gradient_cross_a_stage():
    unit = SPEC.unit_bytes
    workload = pipeline("gpipe")
    assert len(workload.collectives) == 6 * 2 * 3
    assert {collective.size_bytes for collective in workload.collectives} == {unit}
    assert {collective.devices for collective in workload.collectives} == {
        (0, 1), (1, 2), (2, 3), (1, 0), (2, 1), (3, 2)
    }  # fmt: skip


def test_1f1b_order_by_hand():
    f, b = True, False
    assert compute_order("1f1b", 0, 3, 4) == [(f, 0), (f, 1), (f, 2), (b, 0), (f, 3), (b, 1), (b, 2), (b, 3)]
    assert compute_order("1f1b", 2, 3, 4) == [(f, 0), (b, 0), (f, 1), (b, 1), (f, 2), (b, 2), (f, 3), (b, 3)]
    assert compute_order("1f1b", 0, 3, 1) == [(f, 0), (b, 0)]
    assert compute_order("gpipe", 1, 3, 2) == [(f, 0), (f, 1), (b, 0), (b, 1)]


def test_stages_hold_as_many_micro_batches_as_follow_them():
    """In 1F1B stage s of S holds the activations of S - s micro-batches, in GPipe each holds all: 16 n a layer."""
    spec = replace(SPEC, gradient_scale=0.0, parameters=0)
    layer_bytes = 16 * spec.unit_bytes
    held = {
        order: [keep_all_footprint_bytes(pipeline(order, 4, 6, spec), device) / layer_bytes for device in range(4)]
        for order in ("gpipe", "1f1b")
    }
    assert held["gpipe"] == pytest.approx([6] * 4, rel=0.07)
    assert held["1f1b"] == pytest.approx([4, 3, 2, 1], rel=0.1)


@pytest.mark.parametrize("order", ["gpipe", "1f1b"])
def test_a_pipeline_with_free_transfers_takes_k_plus_s_minus_1_slots(order):
    """Equal stages, K = 6: (6 + 4 - 1) / 6 of the compute of a stage, and transfers of a few bytes."""
    spec = replace(SPEC, tokens=64, sequence=64, width=2, elementwise_share=0.0, parameters=0)
    workload = pipeline(order, 4, 6, spec)
    machine = load_machine("prototype-4gpu-12.5")
    problem = Problem("p", workload, machine, frozenset({Action.OFFLOAD}))
    result = PLANNERS["keep-all"]().plan(problem)
    assert result.schedule is not None
    assert not check(problem, result.schedule).violations
    assert simulate(problem, result.schedule).step_s == pytest.approx(0.350 / 4 * 9, rel=1e-3)


@pytest.mark.parametrize("order", ["gpipe", "1f1b"])
@pytest.mark.parametrize("kind", ["offload-all", "ratio-sweep"])
def test_planners_find_valid_plans_where_memory_is_short(order, kind):
    problem = Problem("p", pipeline(order), load_machine("rtx4090x4-one-uplink"),
                      frozenset({Action.OFFLOAD, Action.RECOMPUTE}))  # fmt: skip
    most = max(keep_all_footprint_bytes(problem.workload, device) for device in range(4))
    problem = problem.with_device_capacity(int(most / 1.5))
    result = PLANNERS[kind]().plan(problem)
    assert result.schedule is not None, result.message
    assert not check(problem, result.schedule).violations


@settings(max_examples=60, deadline=None)
@given(
    order=st.sampled_from(["gpipe", "1f1b"]),
    stages=st.integers(2, 5),
    micro_batches=st.integers(1, 7),
    seed=st.integers(0, 2**31),
)
def test_sends_stand_in_one_sequence_after_what_makes_them_and_before_what_needs_them(
    order, stages, micro_batches, seed
):
    rng = np.random.default_rng(seed)
    seconds = [(float(a), float(b)) for a, b in rng.integers(0, 5, (stages, 2))]
    sends = []
    for a in range(stages):
        for b in range(a + 1, stages):
            if b == a + 1 or rng.random() < 0.3:  # also connections that skip stages
                sends += [Send(len(sends), a, b, True), Send(len(sends) + 1, b, a, False)]
    lists = stage_orders(order, seconds, sends, micro_batches)
    names = [[(what, k) for what, k in one if isinstance(what, Send)] for one in lists]
    for a in range(stages):
        for b in range(a):
            assert [e for e in names[a] if e in names[b]] == [e for e in names[b] if e in names[a]]
    # Run all lists as blocking rendezvous of every stage at once: nothing may wait for ever.
    at = [0] * stages
    while any(at[s] < len(lists[s]) for s in range(stages)):
        before = sum(at)
        for s in range(stages):
            while at[s] < len(lists[s]):
                what, k = lists[s][at[s]]
                if isinstance(what, Send):
                    other = what.destination if what.source == s else what.source
                    if lists[other][at[other] : at[other] + 1] != [(what, k)]:
                        break
                    at[other] += 1
                at[s] += 1
        assert sum(at) > before
    for s, one in enumerate(lists):
        for send, k in names[s]:
            block = one.index((send.forward, k))
            assert (one.index((send, k)) > block) is (send.source == s)


@given(st.lists(st.floats(0, 10), min_size=1, max_size=9), st.integers(1, 9))
def test_cuts_are_the_best_contiguous_ones(seconds, parts):
    from itertools import combinations

    if parts > len(seconds):
        return

    def worst(cuts):
        ends = [*cuts[1:], len(seconds)]
        return max(sum(seconds[a:b]) for a, b in zip(cuts, ends, strict=True))

    cuts = balanced_cuts(seconds, parts)
    assert cuts[0] == 0 and len(set(cuts)) == parts
    best = min(worst([0, *rest]) for rest in combinations(range(1, len(seconds)), parts - 1))
    assert worst(cuts) == pytest.approx(best)


def test_updates_stay_with_their_layers(tmp_path):
    step = harmony_workload(HarmonyWorkload("bert_large_seq512", 4), 1, 4, tmp_path)
    workload = pipeline_workload(step, 4, "1f1b")
    validate_workload(workload)
    kept = []
    for program in workload.programs:
        state = [t.name for t in program.tensors if t.lifetime is Lifetime.STATE]
        updated = {program.tensors[t].name for op in program.ops if op.phase is Phase.OPTIMIZER for t in op.updates}
        assert updated == set(state)
        kept += state
    assert len(kept) == len(set(kept)) == 27 * 3


def test_mistakes_are_named():
    source = synthetic_transformer(SPEC, 1, 2)
    with pytest.raises(InputError, match="that of one GPU"):
        pipeline_workload(synthetic_transformer(SPEC, 2, 2), 2, "gpipe")
    with pytest.raises(InputError, match="5 layers cannot be divided over 6 GPUs"):
        pipeline_workload(source, 6, "gpipe")
    with pytest.raises(InputError, match=r"pipeline\.order: 'zb' is unknown; choose one of gpipe, 1f1b"):
        pipeline_workload(source, 2, "zb")
    program = source.program(0)
    tied = len(program.tensors)
    ops = tuple(
        replace(op, updates=(*op.updates, tied), recomputable=False) if op.name in ("embed", "loss") else op
        for op in program.ops
    )
    tensors = (*program.tensors, Tensor("tied", 8, TensorKind.WEIGHT, Lifetime.STATE))
    with pytest.raises(InputError, match=r"tensor 'tied' changes and is used on stages \[0, 1\]"):
        pipeline_workload(replace(source, programs=(replace(program, tensors=tensors, ops=ops),)), 2, "gpipe")


RUN = """
micro_batches = 4
actions = ["offload"]
[workload]
{workload}
[pipeline]
order = "{order}"
[machine]
preset = "{machine}"
[[planners]]
kind = "offload-all"
"""


def test_a_configuration_divides_layers(tmp_path):
    def load(workload='kind = "synthetic"', order="1f1b", machine="rtx4090x4-one-uplink"):
        (tmp_path / "run.toml").write_text(RUN.format(workload=workload, order=order, machine=machine))
        return load_config(tmp_path / "run.toml")

    config = load()
    assert config.document["pipeline"] == {"order": "1f1b"}
    problem = build_problem(config).problem
    assert [program.name for program in problem.workload.programs] == [f"stage {s}" for s in range(4)]
    for arguments, message in (
        ({"order": "zb"}, "pipeline: order 'zb' is unknown"),
        ({"machine": "gh200"}, "pipeline: needs at least two GPUs"),
        ({"workload": 'kind = "file"\npath = "run.toml"'}, "pipeline: a problem file says itself"),
        ({"workload": 'kind = "model"\nmodel = "gpt2"', "machine": "two-types-x4"}, r"pipeline: .*set workload\.gpu"),
    ):
        with pytest.raises(InputError, match=message):
            load(**arguments)
