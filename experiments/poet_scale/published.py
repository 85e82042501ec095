"""POET's integer programme as its authors published it, on HiGHS.

Patil et al., ICML 2022, section 4, and poet/poet_solver.py of the published code: full T x T matrices, big-M hazards,
binary FREE, energy as the objective, paging without time. Columns outside of the triangle are fixed at 0 by their
bounds, as the published code fixes them by rows.
"""

from __future__ import annotations

import numpy as np
from network import MEMORY_POWER_W, Network

from tmojax.bounds.highs import LinearModel


def published_model(network: Network, ram_bytes: int, runtime_factor: float) -> LinearModel:
    """Minimum energy, joules, in `ram_bytes` and at most `runtime_factor` times the compute time of one run."""
    size, edges = network.size, network.edges
    stage, node = np.indices((size, size))
    # Memory in units of the budget: coefficients near 1.
    ram = network.output_bytes / ram_bytes
    model = LinearModel()

    def binaries(allowed: np.ndarray, cost: np.ndarray | float = 0.0, least: np.ndarray | float = 0.0) -> np.ndarray:
        flat = np.broadcast_to(cost, allowed.shape).ravel()
        lower = np.broadcast_to(least, allowed.shape).ravel()
        return model.add_columns(allowed.size, lower, allowed.ravel(), flat, True).reshape(allowed.shape)

    run = binaries(node <= stage, network.node_joule, node == stage)
    resident = binaries(node < stage)
    stored = binaries(node < stage)
    page_in = binaries(node <= stage, MEMORY_POWER_W * network.in_s)
    page_out = binaries(node <= stage, MEMORY_POWER_W * network.out_s)
    free = binaries(np.ones((size, len(edges)), bool))
    used = model.add_columns(size * size, 0.0, 1.0).reshape(size, size)

    infinite = float("inf")
    successors = [[user for source, user in edges if source == i] for i in range(size)]
    for t in range(size):
        for source, user in edges:
            model.add_row(-infinite, 0.0, (run[t, user], 1.0), (run[t, source], -1.0), (resident[t, source], -1.0))
        for i in range(size):
            model.add_row(-infinite, 0.0, (page_in[t, i], 1.0), (stored[t, i], -1.0))
            model.add_row(-infinite, 0.0, (page_out[t, i], 1.0), (resident[t, i], -1.0))
            if t + 1 < size:
                model.add_row(-infinite, 0.0, (resident[t + 1, i], 1.0), (resident[t, i], -1.0), (run[t, i], -1.0),
                              (page_in[t, i], -1.0))  # fmt: skip
                model.add_row(-infinite, 0.0, (stored[t + 1, i], 1.0), (stored[t, i], -1.0), (page_out[t, i], -1.0))
        for edge, (i, k) in enumerate(edges):
            later = [run[t, j] for j in successors[i] if j > k]
            most = 1 + len(later) + (t + 1 < size)
            # Hazards: 1 - R[t, k] + S[t + 1, i] + sum of R[t, j] over later users.
            terms = [(run[t, k], -1.0), *((column, 1.0) for column in later)]
            if t + 1 < size:
                terms.append((resident[t + 1, i], 1.0))
            model.add_row(0.0, infinite, (free[t, edge], 1.0), *terms)
            model.add_row(-infinite, most - 1.0, (free[t, edge], float(most)), *terms)
        model.add_row(0.0, 0.0, (used[t, 0], 1.0), (run[t, 0], -ram[0]), (resident[t], -ram))
        for k in range(size - 1):
            freed = [(free[t, edge], ram[i]) for edge, (i, user) in enumerate(edges) if user == k]
            model.add_row(0.0, 0.0, (used[t, k + 1], 1.0), (used[t, k], -1.0), (run[t, k + 1], -ram[k + 1]), *freed)
    seconds = np.tile(network.node_s, size)
    scale = network.node_s.sum()
    model.add_row(-infinite, runtime_factor, (run.ravel(), seconds / scale))
    return model
