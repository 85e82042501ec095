"""The instance of POET's README: its size as published, and tmojax's programme on the same graph."""

import sys
from pathlib import Path

import numpy as np
import pytest

from tmojax.ilp.checkmate_rounding import plan_of_dropped, plan_peak_bytes
from tmojax.ilp.poet_model import poet_model, stage_periods_s
from tmojax.ilp.poet_start import paging_start

FOLDER = str(Path(__file__).parents[2] / "experiments" / "poet_scale")


@pytest.fixture
def network(monkeypatch):
    monkeypatch.syspath_prepend(FOLDER)
    yield __import__("network")
    for name in ("network", "published"):
        sys.modules.pop(name, None)


def test_the_published_size(network):
    """133 nodes, 270 edges, five full matrices of binaries, one of reals, FREE for every edge and stage."""
    from published import published_model  # pyright: ignore[reportMissingImports]

    graph = network.resnet18_cifar()
    assert (graph.size, len(graph.edges)) == (133, 270)
    assert graph.output_bytes[:67].sum() == 2_437_712  # of the forward pass
    model = published_model(graph, 3_000_000, 7.6)
    assert model.columns == 142_044 == 6 * 133**2 + 270 * 133
    assert model.column_arrays()[3].sum() == 5 * 133**2 + 270 * 133


def test_stages_of_the_same_graph(network):
    """Half the columns; keeping everything takes less than the README allows, and a plan without a search fits in
    half of that."""
    published = network.resnet18_cifar()
    graph = network.graph_of(published)
    everything = plan_of_dropped(graph, np.zeros(published.size, bool))
    assert plan_peak_bytes(graph, everything) < 3_000_000
    model, _ = poet_model(graph, 1_500_000, network.paging_of(published))
    assert model.columns < 142_044 / 2
    plan = paging_start(graph, 1_500_000, published.node_s, published.in_s + published.out_s)
    assert plan is not None and plan_peak_bytes(graph, plan) <= 1_500_000
    assert stage_periods_s(graph, plan, network.paging_of(published)).sum() < 1.01 * graph.node_s.sum()
