"""Import every network of the zoo at its real size and write a table of what planners get: `table.py OUTPUT`."""

import math
import sys
import time
from pathlib import Path

import jax
import optax

from tmojax.importers.jax_importer import import_train_step
from tmojax.models import MODEL_NAMES, build_model
from tmojax.problem import Lifetime, Phase, TensorKind, keep_all_footprint_bytes

GPU = "A100-SXM4-40GB"
# Samples of one micro-batch, by the beginning of a model's name.
BATCHES = {"gpt2": 8, "llama": 1, "bert": 16, "vit": 64, "resnet": 64, "densenet": 64, "convnext": 64, "conformer": 16,
           "dlrm": 2048, "mlp": 8}  # fmt: skip
HEADER = (
    "| model | parameters | batch | ops | tensors | TFLOP | for backward (GiB) | temporaries (GiB) | step (ms) | "
    "import (CPU s) |\n|---|---|---|---|---|---|---|---|---|---|"
)


def row(name: str) -> str:
    batch = next(size for start, size in BATCHES.items() if name.startswith(start))
    begin = time.process_time()
    model = build_model(name, batch=batch)
    step = import_train_step(model.loss, model.params, model.batch, optax.adamw(1e-4), gpu=GPU, name=name)
    import_s = time.process_time() - begin
    program = step.workload.programs[0]
    parameters = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(model.params))
    read_by_backward = {t for op in program.ops if op.phase is Phase.BACKWARD for t in (*op.reads, *op.updates)}
    made_by_forward = {t for op in program.ops if op.phase is Phase.FORWARD for t in op.writes}
    saved = [program.tensors[t] for t in made_by_forward & read_by_backward]
    saved_bytes = sum(tensor.size_bytes for tensor in saved if tensor.kind is TensorKind.ACTIVATION)
    state_bytes = sum(tensor.size_bytes for tensor in program.tensors if tensor.lifetime is Lifetime.STATE)
    temporary_bytes = keep_all_footprint_bytes(step.workload, 0) - state_bytes
    step_s = sum(op.duration_s for op in program.ops)
    return (
        f"| `{name}` | {parameters:,} | {batch} | {len(program.ops)} | {len(program.tensors)} | "
        f"{step.report.flops / 1e12:.2f} | {saved_bytes / 2**30:.2f} | {temporary_bytes / 2**30:.2f} | "
        f"{step_s * 1e3:.1f} | {import_s:.1f} |"
    )


def main() -> None:
    rows = [HEADER]
    for name in MODEL_NAMES:
        rows.append(row(name))
        print(rows[-1], flush=True)
    Path(sys.argv[1]).write_text("\n".join(rows) + "\n")


if __name__ == "__main__":
    main()
