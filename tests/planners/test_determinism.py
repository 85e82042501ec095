"""Same configuration, seed and versions: the same plan, byte for byte, in one process and in two."""

import json
import subprocess
import sys

import pytest
from planner_cases import light, transformer

from tmojax.planners.registry import PLANNERS
from tmojax.problem.io import PlanFile, plan_to_json, problem_hash
from tmojax.problem.strict_json import readable_text

SLOW = "gradient"  # compiles

CONFIG = """
seed = 7
micro_batches = 2
actions = ["offload", "recompute"]
[workload]
kind = "model"
model = "mlp"
batch = 64
sizes = { layers = 4, width = 256 }
[machine]
preset = "rtx4090x4-one-uplink"
[capacity]
footprint_factor = 1.3
[output]
jitter_samples = 5
"""
SETTINGS = {
    "local-search": "[planners.search]\nevaluations = 20",
    "cp-sat": "workers = 1\ndeterministic_limit = 0.02",
    "improve": "iterations = 3\nfree = 10\nsub_limit = 0.02",
    "gradient": "restarts = 2\nsteps = 40\nroundings = 4\n[planners.search]\nevaluations = 10",
}


@pytest.mark.parametrize("kind", [pytest.param(k, marks=[pytest.mark.long] if k == SLOW else []) for k in PLANNERS])
def test_same_seed_same_plan(kind):
    problem = transformer("prototype-4gpu-12.5", factor=1.4)
    digest = problem_hash(problem)
    texts = []
    for _ in range(2):
        result = light(kind).plan(problem, seed=9)
        if result.schedule is None:
            texts.append(result.message)
            continue
        assert not result.time_limited
        plan = PlanFile(result.schedule, digest, kind, "feasible", result.step_s, None, None, 9, {}, False)
        texts.append(readable_text(plan_to_json(plan)))
    assert texts[0] == texts[1]


@pytest.mark.long
def test_two_processes_write_the_same_plans(tmp_path):
    config = tmp_path / "small.toml"
    # However slow the machine is, no solve may end by its time limit: what it has found by then is another plan.
    others = {kind: "time_limit_s = 300" for kind in PLANNERS if hasattr(PLANNERS[kind](), "time_limit_s")}
    tables = [f'[[planners]]\nkind = "{kind}"\n{(others | SETTINGS).get(kind, "")}' for kind in PLANNERS]
    config.write_text(CONFIG + "\n".join(tables))
    written = []
    for name in ("first", "second"):
        command = (sys.executable, "-m", "tmojax.run", str(config), "--out", str(tmp_path / name))
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        (folder,) = (tmp_path / name).iterdir()
        assert done.stdout.splitlines()[-1] == str(folder)
        written.append({p.name: p.read_bytes() for p in [*folder.glob("plans/*.json"), folder / "problem.json"]})
    first, second = written
    assert first.keys() == second.keys() and {"gradient.json", "budget-milp.json"} <= first.keys()
    for name in first:
        assert name == "problem.json" or not json.loads(first[name])["time_limited"]
        assert first[name] == second[name], name
