"""Plans in compiled steps: what the policies of selective checkpoints offload really goes to the host.

PyTorch 2.13 carries `CheckpointPolicy.MUST_CPU_OFFLOAD` into the compiler's graph, and nothing there reads it: what has
it is kept or recomputed, without a word. What the partitioner does offload has another mark. A partition function that
puts that mark in place of the policy makes the plan real, and can count what came of it.
"""

# PyTorch is optional, and static checks pass without it.
# pyright: reportMissingImports=false

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from functorch.compile import min_cut_rematerialization_partition
from torch._functorch import config
from torch.utils.checkpoint import CheckpointPolicy

from tmojax.errors import InputError, TmojaxError
from tmojax.execute_torch.selective import SelectiveCheckpoints


class OffloadingPartition:
    """A `partition_fn` of `aot_autograd` for a step whose checkpoints have `checkpoints.policies`.

    `sent_bytes`: what the graphs that were compiled so far send to the host, each run once; by the plan that is what
    one micro-batch sends.
    """

    def __init__(self, checkpoints: SelectiveCheckpoints) -> None:
        self._planned_bytes = checkpoints.planned_bytes
        self.sent_bytes = 0

    def __call__(
        self, joint: torch.fx.GraphModule, joint_inputs: Sequence[Any], **settings: Any
    ) -> tuple[torch.fx.GraphModule, torch.fx.GraphModule]:
        """Divide a joint graph into forward and backward. Raises InputError for a kernel that cannot be offloaded."""
        marked = []
        for node in joint.graph.nodes:
            if node.meta.get("recompute") is CheckpointPolicy.MUST_CPU_OFFLOAD:
                # What is saved can be offloaded; the partitioner itself decides about the rest.
                node.meta.update(recompute=CheckpointPolicy.MUST_SAVE, should_offload=True)
                marked.append(node.name)
        with config.patch(enable_activation_offloading=True):
            forward, backward = min_cut_rematerialization_partition(joint, joint_inputs, **settings)
        sent = {node.name: node for node in forward.graph.nodes if node.meta.get("saved_for_offloading")}
        kept = [name for name in marked if name not in sent]
        if kept:
            raise InputError(
                f"plan: it offloads {kept[0]!r} of the compiled graph, and PyTorch {torch.__version__} keeps it on the "
                f"device: it is a view, not contiguous, one of several results of a kernel, or a result of the graph; "
                f"run the plan in eager mode (SelectiveCheckpoints.applied, PlannedTorchStep)"
            )
        self.sent_bytes += sum(node.meta["val"].untyped_storage().nbytes() for node in sent.values())
        return forward, backward

    def verify(self) -> None:
        """Compare the bytes with the plan, after the whole step was compiled. Raises TmojaxError if they differ."""
        if self.sent_bytes != self._planned_bytes:
            raise TmojaxError(
                f"compiled step: it sends {self.sent_bytes} bytes per micro-batch to the host, and the plan has "
                f"{self._planned_bytes}; compile all submodules with the checkpoints' policies, once"
            )
