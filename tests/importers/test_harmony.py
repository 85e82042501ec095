import gzip
import json
from importlib.resources import files

import pytest

from tmojax.errors import InputError
from tmojax.importers.harmony import HarmonyWorkload, harmony_workload, read_profile
from tmojax.problem import (
    Lifetime,
    Phase,
    TensorKind,
    keep_all_footprint_bytes,
    largest_op_bytes,
    validate_workload,
)


def seconds(workload, phase):
    return sum(op.duration_s for op in workload.program(0).ops if op.phase is phase)


def compute_s(tmp_path, profile, batch, micro_batches):
    """Forward and backward of one GPU for all micro-batches."""
    workload = harmony_workload(HarmonyWorkload(profile, batch), 1, micro_batches, tmp_path)
    validate_workload(workload)
    return micro_batches * seconds(workload, Phase.FORWARD), micro_batches * seconds(workload, Phase.BACKWARD)


def test_gpt2_xl_computes_as_long_as_harmony_predicts(tmp_path):
    """Its best schedule for 32 samples on two GPUs in micro-batches of 2: 43.927 s of which 88 % are compute. Its last
    pack of layers, 44 to 51, runs forward only within backward."""
    forward_s, backward_s = compute_s(tmp_path, "gpt2_xl", 2, 8)
    layers = harmony_workload(HarmonyWorkload("gpt2_xl", 2), 1, 8, tmp_path).program(0).ops
    last_pack_s = 8 * sum(op.duration_s for op in layers if op.phase is Phase.FORWARD and int(op.layer[5:]) >= 44)
    assert forward_s - last_pack_s + backward_s == pytest.approx(0.88 * 43.927, rel=0.005)


def test_bert_large_computes_as_long_as_harmony_predicts(tmp_path):
    """600 samples on one of four GPUs in micro-batches of 2 (and 1), all layers in one pack, so backward only."""
    for batch, total_s in ((2, 174.183), (1, 250.294)):
        _, backward_s = compute_s(tmp_path, "bert_large_seq512", batch, 600 // batch)
        assert backward_s == pytest.approx(total_s, rel=0.006)


def test_parameters_are_those_of_the_models(tmp_path):
    """GPT-2 XL has 1.5577e9 parameters, BERT-large 0.335e9; GPT-2's tied output matrix counts twice in the source."""
    for profile, parameters in (("gpt2_xl", 1_557_611_200 + 50257 * 1600), ("bert_large_seq512", 335.14e6)):
        program = harmony_workload(HarmonyWorkload(profile), 1, 1, tmp_path).program(0)
        size = {kind: sum(t.size_bytes for t in program.tensors if t.kind is kind and t.lifetime is Lifetime.STATE)
                for kind in TensorKind}  # fmt: skip
        assert size[TensorKind.WEIGHT] / 4 == pytest.approx(parameters, rel=1e-4)
        assert size[TensorKind.GRADIENT] == size[TensorKind.WEIGHT]
        assert size[TensorKind.OPTIMIZER_STATE] == 2 * size[TensorKind.WEIGHT]


def test_an_op_needs_the_profiled_peak(tmp_path):
    """Bytes of what an op names plus its workspace are the profiled peak, unless what it names is more."""
    profile = read_profile("gpt2_xl", tmp_path)
    program = harmony_workload(HarmonyWorkload("gpt2_xl", 3), 1, 2, tmp_path).program(0)
    checked = 0
    for op in program.ops:
        if op.phase is Phase.OPTIMIZER:
            continue
        layer = profile.layers[int(op.layer[5:])]
        peak = (layer.forward_peak_bytes if op.phase is Phase.FORWARD else layer.backward_peak_bytes)["3"]
        named = sum(program.tensors[t].size_bytes for t in (*op.reads, *op.writes, *op.updates))
        assert named + op.workspace_bytes == max(peak, named)
        checked += 1
    assert checked == 51 + 52


def test_footprint_and_largest_op(tmp_path):
    workload = harmony_workload(HarmonyWorkload("gpt2_xl", 1), 1, 8, tmp_path)
    state = sum(t.size_bytes for t in workload.program(0).tensors if t.lifetime is Lifetime.STATE)
    assert state < keep_all_footprint_bytes(workload, 0) < 1.1 * state
    # The update of the embedding: weight, gradient and twice that of state.
    assert largest_op_bytes(workload, 0)[1] == 4 * 328_198_400


def test_each_layers_gradients_are_summed_once(tmp_path):
    workload = harmony_workload(HarmonyWorkload("bert_large_seq512", 4), 4, 2, tmp_path)
    validate_workload(workload)
    program = workload.program(0)
    weights = [t for t in program.tensors if t.kind is TensorKind.WEIGHT]
    assert [c.size_bytes for c in reversed(workload.collectives)] == [t.size_bytes for t in weights]
    assert all(t.replica_group for t in weights)
    order = [op.name for op in program.ops]
    for op in program.ops:
        if op.collective:
            layer = op.name.split(".")[0]
            assert order.index(f"{layer}.backward") < order.index(op.name) < order.index(f"{layer}.update")


def test_mistakes_name_what_to_do(tmp_path):
    with pytest.raises(InputError, match="profile: 'gpt3' is unknown; choose one of gpt2_xl"):
        HarmonyWorkload("gpt3")
    with pytest.raises(InputError, match="batch: 0 must be at least 1"):
        HarmonyWorkload(batch=0)
    with pytest.raises(InputError, match="gpu: 'x' is unknown"):
        HarmonyWorkload(gpu="x")
    with pytest.raises(InputError, match=r"workload\.batch: 10 is not in backward_s of layer 0 of profile gpt2_xl"):
        harmony_workload(HarmonyWorkload("gpt2_xl", 10), 1, 1, tmp_path)
    packaged = files("tmojax") / "data" / "harmony" / "gpt2_xl.profile.json.gz"
    content = json.loads(gzip.decompress(packaged.read_bytes()))
    for change, message in (({"layers": []}, "profile.layers: is empty"), ({"more": 1}, "unknown key 'more'")):
        (tmp_path / "p.json").write_text(json.dumps({**content, **change}), encoding="utf-8")
        with pytest.raises(InputError, match=rf"p\.json.*{message}"):
            read_profile("p.json", tmp_path)
    with pytest.raises(InputError, match=r"missing\.json"):
        read_profile("missing.json", tmp_path)
