"""Compare the importer's peak of temporaries with every compiled reference in `results/` and print a Markdown table."""

import json
from pathlib import Path

import optax

from tmojax.importers.jax_importer import import_train_step
from tmojax.models import build_model
from tmojax.problem import Lifetime, keep_all_footprint_bytes

GPUS = {"NVIDIA A100-SXM4-40GB": "A100-SXM4-40GB", "NVIDIA H100 80GB HBM3": "H100-SXM5-80GB"}


def main() -> None:
    print("| step | GPU | XLA temporaries (GiB) | importer (GiB) | difference |")
    print("|---|---|---|---|---|")
    for path in sorted((Path(__file__).parent / "results").glob("*.json")):
        reference = json.loads(path.read_text())
        model = build_model(reference["model"], **reference["options"])
        imported = import_train_step(
            model.loss, model.params, model.batch, optax.adamw(1e-4), gpu=GPUS[reference["target"]]
        )
        program = imported.workload.programs[0]
        state = sum(t.size_bytes for t in program.tensors if t.lifetime is Lifetime.STATE)
        peak = keep_all_footprint_bytes(imported.workload, 0) - state
        compiled = reference["temp_size_in_bytes"]
        options = " ".join(f"{key}={value}" for key, value in reference["options"].items())
        print(
            f"| {reference['model']} {options} | {reference['target']} | {compiled / 2**30:.2f} | {peak / 2**30:.2f} | "
            f"{(peak / compiled - 1) * 100:+.1f} % |"
        )


if __name__ == "__main__":
    main()
