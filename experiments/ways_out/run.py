"""Five networks by plans, in every way out: `python experiments/ways_out/run.py [--networks ...] [--ways ...]`.

Writes results/NETWORK.jax.json and results/NETWORK.torch.json, one after the other, and from all that are there the
tables in results/table.md, results/joined.md and docs/run-a-plan.md. Without PyTorch its rows stay as they are.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
from pathlib import Path

from rows import HEAD, JOINED, JOINED_HEAD, ONE_BY_ONE, WITH_ROOM, Row

from tmojax.problem.strict_json import write_text

HERE = Path(__file__).parent
RESULTS = HERE / "results"
DOCUMENT = HERE.parents[1] / "docs" / "run-a-plan.md"
BEGIN, END = "<!-- table of networks: begin -->\n", "<!-- table of networks: end -->\n"
JOINED_BEGIN, JOINED_END = "<!-- table of joined ops: begin -->\n", "<!-- table of joined ops: end -->\n"
NETWORKS = ("mlp", "gpt2", "resnet", "vit", "scanned")
WAYS = ("jax", "torch")


def measured(name: str, way: str) -> list[Row]:
    """The rows of one network."""
    if way == "jax":
        from jax_rows import jax_rows

        return list(jax_rows(name))
    import torch
    from torch_rows import torch_rows

    torch.set_num_threads(1)
    return list(torch_rows(name))


def table(folder: Path) -> str:
    """The table of all results in a folder."""
    lines = [HEAD]
    for name in NETWORKS:
        for way in WAYS:
            path = folder / f"{name}.{way}.json"
            if path.exists():
                lines += [Row(**row).text() for row in json.loads(path.read_text())["rows"]]
    return "\n".join(lines) + "\n"


def joined_table(folder: Path) -> str:
    """What joining ops makes of the plans of the runtime."""
    lines = [JOINED_HEAD]
    for name in NETWORKS:
        rows = [Row(**row) for row in json.loads((folder / f"{name}.jax.json").read_text())["rows"]]
        single = {row.plan: row for row in rows if row.way == ONE_BY_ONE}
        lines += [row.joined_text(single[row.plan]) for row in rows if row.way in (JOINED, WITH_ROOM)]
    return "\n".join(lines) + "\n"


def shown(text: str, begin: str, end: str, content: str) -> str:
    """The text with `content` between two marks."""
    before, rest = text.split(begin)
    return before + begin + content + end + rest.split(end)[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--networks", nargs="+", default=list(NETWORKS), choices=NETWORKS)
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=WAYS)
    given = parser.parse_args()
    RESULTS.mkdir(exist_ok=True)
    for way in given.ways:
        if importlib.util.find_spec(way) is None:
            print(f"{way} is not installed: its rows stay as they are", flush=True)
            continue
        for name in given.networks:
            rows = measured(name, way)
            about = {"version": importlib.metadata.version(way), "rows": [row.record() for row in rows]}
            write_text(RESULTS / f"{name}.{way}.json", json.dumps(about, indent=1) + "\n")
            print("\n".join(row.text() for row in rows), flush=True)
    write_text(RESULTS / "table.md", table(RESULTS))
    write_text(RESULTS / "joined.md", joined_table(RESULTS))
    text = shown(DOCUMENT.read_text(), BEGIN, END, table(RESULTS))
    write_text(DOCUMENT, shown(text, JOINED_BEGIN, JOINED_END, joined_table(RESULTS)))


if __name__ == "__main__":
    main()
