"""Mistakes that people make, at the command line: exit code, a message with field, value and remedy, no traceback."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from planner_cases import transformer

from tmojax.problem.io import write_problem
from tmojax.run import main

PROTOTYPE = Path(__file__).parents[1] / "configs" / "runs" / "prototype.toml"


@pytest.fixture
def run(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)

    def call(*arguments: str) -> tuple[int, str, str]:
        code = main([*arguments])
        out, err = capfd.readouterr()
        assert "Traceback" not in err
        return code, out, err

    return call


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("sead=1", "sead: unknown key; did you mean 'seed'?"),
        ("planners.0.speed=1", "planners.0.speed: unknown key; known: lookahead_layers, name"),
        ('machine.uplinks.path.rate="12.5 Gb"', "machine.uplinks.path.rate: unknown unit 'Gb'"),
        ('capacity={bytes="0 GB"}', "capacity: bytes must be positive"),
        ("capacity.footprint_factor=0", "capacity.footprint_factor: "),
        ('workload={kind="file",path="missing.json"}', "workload.path: there is no file"),
    ],
)
def test_mistakes_in_a_configuration(run, override, message):
    code, out, err = run(str(PROTOTYPE), "-o", override)
    assert code == 2 and not out
    assert f"error: {PROTOTYPE}: {message}" in err
    assert not Path("runs").exists()


def test_missing_configuration(run):
    code, out, err = run("missing.toml")
    assert (code, out, err) == (2, "", "error: missing.toml: there is no such file\n")


def test_another_number_of_gpus_than_the_problem_file(run, tmp_path):
    write_problem(tmp_path / "problem.json", transformer("prototype-4gpu-12.5", factor=1.2))
    config = tmp_path / "run.toml"
    config.write_text('[workload]\nkind = "file"\npath = "problem.json"\n[machine]\npreset = "gh200"\n'
                      '[[planners]]\nkind = "keep-all"\n')  # fmt: skip
    code, _, err = run(str(config))
    assert code == 2
    assert "runs on 4 device(s) and machine 'gh200' has 1; set the same number in both" in err


def test_largest_op_that_does_not_fit_is_named_with_its_bytes(run):
    code, _, err = run(str(PROTOTYPE), "-o", "capacity.footprint_factor=50")
    assert code == 3
    assert "no schedule fits: op 'layer0.gelu' alone needs 209715200 bytes" in err and "give at least 209715200" in err


def test_nothing_feasible_is_told_apart_from_impossible(run):
    code, out, _ = run(str(PROTOTYPE), "-o", 'planners=[{kind="keep-all"}]')
    assert code == 4
    assert "Does not fit in" in out and "It fits in" in out


def test_exit_codes_reach_the_shell(tmp_path):
    done = subprocess.run(
        (sys.executable, "-m", "tmojax.run", "missing.toml"), cwd=tmp_path, capture_output=True, text=True, check=False,
        env={**os.environ, "PYTHONPATH": str(PROTOTYPE.parents[2])},
    )  # fmt: skip
    assert done.returncode == 2 and done.stderr.startswith("error: missing.toml")
