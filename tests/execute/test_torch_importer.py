"""The workload of a PyTorch step: what autograd saves, for how long, and what can be said against it."""

import pytest

pytest.importorskip("torch", reason="PyTorch is an optional extra: pip install 'tmojax[torch]'")
import torch
from torch import nn
from torch.nn import functional as F
from torch_plans import GPU, NETWORKS, imported_step, network

from tmojax.errors import InputError
from tmojax.importers.torch_importer import import_torch_step, layer_label
from tmojax.problem import Lifetime, Phase, TensorKind, keep_all_footprint_bytes, validate_workload


def squares(module, batch):
    return module(batch).square().sum()


def imported(module, loss=squares, batch=None, **settings):
    return import_torch_step(module, loss, torch.ones(8, 16) if batch is None else batch, gpu=GPU, **settings)


def tensors_of(step):
    program = step.workload.programs[0]
    return {tensor.name: tensor.size_bytes for tensor in program.tensors if tensor.lifetime is not Lifetime.STATE}


def test_a_network_by_hand():
    """Linear 16 -> 32, ReLU, Linear 32 -> 4 on 8 rows of float32, loss = sum of squares."""
    module = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
    step = imported(module, micro_batches=2)
    program = step.workload.programs[0]
    state = {tensor.name: tensor.size_bytes for tensor in program.tensors if tensor.lifetime is Lifetime.STATE}
    parameters = 4 * (16 * 32 + 32 + 32 * 4 + 4)
    constants = 8 * 16 * 4 + 4  # the batch, and the one number that backward starts from
    assert state == {"parameters and buffers": parameters, "gradients": parameters, "batch and constants": constants}
    forward = [op for op in program.ops if op.phase is Phase.FORWARD]
    assert [op.name for op in forward] == [
        "0.addmm.default", "1.relu.default", "2.addmm.default", "pow.Tensor_Scalar", "sum.default",
        "held after sum.default",
    ]  # fmt: skip
    sizes = tensors_of(step)
    assert sizes["0.addmm.default:out"] == sizes["1.relu.default:out"] == 8 * 32 * 4
    assert sizes["2.addmm.default:out"] == sizes["pow.Tensor_Scalar:out"] == 8 * 4 * 4
    backward = [op for op in program.ops if op.phase is Phase.BACKWARD]
    assert [op.name for op in backward] == ["PowBackward0", "AddmmBackward0", "ReluBackward0", "AddmmBackward0#1"]
    held = {program.tensors[t].name for t in forward[-1].reads}
    assert held == {*state, "sum.default:out"}  # the caller has the loss
    reads = {op.name: {program.tensors[t].name for t in op.reads} for op in backward}
    assert "1.relu.default:out" in reads["AddmmBackward0"] and "1.relu.default:out" in reads["ReluBackward0"]
    assert not any("0.addmm.default:out" in names for names in reads.values())  # autograd does not save it
    # The last op makes the gradients of the first layer's weight and bias, and adds them to what is there.
    assert backward[-1].workspace_bytes == 4 * (16 * 32 + 32)
    assert forward[0].flops == 2 * 8 * 16 * 32 and all(op.duration_s > 0 for op in program.ops if "held" not in op.name)


@pytest.mark.parametrize("name", NETWORKS)
def test_workloads_are_valid_and_what_is_saved_is_read(name):
    step = imported_step(name, gpus=2, micro_batches=2)
    validate_workload(step.workload)
    program = step.workload.programs[0]
    saved = [storage for storage in step.traced.storages if storage.saved]
    assert saved
    read = {program.tensors[t].name for op in program.ops if op.phase is Phase.BACKWARD for t in op.reads}
    activations = {tensor.name for tensor in program.tensors if tensor.kind is TensorKind.ACTIVATION}
    assert len(read & activations) >= len(saved)
    assert {op.layer for op in program.ops} > {""}
    footprint = keep_all_footprint_bytes(step.workload, 0)
    assert footprint > sum(t.size_bytes for t in program.tensors if t.lifetime is Lifetime.STATE)


def test_nothing_is_computed_or_changed():
    module, loss, batch = network("resnet")
    before = {name: value.clone() for name, value in module.state_dict().items()}
    random = torch.get_rng_state()
    import_torch_step(module, loss, batch, gpu=GPU)
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    assert all(parameter.grad is None for parameter in module.parameters())
    assert torch.equal(torch.get_rng_state(), random)


def test_a_module_without_memory_can_be_planned():
    module, loss, batch = network("mlp")
    real = import_torch_step(module, loss, batch, gpu=GPU)
    there = import_torch_step(module.to("meta"), loss, {k: v.to("meta") for k, v in batch.items()}, gpu=GPU)
    assert [op.name for op in there.workload.programs[0].ops] == [op.name for op in real.workload.programs[0].ops]


def test_views_and_ties_are_one_tensor():
    """Queries, keys and values are parts of one result; a tied weight is one storage with one gradient."""
    step = imported_step("gpt2")
    sizes = tensors_of(step)
    assert sum(name.startswith("h.0.attn.qkv") for name in sizes) == 1
    module, _, _ = network("gpt2")
    parameters = sum(p.numel() * 4 for p in module.parameters())
    weights = next(t for t in step.workload.programs[0].tensors if t.name == "gradients")
    assert weights.size_bytes == parameters


def test_a_residual_is_held_until_it_is_added():
    step = imported_step("mlp")
    program = step.workload.programs[0]
    first = next(i for i, t in enumerate(program.tensors) if t.name == "add.Tensor:out")
    held = program.ops[step.held_to[first]]
    assert held.name in ("add.Tensor#1", "held after add.Tensor#1")


