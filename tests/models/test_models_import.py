"""Steps of the networks at real widths: operations, layers and what there is to schedule in each block."""

import re
from collections import Counter

import optax
import pytest
from test_published_sizes import forward_matmul_flops

from tmojax.importers.jax_importer import import_train_step
from tmojax.models import build_model
from tmojax.problem import Lifetime, Phase, TensorKind

STAGES = ("stage1", "stage2", "stage3", "stage4")
# What backward need not compute: the gradient of the batch, and of the positions of a Conformer.
WITHOUT_GRADIENT = {
    "gpt2": 0,
    "llama-7b": 0,
    "bert-base": 0,
    "vit-b16": 2 * 14**2 * 768 * 3 * 16**2,
    "resnet50": 2 * 112**2 * 64 * 3 * 7**2,
    "densenet121": 2 * 112**2 * 64 * 3 * 7**2,
    "convnext-tiny": 2 * 56**2 * 96 * 3 * 4**2,
    "conformer-s": 2 * 799 * 39 * 144 * 9,
    "dlrm": 2 * 13 * 512,
}


def imported(name, batch, **options):
    model = build_model(name, batch=batch, **options)
    step = import_train_step(model.loss, model.params, model.batch, optax.adamw(1e-4), gpu="A100-SXM4-40GB")
    return model, step


def shallow(name):
    """Options for the least depth, and the number of layers that it has."""
    if name == "dlrm":
        return {"tables": 4, "rows": 1000}, 0
    if name == "densenet121":
        return dict.fromkeys(STAGES, 2), 8
    return (dict.fromkeys(STAGES, 1), 4) if name in ("resnet50", "convnext-tiny") else ({"layers": 1}, 1)


def schedulable(program):
    """For each block, the activations of at least 16 KiB that are idle between forward and backward.

    A block of a DenseNet has several layers. Copies of weights in the compute dtype do not count.
    """
    backward = {t for op in program.ops if op.phase is Phase.BACKWARD for t in op.reads}
    counts = Counter()
    for op in program.ops:
        for tensor in op.writes:
            spec = program.tensors[tensor]
            if op.phase is Phase.FORWARD and spec.kind is TensorKind.ACTIVATION and tensor in backward:
                counts[op.layer.split("_layer")[0]] += spec.size_bytes >= 2**14 and ".kernel." not in spec.name
    return counts


def check(name, model, step, layers):
    program, batch = step.workload.programs[0], model.samples
    missing = WITHOUT_GRADIENT[name] * batch
    if name.startswith("conformer"):
        width, steps = 144, 399
        missing += layers * 2 * (2 * steps - 1) * width**2  # one for all samples
    assert step.report.matmul_flops == 3 * forward_matmul_flops(model) - missing
    assert step.report.uncounted_primitives == ()
    blocks = {op.layer for op in program.ops if re.fullmatch(r"h\d+|stage\d+_block\d+|block\d+_layer\d+", op.layer)}
    assert len(blocks) == layers
    counts = schedulable(program)
    assert all(counts[block.split("_layer")[0]] >= 5 for block in blocks)
    parameters = [t for t in program.tensors if t.kind is TensorKind.WEIGHT]
    made = {t for op in program.ops if op.phase is Phase.BACKWARD for t in op.writes}
    gradients = [program.tensors[t] for t in made if program.tensors[t].kind is TensorKind.GRADIENT]
    assert len(gradients) == len(parameters) and all(t.lifetime is Lifetime.STATE for t in parameters)


QUICK = ("bert-base", "resnet50", "convnext-tiny", "dlrm")


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in QUICK else pytest.mark.long) for n in WITHOUT_GRADIENT]
)
def test_a_step_costs_three_times_its_forward(name):
    options, layers = shallow(name)
    model, step = imported(name, batch=8, **options)
    check(name, model, step, layers)


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "layers"),
    [
        ("resnet50", 16),
        ("densenet121", 58),
        ("convnext-tiny", 18),
        ("vit-b16", 12),
        ("bert-base", 12),
        ("conformer-s", 16),
    ],
)
def test_networks_of_real_depth(name, layers):
    model, step = imported(name, batch=8)
    check(name, model, step, layers)
    program = step.workload.programs[0]
    assert 10 * layers < len(program.ops) < 150 * layers
    assert max(op.duration_s for op in program.ops) < sum(op.duration_s for op in program.ops) / 10


@pytest.mark.long
def test_the_tables_of_dlrm_are_most_of_its_step():
    _, step = imported("dlrm", batch=2048)
    program = step.workload.programs[0]
    tables = [t for t in program.tensors if t.kind is TensorKind.WEIGHT and t.name.startswith("table")]
    assert sum(t.size_bytes for t in tables) == 4 * 16 * 33_762_577
    grads = [t for t in program.tensors if t.kind is TensorKind.GRADIENT and t.name.startswith("table")]
    assert sum(t.size_bytes for t in grads) == sum(t.size_bytes for t in tables)
    for op in program.ops:
        if op.layer.startswith("table") and op.phase is Phase.FORWARD:
            # Rows of 16 numbers in fp32, read and written, and their indices.
            assert op.memory_traffic_bytes <= 2048 * (2 * 16 * 4 + 26 * 4)
        elif op.layer.startswith("table") and op.phase is Phase.BACKWARD:
            # All of the gradient is written; what is added is one vector of each sample.
            (made,) = op.writes
            assert op.memory_traffic_bytes <= program.tensors[made].size_bytes + 2048 * (16 * 4 + 26 * 4)
