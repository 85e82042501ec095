"""Networks of several kinds, offloading and recomputing; two GPUs with different plans for one of them."""

import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from checker_bytes import checker_bytes
from steps import GPU, OPTIMIZER, identical, largest_difference, make_case, plan, planned

sys.path.insert(0, str(Path(__file__).parents[3] / "experiments" / "ways_out"))
from networks import NETWORKS, network

from tmojax import import_train_step
from tmojax.execute import CompiledStep
from tmojax.models import build_model

# Float32: the ordinary step is fused across the ops of the plan, so sums are taken in another order; AdamW divides the
# gradient by its own size, which turns differences of tiny gradients into differences of the update.
GRADIENT_TOLERANCE = 1e-4
STATE_TOLERANCE = 2e-3


@pytest.mark.long
@pytest.mark.parametrize("name", NETWORKS)
def test_plans_give_the_gradients_of_the_ordinary_step_in_the_planned_bytes(name):
    net = network(name)
    example = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), net.batch(np.random.default_rng(0)))
    gpus = 2 if name == "gpt2" else 1
    case = make_case(name, net.loss, net.params, example, net.batch, gpus=gpus)
    problem = case.problem()
    params, _, gradients = case.unplanned(case.batches())
    kept = None
    plans = (("keep-all",), ("offload-all",), ("recompute-all", "offload-all")[:gpus])
    for segments, names in [*(("ops", names) for names in plans), ("joined", plans[0]), ("joined", plans[2])]:
        schedule = plan(problem, *names)
        step = planned(case, problem, schedule, segments)
        result = step.step(case.batches(), gradients=True)
        assert largest_difference(step.state()[0], params) < STATE_TOLERANCE
        found = {name.removesuffix(".grad"): value for name, value in result.gradients[0].items()}
        expected = {
            jax.tree_util.keystr(path, simple=True, separator="."): leaf
            for path, leaf in jax.tree_util.tree_leaves_with_path(gradients)
        }
        assert found.keys() == expected.keys()
        for leaf in expected:
            scale = max(float(np.abs(expected[leaf]).max()), 1e-6)
            assert float(np.abs(found[leaf] - expected[leaf]).max()) < GRADIENT_TOLERANCE * scale, leaf
        if segments == "ops":
            kept = kept or (step.state(), result.gradients)
            assert identical((step.state(0), result.gradients), kept) and identical(step.state(gpus - 1), kept[0])
        else:
            assert len(step.segments[0]) < 0.7 * sum(len(segment.nodes) for segment in step.segments[0])
        for device, counts in enumerate(result.memory):
            for count, allowed in zip(counts, checker_bytes(problem, schedule, device), strict=True):
                assert count.planned_bytes.items() >= allowed.items()
                assert all(size <= count.planned_bytes[at] for at, size in count.counted_bytes.items())


def test_equal_layers_are_compiled_once():
    """A deeper network has more ops and not more programs."""
    counts = []
    for layers in (3, 6):
        model = build_model("mlp", batch=8, dtype="float32", layers=layers, width=16)
        step = CompiledStep(import_train_step(model.loss, model.params, model.batch, OPTIMIZER, gpu=GPU, gpus=1))
        counts.append((step.program_count, len(step.workload.programs[0].ops)))
    (few, ops), (also_few, more_ops) = counts
    assert few == also_few < ops < more_ops
