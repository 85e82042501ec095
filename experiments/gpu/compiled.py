"""The medium transformer's jitted step, compiled for an H100 that is not there: `python experiments/gpu/compiled.py`.

Needs `pip install "jax[cuda12]" flatbuffers`, and no GPU; three minutes. Prints the plan's bytes and what XLA makes of
it. Only shapes are needed, so nothing is allocated.
"""

from __future__ import annotations

import sys

import jax
from run import OPTIMIZER, SIZES, machine_of, planned

from tmojax import Action, Problem, import_train_step
from tmojax.check import check
from tmojax.execute import jitted_step, named_modules, planner_for
from tmojax.models import build_model
from tmojax.problem import keep_all_footprint_bytes


def main(share: float) -> None:
    model = build_model("gpt2", **SIZES["medium"])
    loss = named_modules(model.loss)
    params, batch = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), (model.params, model.batch))
    imported = import_train_step(loss, params, batch, OPTIMIZER, gpu="A100-SXM4-40GB", gpus=1, name="gpt2")
    machine, footprint = machine_of("prototype-4gpu-12.5"), keep_all_footprint_bytes(imported.workload, 0)

    def problem_of(share: float) -> Problem:
        problem = Problem("gpt2", imported.workload, machine, frozenset({Action.OFFLOAD, Action.RECOMPUTE}))
        return problem.with_device_capacity(int(footprint * share))

    problem, schedule, share, _ = planned(problem_of, [planner_for(loss, params, batch, imported)], share)
    step = jitted_step(loss, params, batch, OPTIMIZER, imported, problem, schedule, platform="gpu")
    peak = check(problem, schedule).peak_bytes[machine.memories[machine.devices[0].memory].name]
    print(f"share {share}: a GPU has {problem.capacity_bytes(0)} bytes, the plan takes {peak}")
    actions = list(step.plan.actions.values())
    print(", ".join(f"{action} {actions.count(action)}" for action in sorted(set(actions))), "names")
    print("\n".join(step.verification.lines()))


if __name__ == "__main__":
    main(float(sys.argv[1]) if len(sys.argv) > 1 else 0.25)
