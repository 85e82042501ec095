"""One rank of two: `torch_rank.py RANK MEETING_FILE NETWORK PROBLEM PLAN`. Prints what it has found as JSON."""

import json
import sys
import time

import torch
import torch.distributed as dist
from torch_plans import batches_of, imported_step, network, ordinary_gradients

from tmojax.execute_torch import PlannedTorchStep
from tmojax.execute_torch.running import RunningStep
from tmojax.problem import Kind
from tmojax.problem.io import read_plan, read_problem

rank, meeting, name, problem_file, plan_file = int(sys.argv[1]), *sys.argv[2:]
torch.set_num_threads(1)
dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=2)
problem = read_problem(problem_file)
micro_batches = problem.workload.micro_batches
step = PlannedTorchStep(imported_step(name, 2, micro_batches), problem, read_plan(plan_file))
module, loss, _ = network(name)
spans = []
original = RunningStep._carry_out


def noted(self, instruction):
    begin_s = time.monotonic()
    original(self, instruction)
    if instruction.kind in (Kind.OFFLOAD, Kind.PREFETCH):
        spans.append((self._position, begin_s, time.monotonic()))


RunningStep._carry_out = noted
for _ in range(2):  # the second uses the host buffers of the first
    torch.manual_seed(1)
    outcome = step.step(module, loss, batches_of(name, micro_batches, rank))
plain = network(name)[0]
with_gradients = [p for p in plain.parameters() if p.requires_grad]
for parameter, gradient in zip(
    with_gradients, ordinary_gradients(name, batches_of(name, micro_batches, rank)), strict=True
):
    # Held by a parameter: gloo's thread drops its reference when it likes, and a tensor that only Python holds besides
    # needs the interpreter for that, which aborts the process if the interpreter has ended by then (torch 2.13).
    parameter.grad = gradient
    dist.all_reduce(parameter.grad)
    parameter.grad.div_(2)
expected = [p.grad for p in with_gradients]
found = [p.grad for p in module.parameters() if p.grad is not None]
print(
    json.dumps(
        {
            "equal": all(torch.equal(a, b) for a, b in zip(found, expected, strict=True)),
            "within": all(count <= outcome.planned_bytes[i] for i, count in outcome.counted_bytes.items()),
            "peak_bytes": outcome.counted_peak_bytes,
            "host_bytes": outcome.host_bytes,
            "spans": spans,
        }
    ),
    flush=True,
)
dist.destroy_process_group()
