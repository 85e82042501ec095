"""Runs the tests of `four_devices` in a process that has four CPU devices.

To run them alone: XLA_FLAGS=--xla_force_host_platform_device_count=4 python -m pytest tests/execute/four_devices
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
FLAG = "--xla_force_host_platform_device_count=4"


def run(selection: str) -> None:
    environment = os.environ | {
        "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {FLAG}".strip(),
    }
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-m", selection, str(HERE / "four_devices")]
    done = subprocess.run(command, env=environment, cwd=HERE.parents[1], capture_output=True, text=True)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert " passed" in done.stdout


def test_steps_on_four_devices():
    run("not long")


@pytest.mark.long
@pytest.mark.timeout(1800)  # four minutes on a core of its own, and nothing is printed meanwhile
def test_models_on_four_devices():
    run("long")
