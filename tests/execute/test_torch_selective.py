"""Plans as selective checkpoints: the same gradients, the bytes of the plan, and an error for what they cannot do."""

from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("torch", reason="PyTorch is an optional extra: pip install 'tmojax[torch]'")
import torch
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop
from torch_plans import batches_of, imported_step, network, ordinary_gradients, planned, problem_of

from tmojax.errors import InputError, TmojaxError
from tmojax.execute_torch import KernelAction, OffloadingPartition, SelectiveCheckpoints, selective_planner

LAYER_NORM = "h.0.ln1.native_layer_norm.default"
BLOCKS = {"gpt2": ("h.0", "h.1"), "vit": ("blocks.0", "blocks.1")}


def checkpoints(name, factor, paths=None, micro_batches=1):
    imported = imported_step(name, micro_batches=micro_batches)
    problem = problem_of(imported, factor)
    paths = BLOCKS[name] if paths is None else paths
    result = selective_planner(imported, paths, tie_layers=False).plan(problem)
    assert result.schedule is not None, result.message
    return SelectiveCheckpoints(imported, problem, result.schedule, paths)


def gradients_of(module):
    return [p.grad for p in module.parameters() if p.grad is not None]


@pytest.mark.parametrize(("name", "factor"), [("gpt2", 0.9), ("gpt2", 0.75), ("vit", 0.8)])
def test_gradients_are_equal_and_the_bytes_are_the_plans(name, factor):
    points = checkpoints(name, factor, micro_batches=2)
    module, loss, _ = network(name)
    batches = batches_of(name, 2)
    for _ in range(2):
        module.zero_grad()
        with points.applied(module):
            for batch in batches:
                value = loss(module, batch)
                value.backward(torch.full_like(value, 1 / 2))
    expected = ordinary_gradients(name, batches)
    assert all(torch.equal(a, b) for a, b in zip(gradients_of(module), expected, strict=True))
    points.verify()
    assert points.sent_bytes == 4 * points.planned_bytes
    if factor < 0.8:
        assert points.planned_bytes > 0
    assert KernelAction.RECOMPUTE in points.actions.values()


