"""The tutorial runs as it is printed, on four CPU devices, and prints what it shows."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

DOCUMENT = Path(__file__).parents[2] / "docs" / "run-a-plan.md"
NUMBER = re.compile(r"\d+(?:\.\d+)?")
TIMES = re.compile(r"^(?:[a-z ]+)? +(?:predicted ms|[\d.]+) +(?:measured ms|[\d.]+) +(?:error|-|[+-][\d.]+%|\d+ x)$")


@pytest.mark.long
def test_the_tutorial_runs_and_prints_what_it_shows(tmp_path):
    text = DOCUMENT.read_text()
    program = "\n".join(re.findall(r"^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE))
    (tmp_path / "tutorial.py").write_text(program)
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    done = subprocess.run(
        [sys.executable, "tutorial.py"], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    printed = [line for line in lines if not TIMES.match(line)]
    assert len(lines) - len(printed) >= 8  # the table of times
    shown = text.split("<!-- output of the tutorial: begin -->\n")[1].split("<!-- output of the tutorial: end -->")[0]
    expected = shown.strip().splitlines()[1:-1]
    assert [NUMBER.sub("#", line) for line in printed] == [NUMBER.sub("#", line) for line in expected]
    ours, theirs = ([float(n) for n in NUMBER.findall("\n".join(part))] for part in (printed, expected))
    assert ours == pytest.approx(theirs, rel=0.05)  # temporaries differ a little between versions of the compiler
    assert (tmp_path / "measured.json").exists()
