import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tmojax.errors import InputError
from tmojax.importers.synthetic import SyntheticTransformer, synthetic_transformer
from tmojax.problem import Phase, keep_all_footprint_bytes, largest_op_bytes, validate_workload

UNIT_BYTES = 8 * 1024 * 1600 * 2


def test_sizes_of_the_default():
    workload = synthetic_transformer(SyntheticTransformer(), gpus=4, micro_batches=8)
    validate_workload(workload)
    program = workload.program(0)
    forward = [op for op in program.ops if op.phase is Phase.FORWARD]
    backward = [op for op in program.ops if op.phase is Phase.BACKWARD]
    assert len(forward) == len(backward) == 1 + 12 * 8
    assert sum(tensor.size_bytes for tensor in program.tensors) == 193 * UNIT_BYTES
    assert keep_all_footprint_bytes(workload, 3) == 193 * UNIT_BYTES
    # GELU's backward and forward hold 4 n + 4 n; the output op holds gelu 4, mid 1, out 1.
    assert largest_op_bytes(workload, 0)[1] == 8 * UNIT_BYTES


def test_durations_of_the_default():
    program = synthetic_transformer(SyntheticTransformer(), 1, 1).program(0)
    forward_s = sum(op.duration_s for op in program.ops if op.phase is Phase.FORWARD)
    assert forward_s == pytest.approx(0.350 / 3)
    assert sum(op.duration_s for op in program.ops) == pytest.approx(0.350)
    cheap_s = sum(
        op.duration_s for op in program.ops if op.phase is Phase.FORWARD and op.name.endswith(("ln1", "ln2", "gelu"))
    )
    assert cheap_s == pytest.approx(0.0035, rel=0.02)


def test_backward_reads_what_forward_saved():
    program = synthetic_transformer(SyntheticTransformer(layers=1), 1, 1).program(0)
    names = [tensor.name for tensor in program.tensors]
    reads = {op.name: [names[read] for read in op.reads] for op in program.ops}
    assert reads["layer0.ctx.backward"] == ["layer0.qkv", "layer0.ctx", "d_layer0.ctx"]
    assert reads["layer0.ln2.backward"] == ["layer0.mid", "d_layer0.ln2", "d_layer1.x"]
    assert reads["loss"] == ["layer1.x"]
    saved = {name for name in names if not name.startswith("d_")}
    read_back = {read for op in program.ops if op.phase is Phase.BACKWARD for read in reads[op.name]}
    assert saved <= read_back


def test_gradients_can_take_memory():
    workload = synthetic_transformer(SyntheticTransformer(gradient_scale=1.0), 1, 1)
    # Backward of the last GELU: 192 n less the last gelu, its gradient 4 n, the new one 4 n, and the residual's 1 n;
    # backward of the op before it: 192 n, its gradient 1 n and the new one 4 n.
    assert keep_all_footprint_bytes(workload, 0) == (192 + 1 + 4) * UNIT_BYTES


def test_parameters_add_gradient_state_and_one_all_reduce():
    workload = synthetic_transformer(SyntheticTransformer(parameters=369_000_001), 4, 2)
    validate_workload(workload)
    (collective,) = workload.collectives
    assert collective.size_bytes == 2 * 369_000_001
    assert collective.devices == (0, 1, 2, 3)
    assert keep_all_footprint_bytes(workload, 0) == 193 * UNIT_BYTES + 2 * 369_000_001
    assert not synthetic_transformer(SyntheticTransformer(parameters=1000), 1, 2).collectives


@given(
    st.builds(
        SyntheticTransformer,
        layers=st.integers(1, 5),
        tokens=st.integers(1, 4).map(lambda count: 16 * count),
        width=st.integers(1, 64),
        sequence=st.sampled_from([1, 4, 16]),
        bytes_per_element=st.integers(1, 4),
        compute_s=st.floats(1e-3, 10),
        elementwise_share=st.floats(0, 1),
        gradient_scale=st.floats(0, 2),
        parameters=st.integers(0, 1000),
    ),
    st.integers(1, 3),
    st.integers(1, 3),
)
@settings(max_examples=40, deadline=None)
def test_every_parameter_set_is_a_valid_workload(spec, gpus, micro_batches):
    workload = synthetic_transformer(spec, gpus, micro_batches)
    validate_workload(workload)
    assert sum(op.duration_s for op in workload.program(0).ops) == pytest.approx(spec.compute_s)


@pytest.mark.parametrize(
    ("name", "value"),
    [("layers", 0), ("tokens", 1000), ("width", True), ("width", 1.5), ("compute_s", 0), ("compute_s", float("nan")),
     ("elementwise_share", 1.1), ("parameters", -1), ("layers", "12")],
)  # fmt: skip
def test_wrong_parameters_are_named(name, value):
    with pytest.raises(InputError, match=f"{name}: {value}|{name}: '12'"):
        SyntheticTransformer(**{name: value})


def test_wrong_counts_are_named():
    with pytest.raises(InputError, match="gpus: 0"):
        synthetic_transformer(SyntheticTransformer(), 0, 1)
