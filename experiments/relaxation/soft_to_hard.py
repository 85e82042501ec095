"""Draw one optimisation from soft to hard: docs/images/soft-to-hard.svg, and its figures on the standard output.

Four layers of a transformer on two GPUs that share a path, twice as large as their memory, two micro-batches. Of
four random starts, the one that ends best.
"""

import sys
from pathlib import Path

import tmojax.jax_setup  # noqa: F401  (before JAX)

# isort: split
import jax.numpy as jnp
import numpy as np
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from tmojax.bounds import bound
from tmojax.build import build_problem
from tmojax.config import load_config
from tmojax.cost import relax_problem, run_step
from tmojax.planners.sweep import sweep
from tmojax.planners.workbench import Workbench
from tmojax.relax.decode import DoesNotFit
from tmojax.relax.descent import Descent
from tmojax.relax.optimise import asked_at, optimise, read_point
from tmojax.relax.rounding import round_solution
from tmojax.report.figure_style import (
    BLUE,
    GREEN,
    GREY,
    GRID,
    INK,
    ORANGE,
    VERMILLION,
    figure_settings,
    svg_text,
    write_png,
    write_svg,
)

ROOT = Path(__file__).parents[2]
OVERRIDES = (
    'actions=["offload", "recompute"]', "capacity.footprint_factor=2", "micro_batches=2",
    "machine.preset=rtx4090x4-one-uplink", "machine.gpus.rtx4090.count=2", "workload.layers=4",
    "workload.compute_s=0.1",
)  # fmt: skip
STEPS, RESTARTS = 1500, 4
KEEP_COLOUR, LEAST_SHARE = "#d7dee6", 0.02  # of the largest tensor: smaller ones are not drawn


def main() -> None:
    problem = build_problem(load_config(ROOT / "configs/runs/coordination.toml", OVERRIDES)).problem
    bench = Workbench(problem)
    views = [bench.view(device) for device in range(bench.device_count)]
    model = relax_problem(problem, views)
    settings = Descent()

    def watch(variables):
        point = read_point(model, variables)
        step, limits = run_step(model, asked_at(model, point), point.timing, settings.bins)
        over_gb = jnp.maximum(limits.memory, 0.0).max(1) * model.capacity_gb
        undecided = 1 - jnp.square(point.choice).sum(-1)
        return point.choice, step.step_s, over_gb.max(), (model.size_gb * undecided).sum() / model.size_gb.sum()

    solution = optimise(model, restarts=RESTARTS, steps=STEPS, settings=settings, watch=watch)
    best = int(np.argmin(solution.step_s))
    choice, step_s, over_gb, undecided = (values[best] for values in solution.watched)
    plans = [sweep(bench, decisions) for decisions, _ in round_solution(model, solution, views)]
    exact_s = min(plan.step_s for plan in plans if not isinstance(plan, DoesNotFit))
    bound_s = bound(problem).bound_s
    with figure_settings():
        figure = _draw(views[0], choice[:, 0], step_s, over_gb * 1e3, 100 * undecided, exact_s, bound_s, settings)
    write_svg(ROOT / "docs/images/soft-to-hard.svg", svg_text(figure))
    if len(sys.argv) > 1:
        write_png(sys.argv[1], figure)
    print(f"relaxed {step_s[-1]:.4f} s, decoded and simulated {exact_s:.4f} s, bound {bound_s:.4f} s; "
          f"undecided at the end {100 * undecided[-1]:.1f} % of the bytes")  # fmt: skip


def _draw(view, choice, step_s, over_mb, undecided, exact_s, bound_s, settings: Descent) -> Figure:
    """choice [rounds, I, 3] of one GPU; the others per round."""
    shown = np.flatnonzero(view.needed & (view.size_bytes > LEAST_SHARE * view.size_bytes.max()))
    colours = np.array([to_rgb(KEEP_COLOUR), to_rgb(GREEN), to_rgb(ORANGE)])
    image = np.einsum("rik,kc->irc", choice[:, shown], colours)
    steps = settings.multiplier_steps * np.arange(1, len(step_s) + 1)
    figure = Figure(figsize=(7.2, 6.4))
    top, middle, bottom = figure.subplots(3, 1, sharex=True, height_ratios=(2.4, 1.5, 1.0))
    top.imshow(image, aspect="auto", interpolation="nearest", extent=(0, steps[-1], len(shown), 0))
    top.set_title("What becomes of each tensor of GPU 0")
    top.set_ylabel("tensors, in order\nof their ops")
    top.set_yticks([])
    names = ("keep", "offload", "recompute")
    patches = [
        Patch(color=colour, label=name) for colour, name in zip((KEEP_COLOUR, GREEN, ORANGE), names, strict=True)
    ]
    top.legend(
        handles=patches, loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=3, handlelength=1.0, columnspacing=1.2
    )
    middle.plot(steps, 1e3 * step_s, color=BLUE, label="relaxed")
    middle.axhline(1e3 * exact_s, color=VERMILLION, linewidth=1.0, label="decoded, simulated exactly")
    middle.axhline(1e3 * bound_s, color=INK, linewidth=1.0, linestyle=(0, (4, 3)), label="lower bound")
    middle.set_title("Step time")
    middle.set_ylabel("ms")
    middle.set_ylim(0.995e3 * bound_s, 1e3 * min(float(step_s.max()), 1.03 * bound_s))
    middle.legend(loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=3, handlelength=1.5)
    bottom.plot(steps, over_mb, color=VERMILLION)
    bottom.set_title("Memory over the capacity, and bytes not decided")
    bottom.set_ylabel("MB", color=VERMILLION)
    bottom.set_yscale("symlog", linthresh=1.0)
    bottom.set_ylim(0, 2.0 * float(over_mb.max()) + 1.0)
    other = bottom.twinx()
    other.plot(steps, undecided, color=GREY)
    other.set_ylabel("% not decided", color=GREY)
    other.set_ylim(0, 70)
    bottom.set_xlabel("step of the descent")
    marks = (
        (settings.homotopy_share, "until here links are wider"),
        (1 - settings.binary_share, "from here on fractions cost"),
    )
    for axes in (top, middle, bottom):
        for share, _ in marks:
            axes.axvline(share * steps[-1], color=INK if axes is top else GRID, linewidth=0.8, linestyle=(0, (2, 2)))
    for (share, words), side in zip(marks, ("right", "left"), strict=True):
        middle.annotate(words, (share * steps[-1], 0.95), xycoords=("data", "axes fraction"), va="top", ha=side,
                        xytext=(-5 if side == "right" else 5, 0), textcoords="offset points", color=GREY)  # fmt: skip
    return figure


if __name__ == "__main__":
    main()
