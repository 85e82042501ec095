"""Imported steps against closed forms and hand counts."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import optax
import pytest
from imported_steps import bytes_of, gpt2, imported, program_of, temporaries_bytes

from tmojax.errors import InputError
from tmojax.importers.jax_importer import import_step, import_train_step
from tmojax.models import build_model
from tmojax.problem import Lifetime, Phase, TensorKind, validate_workload


def test_matrix_products_have_the_closed_form():
    tokens, layers, width, sequence, vocabulary = 8 * 1024, 12, 768, 1024, 50257
    dense = layers * 12 * width**2 + vocabulary * width
    attention = layers * 2 * sequence * width  # scores and context, per token
    assert gpt2().report.matmul_flops == 6 * tokens * (dense + attention)


def test_flops_of_ops_are_the_products_and_little_more():
    products = gpt2().report.matmul_flops
    assert products < gpt2().report.flops < 1.02 * products
    assert gpt2().report.flops == sum(op.flops for op in program_of(gpt2()).ops)


def test_state_bytes_are_exact():
    assert bytes_of(gpt2(), TensorKind.WEIGHT) == 4 * 124439808
    assert bytes_of(gpt2(), TensorKind.OPTIMIZER_STATE) == 2 * 4 * 124439808 + 4  # two moments and the counter


def test_workload_is_valid_with_several_gpus_and_micro_batches():
    for options in ({}, {"gpus": 4}, {"micro_batches": 4, "gpus": 2}, {"micro_batches": 2, "coarsen": "layer"}):
        validate_workload(gpt2(**options).workload)


def test_every_tensor_has_one_producer_or_is_an_argument():
    program = program_of(gpt2())
    for tensor, producer in zip(program.tensors, program.producer, strict=True):
        is_argument = tensor.lifetime is Lifetime.STATE or tensor.kind is TensorKind.INPUT
        assert (producer == -1) == is_argument, tensor.name


def test_reads_follow_writes_in_op_order():
    program = program_of(gpt2(micro_batches=2))
    for index, op in enumerate(program.ops):
        for tensor in (*op.reads, *op.updates):
            assert program.producer[tensor] < index


def test_phases_follow_each_other():
    program = program_of(gpt2())
    order = [Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER]
    phases = [order.index(op.phase) for op in program.ops]
    assert phases == sorted(phases)
    assert {op.step_op for op in program.ops if op.phase is Phase.OPTIMIZER} == {True}
    assert {op.step_op for op in program.ops if op.phase is not Phase.OPTIMIZER} == {False}


def test_forward_ops_can_be_recomputed_and_updates_cannot():
    for op in program_of(gpt2(micro_batches=2)).ops:
        assert op.recomputable is not bool(op.updates) if op.phase is Phase.FORWARD else True
        assert not (op.updates and op.recomputable)


def test_every_weight_and_moment_is_updated_in_place_once():
    program = program_of(gpt2())
    state = {i for i, t in enumerate(program.tensors) if t.lifetime is Lifetime.STATE}
    updated = [t for op in program.ops for t in op.updates]
    assert sorted(updated) == sorted(state)


def saved_activations(program, layer):
    """Activations that forward of a layer makes and backward reads."""
    backward = {t for op in program.ops if op.phase is Phase.BACKWARD for t in op.reads}
    return [
        program.tensors[t]
        for op in program.ops
        if op.phase is Phase.FORWARD and op.layer == layer
        for t in op.writes
        if t in backward
    ]


def test_layers_have_at_least_eight_schedulable_activations():
    program = program_of(gpt2())
    for layer in range(12):
        saved = [t for t in saved_activations(program, f"h{layer}") if t.size_bytes > 2**20]
        assert len([t for t in saved if not t.name.endswith("kernel.bfloat16")]) >= 8


def test_saved_activations_of_a_layer_by_name():
    saved = {t.name: t.size_bytes for t in saved_activations(program_of(gpt2()), "h3") if t.size_bytes > 2**20}
    tokens, width, scores = 8 * 1024, 768, 8 * 12 * 1024 * 1024
    assert {name: size for name, size in saved.items() if not name.endswith(".bfloat16")} == {
        "h3.ln1": tokens * width * 2,
        "h3.attn.query": tokens * width * 2,
        "h3.attn.key": tokens * width * 2,
        "h3.attn.value": tokens * width * 2,
        "h3.attn.scores": scores * 2,
        "h3.attn.probabilities": scores * 2,
        "h3.attn.context": tokens * width * 2,
        "h3.attn.residual": tokens * width * 4,
        "h3.ln2": tokens * width * 2,
        "h3.mlp.fc": tokens * 4 * width * 2,
        "h3.mlp.gelu.tanh": tokens * 4 * width * 4,  # fp32: no bf16 arithmetic outside the tensor cores on A100
        "h3.mlp.gelu": tokens * 4 * width * 2,
        "h3.mlp.residual": tokens * width * 4,
    }


def test_gradients_are_step_tensors_without_accumulation():
    program = program_of(gpt2())
    gradients = [i for i, t in enumerate(program.tensors) if t.kind is TensorKind.GRADIENT]
    assert len(gradients) == 148
    for tensor in gradients:
        assert program.ops[program.producer[tensor]].phase is Phase.BACKWARD
        assert any(tensor in op.reads for op in program.ops if op.phase is Phase.OPTIMIZER)


def test_gradients_are_accumulated_in_place_and_reset():
    program = program_of(gpt2(micro_batches=4))
    sums = [i for i, t in enumerate(program.tensors) if t.kind is TensorKind.GRADIENT and t.lifetime is Lifetime.STATE]
    assert sum(program.tensors[i].size_bytes for i in sums) == 4 * 124439808
    for tensor in sums:
        phases = [op.phase for op in program.ops if tensor in op.updates]
        assert phases == [Phase.BACKWARD, Phase.OPTIMIZER]
    # Accumulation directly follows the op that made the gradient, so that nothing waits for the end of backward.
    for index, op in enumerate(program.ops):
        if op.name.startswith("accumulate."):
            (part,) = op.reads
            between = program.ops[program.producer[part] + 1 : index]
            assert all(other.name.startswith("accumulate.") for other in between)


def test_micro_batches_leave_the_work_of_one_unchanged():
    one, four = gpt2(), gpt2(micro_batches=4)
    assert one.report.matmul_flops == four.report.matmul_flops
    forward = [[op for op in program_of(step).ops if op.phase is Phase.FORWARD] for step in (one, four)]
    assert [op.name for op in forward[0]] == [op.name for op in forward[1]]


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_gradients_are_all_reduced_in_buckets_of_25_mb(micro_batches):
    step = gpt2(gpus=4, micro_batches=micro_batches)
    program, collectives = program_of(step), step.workload.collectives
    reduced = [t for op in program.ops if op.phase is Phase.COLLECTIVE for t in op.updates]
    assert len(reduced) == len(set(reduced)) == 148
    assert sum(c.size_bytes for c in collectives) == sum(program.tensors[t].size_bytes for t in reduced)
    assert all(c.size_bytes >= 25_000_000 for c in collectives[:-1])
    assert all(c.devices == (0, 1, 2, 3) for c in collectives)
    for index, op in enumerate(program.ops):
        if op.collective:
            bucket = set(op.updates)
            last = max(i for i, o in enumerate(program.ops[:index]) if bucket & {*o.writes, *o.updates})
            assert program.ops[last].phase is Phase.BACKWARD
            # Nothing but another collective stands between the last gradient of a bucket and its all-reduce.
            assert all(other.collective for other in program.ops[last + 1 : index])


def test_bucket_size_is_a_setting():
    model = build_model("mlp", layers=4, width=64)
    for bucket_bytes, count in ((10**9, 1), (1, 8)):
        step = import_train_step(
            model.loss, model.params, model.batch, optax.sgd(0.1), gpu="H200", gpus=2, bucket_bytes=bucket_bytes
        )
        assert len(step.workload.collectives) == count


def test_weights_are_replicas_on_several_gpus_only():
    def weights(step):
        return [t.replica_group for t in program_of(step).tensors if t.kind is TensorKind.WEIGHT]

    assert not any(weights(gpt2()))
    assert all(weights(gpt2(gpus=4)))


def test_import_is_deterministic():
    assert imported.__wrapped__("gpt2", "A100-SXM4-40GB").workload == gpt2().workload


def test_layer_coarsening_is_reported_and_keeps_totals():
    fine, coarse = gpt2(), gpt2(coarsen="layer")
    assert coarse.report.merged_ops == len(program_of(fine).ops) - len(program_of(coarse).ops) > 500
    assert coarse.report.merged_tensors == len(program_of(fine).tensors) - len(program_of(coarse).tensors) > 0
    assert any("merged" in line for line in coarse.report.lines())
    for total in (lambda op: op.flops, lambda op: op.memory_traffic_bytes):
        assert sum(map(total, program_of(fine).ops)) == sum(map(total, program_of(coarse).ops))
    durations = [math.fsum(op.duration_s for op in program_of(step).ops) for step in (fine, coarse)]
    assert durations[0] == pytest.approx(durations[1])
    # One op per layer holds all its outputs while it runs, so coarse steps look somewhat larger.
    assert temporaries_bytes(fine) <= temporaries_bytes(coarse) <= 1.1 * temporaries_bytes(fine)


def test_durations_are_those_of_the_roofline():
    op = next(op for op in program_of(gpt2()).ops if op.name == "h3.mlp.fc")
    assert op.flops == 2 * 8192 * 768 * 3072
    assert op.duration_s == pytest.approx(op.flops / (0.70 * 312e12))
    op = next(op for op in program_of(gpt2()).ops if op.name == "h3.attn.residual")
    assert op.memory_traffic_bytes == 8192 * 768 * (4 + 2 + 4) + 768 * 4
    assert op.duration_s == pytest.approx(op.memory_traffic_bytes / (0.85 * 1555e9))
    assert gpt2().workload.duration_source.startswith("roofline: A100-SXM4-40GB")


@pytest.mark.parametrize("gpu", ["V100-SXM2-16GB", "P100-SXM2-16GB", "GTX-1080-Ti"])
def test_bf16_on_a_gpu_without_it_is_an_error(gpu):
    with pytest.raises(InputError, match="no bfloat16 matrix arithmetic; use dtype float16 or float32"):
        imported("mlp", gpu)


def test_fp16_on_a_slow_gpu_is_slow():
    times = [
        sum(op.duration_s for op in program_of(imported("mlp", "GTX-1080-Ti", dtype=dtype, batch=1024)).ops)
        for dtype in ("float16", "float32")
    ]
    assert times[0] > 10 * times[1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"micro_batches": 0}, "micro_batches: 0 must be at least 1"),
        ({"gpus": 0}, "gpus: 0"),
        ({"coarsen": "block"}, "coarsen: 'block' is unknown; choose none or layer"),
        ({"gpu": "H1000"}, "gpu: 'H1000' is unknown"),
    ],
)
def test_bad_settings_are_named(options, message):
    with pytest.raises(InputError, match=message):
        imported("mlp", **{"gpu": "H200", **options})


def test_two_layer_perceptron_by_hand():
    step = imported("mlp", "H100-SXM5-80GB", layers=2, width=64, batch=256, dtype="float32")
    program = program_of(step)
    read = {op.name: {program.tensors[t].name for t in op.reads} for op in program.ops}
    written = {op.name: {program.tensors[t].name for t in op.writes} for op in program.ops}
    assert list(read)[:3] == ["dense0", "dense0.relu", "dense1"]
    assert read["dense0"] == {"batch.x", "dense0.kernel"}
    assert read["dense0.relu"] == {"dense0", "dense0.bias"}
    assert read["dense1"] == {"dense0.relu", "dense1.kernel"}
    # The difference is kept, because it takes two reads to compute; its square is not.
    assert read["loss"] == {"dense1", "dense1.bias", "batch.y"}
    assert read["loss.backward"] == {"loss"}
    assert read["dense1.bias.grad"] == {"loss.backward"}
    assert read["dense1.kernel.grad"] == {"loss.backward", "dense0.relu"}
    assert read["dense1.backward"] == {"loss.backward", "dense1.kernel"}
    # Backward of ReLU takes its mask from what forward passed on; the product itself is not kept.
    assert read["dense0.relu.backward"] == {"dense0.relu", "dense1.backward"}
    # Bias gradients come out of the kernel that makes the gradient which they sum, within a layer.
    assert written["dense0.relu.backward"] == {"dense0.relu.backward", "dense0.bias.grad"}
    assert read["dense0.kernel.grad"] == {"dense0.relu.backward", "batch.x"}
    updates = {op.name: {program.tensors[t].name for t in op.updates} for op in program.ops if op.updates}
    assert updates["update.dense1.kernel"] == {
        "dense1.kernel",
        "optimizer.mu.dense1.kernel",
        "optimizer.nu.dense1.kernel",
    }
    assert len(updates) == 4 + 1  # weights and biases, and the step counter


def test_schedules_and_clipping_keep_updates_in_place():
    model = build_model("mlp", layers=2, width=64)
    optimizer = optax.chain(
        optax.clip_by_global_norm(1.0), optax.adamw(optax.cosine_decay_schedule(1e-3, 100), weight_decay=0.1)
    )
    step = import_train_step(
        model.loss, model.params, model.batch, optimizer, gpu="H200", micro_batches=2, gpus=2, bucket_bytes=10**6
    )
    program = program_of(step)
    counters = [i for i, t in enumerate(program.tensors) if t.name.endswith("count")]
    assert len(counters) == 2
    for counter in counters:
        readers = [i for i, op in enumerate(program.ops) if counter in op.reads]
        (updater,) = [i for i, op in enumerate(program.ops) if counter in op.updates]
        assert updater > max(readers)


def test_any_step_can_be_imported():
    model = build_model("gpt2", layers=2, width=128, heads=4, sequence=128, vocabulary=1000)
    optimizer = optax.adamw(1e-4)

    def train_step(state, batch):
        loss, gradients = jax.value_and_grad(model.loss)(state["params"], batch)
        updates, opt_state = optimizer.update(gradients, state["opt_state"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt_state": opt_state}, {"loss": loss}

    state = {"params": model.params, "opt_state": jax.eval_shape(optimizer.init, model.params)}
    generic = import_step(train_step, state, model.batch, gpu="H200")
    made = import_train_step(model.loss, model.params, model.batch, optimizer, gpu="H200")
    assert generic.report.matmul_flops == made.report.matmul_flops
    assert temporaries_bytes(generic) == pytest.approx(temporaries_bytes(made), rel=0.01)
    for kind in (TensorKind.WEIGHT, TensorKind.OPTIMIZER_STATE):
        assert bytes_of(generic, kind) == bytes_of(made, kind)
    assert {op.phase for op in program_of(generic).ops} == {Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER}
    gradients = [t.name for t in program_of(generic).tensors if t.kind is TensorKind.GRADIENT]
    assert "params.h1.mlp.fc.kernel.grad" in gradients
    assert len(gradients) >= len(jax.tree.leaves(model.params))


def test_step_that_returns_no_state_is_an_error():
    with pytest.raises(InputError, match="first item is the new state"):
        import_step(lambda state, batch: state["w"].sum(), {"w": jnp.ones(3)}, {}, gpu="H200")


def test_unknown_primitives_are_reported():
    def loss(params, batch):
        return jnp.linalg.cholesky(params["w"] + batch).sum()

    shape = jax.ShapeDtypeStruct((8, 8), jnp.float32)
    step = import_train_step(loss, {"w": shape}, shape, optax.sgd(0.1), gpu="H200")
    assert "cholesky" in step.report.uncounted_primitives
    assert any("timed by bytes only" in line for line in step.report.lines())


def test_report_is_plain_data():
    assert dataclasses.asdict(gpt2().report)["ops"] == len(program_of(gpt2()).ops)


def test_models_without_name_scopes_get_layers_from_their_parameters():
    def loss(params, batch):
        x = batch
        for layer in params["blocks"]:
            x = jnp.tanh(x @ layer["w"] + layer["b"])
        return (x**2).mean()

    block = {"w": jax.ShapeDtypeStruct((64, 64), jnp.float32), "b": jax.ShapeDtypeStruct((64,), jnp.float32)}
    batch = jax.ShapeDtypeStruct((256, 64), jnp.float32)
    step = import_train_step(loss, {"blocks": [block] * 3}, batch, optax.sgd(0.1), gpu="H200")
    layers = [op.layer for op in program_of(step).ops if op.phase is Phase.FORWARD]
    assert list(dict.fromkeys(layers)) == ["blocks.0", "blocks.1", "blocks.2"]
    names = {t.name for t in program_of(step).tensors}
    assert {"blocks.1", "blocks.1.w", "blocks.1.w.grad"} <= names


@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize("optimizer", [optax.sgd(1e-3), optax.adamw(1e-3)])
@pytest.mark.parametrize("regularised", [False, True])
def test_scalar_parameters_have_gradients_like_others(micro_batches, optimizer, regularised):
    """A temperature or a gate is one number; its gradient is made once and read by its update."""
    params = {"w": jax.ShapeDtypeStruct((64, 64), jnp.float32), "temperature": jax.ShapeDtypeStruct((), jnp.float32)}

    def loss(params, batch):
        scale = 1.0 if regularised else jnp.exp(params["temperature"])
        return jnp.mean(jnp.square(batch @ params["w"] * scale)) + params["temperature"] ** 2

    batch = jax.ShapeDtypeStruct((8, 64), jnp.float32)
    step = import_train_step(loss, params, batch, optimizer, gpu="A100-SXM4-40GB", micro_batches=micro_batches)
    program = program_of(step)
    names = [tensor.name for tensor in program.tensors]
    gradient, weight = names.index("temperature.grad"), names.index("temperature")
    makers = [op for op in program.ops if gradient in (*op.writes, *op.updates) and op.phase is Phase.BACKWARD]
    updates = [op for op in program.ops if weight in op.updates]
    assert [op.name.startswith("accumulate.") for op in makers] == [micro_batches > 1]
    assert len(updates) == 1 and gradient in (*updates[0].reads, *updates[0].updates)
