"""The example of a jitted step runs as it is printed, and prints what it shows."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tmojax.execute.jitted_gpu import NOT_INSTALLED, missing

DOCUMENT = Path(__file__).parents[2] / "docs" / "run-a-plan.md"


def between(text, mark):
    part = text.split(f"<!-- {mark}: begin -->")[1].split(f"<!-- {mark}: end -->")[0]
    found = re.search(r"^```\w*\n(.*?)^```$", part, re.DOTALL | re.MULTILINE)
    assert found is not None
    return found.group(1)


@pytest.mark.long
def test_the_example_runs_and_prints_what_it_shows(tmp_path):
    text = DOCUMENT.read_text()
    (tmp_path / "example.py").write_text(between(text, "jitted step"))
    done = subprocess.run([sys.executable, "example.py"], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    printed, shown = done.stdout.splitlines(), between(text, "output of the jitted step").splitlines()
    # The last line depends on what is installed.
    assert shown[-1] == f"not compiled for a GPU: {NOT_INSTALLED}"
    same = len(shown) - 1
    assert printed[:same] == shown[:same]
    assert printed[same].startswith("compiled for h100") if not missing() else printed[same].endswith(missing())
