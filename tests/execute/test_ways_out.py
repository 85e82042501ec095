"""The table of networks in docs/run-a-plan.md: it is what was measured, and measuring again gives the same."""

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "experiments" / "ways_out"))
import run
from rows import JOINED, ONE_BY_ONE, WITH_ROOM, Row

ROOT = Path(__file__).parents[2]
HERE = ROOT / "experiments" / "ways_out"


def recorded(name: str, way: str) -> list[Row]:
    return [Row(**row) for row in json.loads((HERE / "results" / f"{name}.{way}.json").read_text())["rows"]]


def test_the_document_shows_what_was_measured():
    document = (ROOT / "docs" / "run-a-plan.md").read_text()
    shown = document.split(run.BEGIN)[1].split(run.END)[0]
    assert shown == run.table(HERE / "results") == (HERE / "results" / "table.md").read_text()
    shown = document.split(run.JOINED_BEGIN)[1].split(run.JOINED_END)[0]
    assert shown == run.joined_table(HERE / "results") == (HERE / "results" / "joined.md").read_text()


@pytest.mark.parametrize("name", run.NETWORKS)
def test_every_network_was_run_in_every_way(name):
    rows = recorded(name, "jax") + recorded(name, "torch")
    ways = {JOINED, ONE_BY_ONE, WITH_ROOM, "jitted policy", "torch hooks", "torch checkpoints"}
    assert ways <= {row.way for row in rows}
    for row in rows:
        if row.refused:
            continue
        assert row.same_bits is not False and row.difference < 1e-6
        assert row.within_plan and row.counted_bytes <= row.planned_bytes
        assert row.host_counted_bytes <= row.host_planned_bytes
        if row.way not in (JOINED, ONE_BY_ONE, WITH_ROOM, "torch hooks"):
            assert row.host_counted_bytes == row.host_planned_bytes
    joined, single = ([row for row in rows if row.way == way] for way in (JOINED, ONE_BY_ONE))
    assert all(a.plan == b.plan and a.programs < b.programs == b.ops for a, b in zip(joined, single, strict=True))
    offloaded = {row.way for row in rows if row.host_counted_bytes > 0}
    assert {"runtime", "torch hooks"} <= offloaded


@pytest.mark.long
@pytest.mark.parametrize("name", ["mlp", "resnet"])
def test_jax_networks_run_again(name):
    """Versions of the compiler differ in temporary bytes, and plans with them."""
    for ours, theirs in zip(run.measured(name, "jax"), recorded(name, "jax"), strict=True):
        assert (ours.way, ours.plan, ours.same_bits) == (theirs.way, theirs.plan, theirs.same_bits)
        assert ours.within_plan and ours.difference < 1e-5
        assert ours.planned_bytes == pytest.approx(theirs.planned_bytes, rel=0.05)
        assert ours.counted_bytes <= ours.planned_bytes  # how much less is a matter of who is faster