class Counting(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.count = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count[str(func)] = self.count.get(str(func), 0) + 1
        return func(*args, **(kwargs or {}))


def test_what_is_saved_or_offloaded_is_not_computed_again():
    points = checkpoints("gpt2", 0.75)
    program = imported_step("gpt2").workload.programs[0]
    module, loss, batch = network("gpt2")
    with Counting() as plain:
        loss(module, batch)
    with points.applied(module):
        value = loss(module, batch)
        with Counting() as backward:
            value.backward()
    again = {name for name, action in points.actions.items() if action is KernelAction.RECOMPUTE}
    kept = [op for op in program.ops if op.name in points.actions and op.name not in again]
    assert kept
    for kernel in ("aten.addmm.default", "aten._scaled_dot_product_flash_attention_for_cpu.default"):
        most = sum(name.endswith(kernel.removeprefix("aten.")) for name in again)
        assert backward.count.get(kernel, 0) <= most < plain.count[kernel]


def with_policies(points, module):
    for path in BLOCKS["gpt2"]:
        part, contexts = module.get_submodule(path), points.policies(path)
        part.forward = lambda x, f=part.forward, contexts=contexts: checkpoint(
            f, x, use_reentrant=False, context_fn=contexts
        )


def test_in_eager_mode_pytorch_recomputes_what_is_to_be_offloaded():
    """Why `contexts` do it themselves. When a version of PyTorch copies here, they can go."""
    points = checkpoints("gpt2", 0.75)
    module, loss, batch = network("gpt2")
    with_policies(points, module)
    with set_checkpoint_early_stop(False):
        value = loss(module, batch)
    with Counting() as backward:
        value.backward()
    expected = ordinary_gradients("gpt2", [batch])
    assert all(torch.equal(a, b) for a, b in zip(gradients_of(module), expected, strict=True))
    kernel = "addmm.default"
    by_action = {
        action: sum(chosen is action and name.endswith(kernel) for name, chosen in points.actions.items())
        for action in KernelAction
    }
    assert by_action[KernelAction.OFFLOAD] > 0
    again = by_action[KernelAction.OFFLOAD] + by_action[KernelAction.RECOMPUTE]
    assert backward.count[f"aten.{kernel}"] == again
    assert not any("device_put" in name or "_to_copy" in name for name in backward.count)


def compiled_step(points):
    """(partition, gradients, forward graphs, backward graphs) of a step compiled with the plan's policies."""
    module, loss, batch = network("gpt2")
    with_policies(points, module)
    partition, graphs = OffloadingPartition(points), ([], [])

    def noting(kind):
        def compiler(graph, _):
            graphs[kind].append(graph.graph)
            return make_boxed_func(graph)

        return compiler

    torch._dynamo.reset()
    backend = aot_autograd(fw_compiler=noting(0), bw_compiler=noting(1), partition_fn=partition)
    torch.compile(loss, backend=backend)(module, batch).backward()
    return partition, gradients_of(module), *graphs


def copies(graphs):
    return [node for graph in graphs for node in graph.nodes if node.target is torch.ops.prims.device_put.default]


@pytest.mark.long
def test_a_compiled_step_sends_what_the_plan_sends():
    """The forward graph copies the planned bytes to the host, the backward graph brings each copy back."""
    points = checkpoints("gpt2", 0.75)
    partition, gradients, forward, backward = compiled_step(points)
    partition.verify()
    expected = ordinary_gradients("gpt2", batches_of("gpt2", 1))
    assert all(torch.equal(a, b) for a, b in zip(gradients, expected, strict=True))
    out, back = copies(forward), copies(backward)
    assert sum(node.args[0].meta["val"].untyped_storage().nbytes() for node in out) == points.planned_bytes > 0
    assert all(node.args[1] == torch.device("cpu") for node in out)
    assert len(out) == len(back) == sum(action is KernelAction.OFFLOAD for action in points.actions.values())
    with pytest.raises(TmojaxError, match="compiled step: it sends 0 bytes per micro-batch to the host, and the plan"):
        OffloadingPartition(points).verify()


@pytest.mark.long
def test_what_a_compiled_step_cannot_offload_is_named():
    """Layer norm has three results, and PyTorch offloads none of several."""
    points = checkpoints("gpt2", 0.75)
    op = next(op for op in points._action if points._program.ops[op].name == LAYER_NORM)
    points._action[op] = KernelAction.OFFLOAD
    with pytest.raises(Exception, match=r"offloads 'native_layer_norm.*' of the compiled graph.*in eager mode"):
        compiled_step(points)


def test_modules_are_as_before_afterwards():
    points = checkpoints("gpt2", 0.9)
    module, _, _ = network("gpt2")
    with points.applied(module):
        assert "forward" in module.h[0].__dict__
    assert "forward" not in module.h[0].__dict__


def test_plans_that_checkpoints_cannot_do_are_refused():
    imported = imported_step("gpt2")
    problem = problem_of(imported, 0.8)
    with pytest.raises(InputError, match=r"which checkpoints around h\.0, h\.1 keep on the device"):
        SelectiveCheckpoints(imported, problem, planned(problem, "offload-all"), BLOCKS["gpt2"])
    plan = selective_planner(imported, BLOCKS["gpt2"], tie_layers=False).plan(problem).schedule
    with pytest.raises(InputError, match="device: 1 is none of the plan's 1; import and plan the step with gpus=N"):
        SelectiveCheckpoints(imported, problem, plan, BLOCKS["gpt2"], device=1)
    with pytest.raises(InputError, match="the plan is of another step"):
        SelectiveCheckpoints(imported_step("vit"), problem, planned(problem, "offload-all"), BLOCKS["vit"])


def test_submodules_that_checkpoints_cannot_wrap_are_refused():
    with pytest.raises(InputError, match=r"no submodule 'h\.7' computes anything in the step; it has h\.0, "):
        selective_planner(imported_step("gpt2"), ["h.7"])
    with pytest.raises(InputError, match="changes tensors in place"):
        selective_planner(imported_step("resnet"), ["blocks.0"])
    points = checkpoints("gpt2", 0.9)
    with pytest.raises(InputError, match="'lnf' is not among"):
        points.contexts("lnf")
    with pytest.raises(InputError, match=r"with checkpoints\.applied"):
        points.contexts("h.0")()


def test_another_forward_than_imported_is_refused():
    points = checkpoints("gpt2", 0.9)
    module, loss, batch = network("gpt2")
    module.h[0].ln1 = torch.nn.Identity()
    module.h[0].fc = torch.nn.Sequential(module.h[0].fc, torch.nn.Tanh())
    with points.applied(module), pytest.raises(InputError, match=r"module 'h\.0': calls aten\.tanh\.default"):
        loss(module, batch)


def test_bytes_that_differ_are_an_error():
    points = checkpoints("gpt2", 0.75)
    module, loss, batch = network("gpt2")
    with pytest.raises(TmojaxError, match="run whole steps, then verify"):
        points.verify()
    with points.applied(module):
        loss(module, batch).backward()
    points.sent_bytes += 1
    with pytest.raises(TmojaxError, match=f"bytes went to the host, and the plan has {points.planned_bytes}"):
        points.verify()


def test_micro_batches_must_be_decided_alike():
    imported = imported_step("gpt2", micro_batches=2)
    problem = problem_of(imported, 0.75)
    plan = selective_planner(imported, BLOCKS["gpt2"], tie_layers=False).plan(problem).schedule
    keep = planned(problem_of(imported), "keep-all")
    first, second = plan.lists[0], keep.lists[0]
    rows = np.concatenate([first[first["micro_batch"] == 0], second[second["micro_batch"] == 1]])
    mixed = replace(plan, lists=(rows,))
    with pytest.raises(InputError, match="micro-batch 1 of gpu0 is decided otherwise"):
        SelectiveCheckpoints(imported, problem_of(imported), mixed, BLOCKS["gpt2"])
