"""The jitted steps of the networks, compiled for GPUs that are not there: `python experiments/ways_out/compiled.py`.

Needs `pip install "jax[cuda12]" flatbuffers`, and no GPU. For every network: the bytes on the host by the plan and by
the compiled program, its temporary memory and its peak on the device. Writes results/compiled.md.
"""

from __future__ import annotations

from pathlib import Path

import jax
import numpy as np
from jax_rows import by_policy, shapes_of
from networks import NETWORKS, network

from tmojax.execute.jitted_gpu import BASE_FLAGS, TARGETS, verify_on_gpu
from tmojax.problem.strict_json import write_text

HEAD = """\
| network | compiled for | memory | host planned | host compiled | temporary on the device | peak on the device |
|---|---|---|---|---|---|---|"""


def main() -> None:
    lines = [HEAD]
    for name in NETWORKS:
        net = network(name)
        shapes = shapes_of(net.batch(np.random.default_rng(0)))
        _, _, share, step = by_policy(net, shapes)
        for target in TARGETS:
            found = verify_on_gpu(step, net.params, shapes, target=target)
            lines.append(
                f"| {name} | {target} | {share:g} | {step.plan.host_bytes:,} | {found.host_temp_bytes:,} | "
                f"{found.temp_bytes:,} | {found.peak_bytes:,} |"
            )
            print(lines[-1], flush=True)
    lines.append(f"\njax {jax.__version__}, {' '.join(BASE_FLAGS)}")
    write_text(Path(__file__).parent / "results" / "compiled.md", "\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
