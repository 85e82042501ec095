import gzip
import json
from importlib.resources import files

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tmojax.errors import InputError
from tmojax.importers.g10 import (
    PACKAGED,
    G10Workload,
    TraceOp,
    TraceTensor,
    g10_workload,
    matrix_flops,
    parameters,
    read_trace,
)
from tmojax.problem import Lifetime, Phase, TensorKind, keep_all_footprint_bytes, validate_workload

A100 = "A100-SXM4-40GB"
# The authors' simulated steps when nothing has to move, in cycles of 1.2 GHz (their example results, column "ideal").
IDEAL_CYCLES = {"BERT_Base-128": 7_087_159_999, "BERT_Base-512": 11_799_396_628}


@pytest.mark.parametrize("trace", PACKAGED)
def test_recorded_times_add_up_to_the_ideal_that_the_authors_publish(trace, tmp_path):
    workload = g10_workload(G10Workload(trace), (A100,), 1, tmp_path)
    validate_workload(workload)
    assert sum(op.duration_s for op in workload.program(0).ops) == pytest.approx(IDEAL_CYCLES[trace] / 1.2e9, rel=1e-8)


@pytest.mark.parametrize("trace", PACKAGED)
def test_counts_and_bytes_are_those_of_the_file(trace, tmp_path):
    path = files("tmojax") / "data" / "g10" / f"{trace}.ops.json.gz"
    content = json.loads(gzip.decompress(path.read_bytes()))
    program = g10_workload(G10Workload(trace), (A100,), 1, tmp_path).program(0)
    assert (len(program.ops), len(program.tensors)) == (1369, 1463) == (len(content["ops"]), len(content["tensors"]))
    for tensor in program.tensors:
        assert tensor.size_bytes == content["tensors"][tensor.name]["size_bytes"]
    weights = {tensor.name for tensor in program.tensors if tensor.lifetime is Lifetime.STATE}
    assert weights == {name for name, tensor in content["tensors"].items() if tensor["weight"]}
    names = [tensor.name for tensor in program.tensors]
    for op, given_op in zip(program.ops, content["ops"], strict=True):
        assert {names[t] for t in (*op.writes, *op.updates)} == set(given_op["writes"])
        assert {names[t] for t in (*op.reads, *op.updates)} >= set(given_op["reads"])


def test_parameters_do_not_scale_with_the_batch(tmp_path):
    small, large = (read_trace(name, tmp_path) for name in PACKAGED)
    assert parameters(small) == parameters(large)
    for name in parameters(small):
        assert small.tensors[name].size_bytes == large.tensors[name].size_bytes
    # The table of words, 30522 x 768.
    table_bytes = max(small.tensors[name].size_bytes for name in parameters(small))
    assert table_bytes == pytest.approx(30522 * 768 * 4, rel=1e-4)


def test_products_have_the_flops_of_bert(tmp_path):
    trace = read_trace("BERT_Base-128", tmp_path)
    tokens = 128 * 128
    flops = {op.name: matrix_flops(op, trace.tensors) for op in trace.ops}
    assert flops["Linear_Forward.15"] == 2 * tokens * 768 * 3 * 768  # queries, keys, values
    assert flops["Linear_Forward.24"] == 2 * tokens * 768 * 768  # output projection, operands swapped in the source
    assert flops["Linear_Forward.38"] == 2 * tokens * 768 * 4 * 768
    assert flops["BatchMatMul_Forward.19"] == flops["BatchMatMul_Forward.23"] == 2 * tokens * 128 * 768
    assert flops["Add_Forward.2"] == flops["Linear_Apply_Grad_Weight.1290"] == 0


@given(m=st.integers(1, 2000), k=st.integers(1, 2000), n=st.integers(1, 2000), swap=st.booleans())
def test_flops_follow_from_operand_sizes(m, k, n, swap):
    sizes = {"a": m * k, "b": k * n, "c": m * n}
    tensors = {name: TraceTensor(4 * size, False) for name, size in sizes.items()}
    op = TraceOp("Linear_Forward.0", 0.0, ("b", "a") if swap else ("a", "b"), ("c",))
    assert matrix_flops(op, tensors) == 2 * m * k * n


def test_roofline_is_faster_than_what_was_recorded_and_follows_the_gpu(tmp_path):
    def total_s(gpu, model=A100):
        program = g10_workload(G10Workload(times="roofline", gpu=gpu), (model,), 1, tmp_path).program(0)
        return sum(op.duration_s for op in program.ops)

    assert total_s("H100-SXM5-80GB") < total_s("") == total_s(A100, "T4") < total_s("", "T4") < 5.9


def test_two_gpu_types_get_a_program_each(tmp_path):
    workload = g10_workload(G10Workload(times="roofline"), ("T4", A100, "T4"), 1, tmp_path)
    validate_workload(workload)
    assert workload.device_program == (0, 1, 0)
    slow, fast = workload.programs
    assert sum(op.duration_s for op in slow.ops) > sum(op.duration_s for op in fast.ops)


