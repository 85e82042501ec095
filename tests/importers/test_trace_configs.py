"""Profiles as workloads of a configuration."""

import pytest

from tmojax.build import build_problem
from tmojax.config import load_config
from tmojax.errors import InputError

RUN = """
micro_batches = 2
actions = ["offload"]
[workload]
{workload}
[machine]
preset = "{machine}"
[[planners]]
kind = "offload-all"
"""


def load(folder, workload, machine="dual-socket-1080ti-x4"):
    (folder / "run.toml").write_text(RUN.format(workload=workload, machine=machine), encoding="utf-8")
    return load_config(folder / "run.toml")


def test_profiles_become_problems(tmp_path):
    problem = build_problem(load(tmp_path, 'kind = "harmony"\nprofile = "bert_large_seq512"\nbatch = 2')).problem
    assert problem.workload.device_count == 4
    assert problem.workload.micro_batches == 2
    problem = build_problem(load(tmp_path, 'kind = "g10"\ntimes = "roofline"')).problem
    assert "GTX-1080-Ti" in problem.workload.duration_source


def test_mistakes_name_file_key_and_remedy(tmp_path):
    for workload, machine, message in (
        ('kind = "g10"\ntrace = "x.json"', "gh200", r"run\.toml: workload\.trace: there is no file .*x\.json"),
        ('kind = "harmony"\nprofile = "x.json"', "gh200", r"workload\.profile: there is no file .*x\.json"),
        ('kind = "g10"\nbatch = 3', "gh200", r"workload\.batch: unknown key; known: gpu, times, trace"),
        ('kind = "g10"\ntimes = "roofline"', "prototype-4gpu-12.5", r"workload\.gpu: is missing"),
        ('kind = "harmony"\nbatch = 0', "gh200", r"workload\.batch: 0 must be at least 1"),
    ):
        with pytest.raises(InputError, match=message):
            load(tmp_path, workload, machine)
    load(tmp_path, 'kind = "g10"', "prototype-4gpu-12.5")  # recorded times need no model of the GPU