def test_what_cannot_be_recomputed_is_not():
    """Random numbers, running statistics, and what is changed in place."""
    for name, kernels in (("gpt2-dropout", ("bernoulli", "native_dropout")), ("resnet", ("batch_norm", "relu_"))):
        ops = imported_step(name).workload.programs[0].ops
        chosen = [op for op in ops if any(kernel in op.name for kernel in kernels) and op.phase is Phase.FORWARD]
        assert chosen and not any(op.recomputable for op in chosen)
    plain = imported_step("gpt2").workload.programs[0].ops
    attention = [op for op in plain if "scaled_dot_product" in op.name]
    assert attention and all(op.recomputable for op in attention)  # without dropout it draws no random numbers
    rows, length, width = 4, 16, 32
    assert attention[0].flops == 4 * rows * length * length * width  # scores, and their products with the values


def test_optimizer_state_counts():
    module = nn.Linear(16, 4)
    optimizer = torch.optim.AdamW(module.parameters())
    with pytest.raises(InputError, match=r"AdamW has no state yet; run one optimizer.step"):
        imported(module, optimizer=optimizer)
    squares(module, torch.ones(8, 16)).backward()
    optimizer.step()
    program = imported(module, optimizer=optimizer).workload.programs[0]
    state = next(t for t in program.tensors if t.kind is TensorKind.OPTIMIZER_STATE)
    assert state.size_bytes >= 2 * 4 * (16 * 4 + 4)
    assert program.ops[-1].phase is Phase.OPTIMIZER and program.ops[-1].step_op
    with pytest.raises(InputError, match=r"state of 2 parameter\(s\) that are not in the module, the first of shape"):
        imported(nn.Linear(16, 4), optimizer=optimizer)


def test_state_that_modules_hold_is_idle_nowhere():
    module = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
    optimizer = torch.optim.AdamW(module.parameters())
    squares(module, torch.ones(8, 16)).backward()
    optimizer.step()
    program = imported(module, optimizer=optimizer, gpus=2).workload.programs[0]
    state = {i for i, tensor in enumerate(program.tensors) if tensor.lifetime is Lifetime.STATE}
    optimizer_state = {i for i in state if program.tensors[i].kind is TensorKind.OPTIMIZER_STATE}
    held = state - optimizer_state
    assert len(held) == 3 and all(held <= {*op.reads, *op.updates} for op in program.ops)
    # One tensor per block, needed by the update alone.
    assert sorted(program.tensors[i].name for i in optimizer_state) == ["optimizer state of 0", "optimizer state of 2"]
    assert all(optimizer_state.isdisjoint((*op.reads, *op.updates)) for op in program.ops[:-1])
    assert optimizer_state <= {*program.ops[-1].updates}


def test_layers():
    assert [layer_label(path) for path in ("h.0.attn.qkv", "h.11", "ln_f", "", "stages.2.blocks.1.conv")] == [
        "h.0", "h.11", "ln_f", "", "stages.2",
    ]  # fmt: skip


class Saved(nn.Module):
    def forward(self, x):
        y = torch.exp(x * self.scale)
        y.add_(1)  # exp has saved its result
        return y

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(16))


class Branch(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(16, 16)

    def forward(self, x):
        y = self.layer(x)
        return y if y.sum().item() > 0 else -y


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.here, self.there = nn.Linear(16, 16), nn.Linear(16, 16, device="meta")


def test_clear_errors():
    linear = nn.Linear(16, 4)
    with pytest.raises(InputError, match=r"changes 'exp' in place after autograd has saved it"):
        imported(Saved())
    with pytest.raises(InputError, match="its course depends on the values of tensors"):
        imported(Branch())
    with pytest.raises(InputError, match=r"parameters are on \['cpu', 'meta'\]; one is needed"):
        imported(Twice())
    with pytest.raises(InputError, match=r"returned a \(8, 4\) tensor; it must return one number"):
        imported(linear, lambda module, batch: module(batch))
    with pytest.raises(InputError, match="returned a float"):
        imported(linear, lambda module, batch: 1.0)
    with pytest.raises(InputError, match="returned a"):
        imported(linear, lambda module, batch: batch.sum())  # depends on no parameter
    with pytest.raises(InputError, match="takes gradients itself"):
        imported(linear, lambda module, batch: torch.autograd.grad(squares(module, batch), module.weight)[0].sum())
    with pytest.raises(InputError, match="that is not plain and dense"):
        imported(linear, lambda module, batch: torch.sparse.mm(batch.to_sparse(), module.weight.T).sum())
    with pytest.raises(InputError, match="gpu: 'X' is unknown"):
        import_torch_step(linear, squares, torch.ones(8, 16), gpu="X")
    with pytest.raises(InputError, match="must be at least 1"):
        imported(linear, micro_batches=0)


def test_losses_that_keep_all_elements_count_them():
    """The kernel of `mse_loss` returns a number that lies in the storage of all squares."""
    for loss in (F.mse_loss, F.smooth_l1_loss, F.binary_cross_entropy_with_logits):
        step = imported(nn.Linear(16, 4), lambda module, x, loss=loss: loss(module(x), torch.zeros(8, 4)))
        real = loss(torch.ones(8, 4), torch.zeros(8, 4)).untyped_storage().nbytes()
        made = [name for name in tensors_of(step) if name.startswith((loss.__name__, "mean"))]
        assert tensors_of(step)[made[-1]] == real