@pytest.mark.parametrize("micro_batches", [1, 4])
def test_gradients_of_parameters_are_summed_before_they_are_applied(micro_batches, tmp_path):
    workload = g10_workload(G10Workload(), (A100,) * 2, micro_batches, tmp_path)
    validate_workload(workload)
    program = workload.program(0)
    names = [tensor.name for tensor in program.tensors]
    synchronised = parameters(read_trace("BERT_Base-128", tmp_path))
    sums = 0
    for before, op in zip(program.ops, program.ops[1:], strict=False):
        if op.phase is Phase.OPTIMIZER and names[op.updates[0]] in synchronised:
            assert before.collective and before.updates == op.reads
            sums += 1
    assert sums == len(workload.collectives) == sum(bool(op.collective) for op in program.ops) == len(synchronised)
    assert all(op.step_op is (micro_batches > 1) for op in program.ops if op.phase is Phase.OPTIMIZER or op.collective)


def test_micro_batches_accumulate_gradients(tmp_path):
    program = g10_workload(G10Workload(), (A100,), 4, tmp_path).program(0)
    for op in program.ops:
        for gradient in op.reads if op.phase is Phase.OPTIMIZER else ():
            assert program.tensors[gradient].lifetime is Lifetime.STATE
            assert program.tensors[gradient].kind is TensorKind.GRADIENT
            assert program.producer[gradient] == -1


def test_no_op_is_run_again_on_weights_that_changed(tmp_path):
    program = g10_workload(G10Workload(), (A100,), 1, tmp_path).program(0)
    changed = {t: i for i, op in reversed(list(enumerate(program.ops))) for t in op.updates}
    last_read = {t: i for i, op in enumerate(program.ops) for t in op.reads}
    recomputable = [op for op in program.ops if op.recomputable and op.phase is Phase.FORWARD]
    assert len(recomputable) > 400
    for op in recomputable:
        wanted = max(last_read[t] for t in op.writes)
        assert all(changed.get(t, len(program.ops)) > wanted for t in op.reads)


def test_footprint_is_below_all_tensors_and_above_the_weights(tmp_path):
    workload = g10_workload(G10Workload(), (A100,), 1, tmp_path)
    sizes = [tensor.size_bytes for tensor in workload.program(0).tensors]
    weights = sum(t.size_bytes for t in workload.program(0).tensors if t.kind is TensorKind.WEIGHT)
    assert sum(sizes) == 79_915_048_960
    assert weights < keep_all_footprint_bytes(workload, 0) == 25_859_059_712 < sum(sizes)


def tiny():
    return {
        "model": "tiny",
        "batch": 1,
        "source": "by hand",
        "ops": [
            {"name": "Linear_Forward.0", "duration_s": 1.0, "reads": ["x", "w"], "writes": ["y"]},
            {"name": "Linear_Backward_Weight.1", "duration_s": 2.0, "reads": ["x", "y"], "writes": ["d"]},
            {"name": "Linear_Apply_Grad_Weight.2", "duration_s": 0.5, "reads": ["w", "d"], "writes": ["w"]},
        ],
        "tensors": {
            name: {"size_bytes": size, "weight": name == "w"}
            for name, size in {"x": 400, "w": 100, "y": 400, "d": 100}.items()
        },
    }


def write(folder, content):
    (folder / "t.json").write_text(json.dumps(content), encoding="utf-8")
    return G10Workload("t.json")


def test_a_file_of_ones_own(tmp_path):
    program = g10_workload(write(tmp_path, tiny()), ("",), 1, tmp_path).program(0)
    x, w, y, d = range(4)
    assert program.inputs == (x,)
    assert [(op.reads, op.writes, op.updates) for op in program.ops] == [
        ((x, w), (y,), ()), ((x, y), (d,), ()), ((d,), (), (w,))
    ]  # fmt: skip
    assert [op.recomputable for op in program.ops] == [True, False, False]
    assert [tensor.kind.value for tensor in program.tensors] == ["input", "weight", "activation", "gradient"]


@settings(max_examples=40)
@given(st.sampled_from(["model", "ops", "tensors"]), st.sampled_from([None, [], 3, "x", {"a": 1}]))
def test_wrong_files_are_refused_by_name(tmp_path_factory, key, value):
    folder = tmp_path_factory.mktemp("trace")
    if (key, value) == ("model", "x"):
        return
    with pytest.raises(InputError, match=r"t\.json.*trace"):
        read_trace(write(folder, {**tiny(), key: value}).trace, folder)


def test_mistakes_name_what_to_do(tmp_path):
    for change, message in (
        ({"reads": ["nowhere"]}, r"trace\.ops\[0\] \(Linear_Forward\.0\): tensor 'nowhere' is not in trace\.tensors"),
        ({"reads": ["x", "x"]}, "reads names a tensor twice"),
        ({"extra": 1}, "unknown key 'extra'"),
    ):
        content = tiny()
        content["ops"][0] |= change
        with pytest.raises(InputError, match=message):
            read_trace(write(tmp_path, content).trace, tmp_path)
    (tmp_path / "broken.json.gz").write_bytes(b"not gzip")
    with pytest.raises(InputError, match=r"broken\.json\.gz.*gzip"):
        read_trace("broken.json.gz", tmp_path)
    with pytest.raises(InputError, match="trace: 'BERT' is unknown; choose one of BERT_Base-128"):
        G10Workload("BERT")
    with pytest.raises(InputError, match="times: 'guess'"):
        G10Workload(times="guess")
    with pytest.raises(InputError, match="set times = 'roofline'"):
        G10Workload(gpu=A100)
    with pytest.raises(InputError, match=r"workload\.gpu: is missing"):
        g10_workload(G10Workload(times="roofline"), ("",), 1, tmp_path)
