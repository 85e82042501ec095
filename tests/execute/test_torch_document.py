"""The PyTorch example runs as it is printed, on two ranks, and prints what it shows; the table is what is measured."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="PyTorch is an optional extra: pip install 'tmojax[torch]'")

HERE = Path(__file__).parent
DOCUMENT = HERE.parents[1] / "docs" / "run-a-plan.md"
WAYS_OUT = HERE.parents[1] / "experiments" / "ways_out"


def between(text, mark):
    return text.split(f"<!-- {mark}: begin -->\n")[1].split(f"<!-- {mark}: end -->")[0]


def code(part):
    found = re.search(r"^```\w*\n(.*?)^```$", part, re.DOTALL | re.MULTILINE)
    assert found is not None
    return found.group(1)


def output(command, folder):
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *command], cwd=folder, capture_output=True, text=True, timeout=500, env=environment
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.long
def test_the_examples_run_and_print_what_is_shown(tmp_path):
    text = DOCUMENT.read_text()
    first = code(between(text, "torch step"))
    second = code(text.split("### Selective checkpoints")[1])
    end = "dist.destroy_process_group()\n"
    assert first.endswith(end)
    (tmp_path / "example.py").write_text(first.removesuffix(end) + second + end)
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "example.py"]
    assert output(command, tmp_path) == code(between(text, "output of the torch step"))


@pytest.mark.long
def test_the_table_is_what_is_measured():
    """In a process of its own: the number of threads is a setting of the whole process."""
    program = (
        "import json, run; print(json.dumps({n: [r.record() for r in run.measured(n, 'torch')] for n in run.NETWORKS}))"
    )
    measured = json.loads(output(["-c", program], WAYS_OUT).splitlines()[-1])
    for name, rows in measured.items():
        assert rows == json.loads((WAYS_OUT / "results" / f"{name}.torch.json").read_text())["rows"]
