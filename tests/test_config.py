import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tmojax.build import build_problem
from tmojax.config import FileWorkload, RunConfig, apply_override, load_config, parse_config
from tmojax.errors import InputError
from tmojax.importers.model_zoo import ModelWorkload
from tmojax.importers.synthetic import SyntheticTransformer
from tmojax.planners.registry import PLANNERS
from tmojax.problem import Action, largest_op_bytes
from tmojax.problem.io import write_problem

ROOT = Path(__file__).parents[1]
SHARED = {"preset": "prototype-4gpu-12.5"}
RUNS = sorted((ROOT / "configs" / "runs").glob("*.toml"))
SMALL = {
    "micro_batches": 2,
    "actions": ["offload"],
    "workload": {"kind": "synthetic", "layers": 2, "tokens": 16, "sequence": 16, "width": 64},
    "machine": {"preset": "prototype-4gpu-12.5", "gpus": {"gpu": {"count": 2}}},
    "planners": [{"kind": "keep-all"}],
}
L4 = {"kind": "model", "model": "x", "gpu": "L4"}


def parse(document: dict, folder: Path = ROOT) -> RunConfig:
    return parse_config(document, folder, "small")


def mistakes(document: dict, folder: Path = ROOT) -> list[str]:
    with pytest.raises(InputError) as caught:
        parse(document, folder)
    return str(caught.value).splitlines()


@pytest.mark.parametrize("path", RUNS, ids=lambda path: path.stem)
def test_shipped_configurations_are_valid(path):
    config = load_config(path)
    assert config.name == path.stem
    assert config.machine is not None and len(config.machine.devices) == 4
    again = parse_config(json.loads(json.dumps(config.document)), path.parent, "other")
    assert (again.machine, again.workload, again.planners, again.name) == (
        config.machine, config.workload, config.planners, config.name,
    )  # fmt: skip


def test_the_resolved_document_stands_for_itself():
    document = {
        **SMALL,
        "name": "n",
        "seed": 3,
        "time_budget": "90 s",
        "capacity": {"bytes": "1.5 GiB"},
        "output": {"jitter": 0.1},
        "planners": [{"kind": "local-search", "search": {"evaluations": 7}}],
    }
    config = parse(document)
    again = parse(json.loads(json.dumps(config.document)))
    assert {k: v for k, v in vars(again).items() if k != "folder"} == {
        k: v for k, v in vars(config).items() if k != "folder"
    }
    assert again.document["capacity"] == {"bytes": "1.5 GiB"}
    assert again.document["output"] == {"jitter": 0.1, "jitter_samples": 100}
    assert again.document["planners"][0]["search"]["start_threshold"] > 0


def test_quickstart_says_what_it_is():
    config = load_config(ROOT / "configs" / "runs" / "quickstart.toml")
    assert config.workload == ModelWorkload("gpt2")
    assert config.micro_batches == 8
    assert config.actions == {Action.OFFLOAD, Action.RECOMPUTE}
    assert config.capacity is not None and config.capacity.footprint_factor == 3.0
    assert {planner.name for planner in config.planners} >= {"keep-all", "offload-all", "recompute-all", "gradient"}


def test_prototype_has_the_figures_of_its_formula():
    built = build_problem(load_config(ROOT / "configs" / "runs" / "prototype.toml"))
    unit_bytes = 8 * 1024 * 1600 * 2
    assert built.footprint_bytes == (193 * unit_bytes,) * 4
    assert built.problem.capacity_bytes(0) == int(193 * unit_bytes / 1.33)
    overflow_bytes = built.footprint_bytes[0] - built.problem.capacity_bytes(0)
    assert 4 * overflow_bytes / 12.5e9 + 0.350 * 2 / 3 == pytest.approx(0.635, abs=0.001)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"sead": 1}, "sead: unknown key; did you mean 'seed'? known: actions, capacity"),
        ({"seed": -1}, "seed: input should be greater than or equal to 0, got -1"),
        ({"seed": True}, "seed: input should be a valid integer, got True"),
        ({"micro_batches": 0}, "micro_batches: input should be greater than or equal to 1, got 0"),
        ({"time_budget": 60}, "time_budget: 60 is not a quantity with a unit; write for example '5 us'"),
        ({"time_budget": "2 h"}, "time_budget: unknown unit 'h'"),
        ({"coordinate": "no"}, "coordinate: input should be a valid boolean, got 'no'"),
        ({"output": {"jitter": 1.0}}, "output.jitter: input should be less than 1"),
        ({"output": {"jiter": 0.1}}, "output.jiter: unknown key; did you mean 'jitter'?"),
        ({"capacity": {}}, "capacity: give exactly one of bytes and footprint_factor"),
        ({"capacity": {"bytes": "1 GB", "footprint_factor": 2.0}}, "capacity: give exactly one of"),
        ({"capacity": {"bytes": "0 GB"}}, "capacity: bytes must be positive"),
        ({"capacity": {"bytes": "24 Gb"}}, "capacity.bytes: unknown unit 'Gb'"),
        ({"capacity": {"bytes": 5}}, "capacity.bytes: 5 is not a quantity with a unit"),
        ({"capacity": {"bytes": "9 GB"}}, "capacity.bytes: 9000000000 is more than gpu0 has (8000000000"),
        ({"capacity": {"footprint_factor": 0.0}}, "capacity.footprint_factor: input should be greater"),
        ({"capacity": {"footprint_factor": 1e-300}}, "capacity.footprint_factor: input should be greater"),
        ({"capacity": {"bytes": "1e300 GB"}}, "capacity.bytes: '1e300 GB' is not a quantity with a unit"),
        ({"capacity": {"bytes": "1e20 GB"}}, "capacity.bytes: '1e20 GB' is more than the 1000000000000000000 bytes"),
        ({"time_budget": "1e9 s"}, "time_budget: '1e9 s' is more than the 1000000 seconds"),
        ({"machine": {**SHARED, "uplinks": {"path": {"rate": "0.1 B/s"}}}}, "machine.uplinks.path.rate: '0.1 B/s' is"),
        ({"machine": {**SHARED, "uplinks": {"path": {"rate": "1e99 B/s"}}}}, "machine.uplinks.path.rate: '1e99 B/s'"),
        ({"workload": {"kind": "synthetic", "layers": 10**9}}, "workload.layers: 1000000000 must be between"),
        ({"capacity": {"bytes": "1 GB", "largest_feasible": True}}, "capacity: largest_feasible needs"),
        ({"actions": ["offlaod"]}, "actions: 'offlaod' is not one of offload, peer"),
        ({"name": "a/b"}, "name: 'a/b' becomes a file name"),
        ({"planners": [{"kind": "keep-all", "name": "../x"}]}, "name: '../x' becomes a file name"),
        ({"planners": [{"kind": "keep-all", "name": ""}]}, "name: '' becomes a file name"),
        ({"planners": []}, "planners: list should have at least 1 item"),
        ({"planners": [{}]}, "planners.0.kind: is missing; choose one of keep-all"),
        ({"planners": [{"kind": "magic"}]}, "planners.0.kind: 'magic'; choose one of keep-all"),
        ({"planners": [{"kind": "keep-all", "speed": 1}]}, "planners.0.speed: unknown key; known: name"),
        ({"planners": [{"kind": "offload-all", "lookahead_layers": True}]}, "planners.0.lookahead_layers: expected"),
        ({"planners": [{"kind": "ratio-sweep", "link_loads": []}]}, "planners.0.link_loads: [] must be at least one"),
        ({"planners": [{"kind": "ratio-sweep", "finalists": 0}]}, "planners.0.finalists: 0 must be at least 1"),
        ({"planners": [{"kind": "gradient", "steps": 0}]}, "planners.0.steps: 0 must be at least 20"),
        ({"planners": [{"kind": "oblivious", "threads": 10**6}]}, "planners.0.threads: 1000000 must be between 1 and"),
        ({"planners": [{"kind": "budget-milp", "time_limit_s": 0.0}]}, "planners.0.time_limit_s: 0.0 must be positive"),
        ({"planners": [{"kind": "local-search", "search": {"evaluations": 0}}]}, "planners.0.search.evaluations: 0"),
        ({"planners": [{"kind": "keep-all"}, {"kind": "keep-all"}]}, "planners: two are called 'keep-all'"),
        ({"workload": {}}, "workload.kind: is missing; choose one of model, synthetic, file"),
        ({"workload": {"kind": ["model"]}}, "workload.kind: a list of 1; choose one of"),
        ({"workload": {"kind": "model"}}, "workload.model: is missing"),
        ({"workload": {"kind": "model", "model": "gpt2"}}, "workload.gpu: is missing; the machine names no model"),
        ({"workload": {"kind": "model", "model": "gpt2", "gpu": "abacus"}}, "workload.gpu: 'abacus' is unknown"),
        ({"workload": {**L4, "bucket": "9"}}, "workload.bucket: '9' is not a quantity"),
        ({"workload": {**L4, "optimizer": "muon"}}, "workload.optimizer: 'muon' is"),
        ({"workload": {**L4, "sizes": {"a": 1.5}}}, "workload.sizes['a']: expected an"),
        ({"workload": {"kind": "synthetic", "layers": 0}}, "workload.layers: 0 must be between 1"),
        ({"workload": {"kind": "synthetic", "layer": 3}}, "workload.layer: unknown key; known: bytes_per_element"),
        ({"workload": {"kind": "file", "path": "nowhere.json"}}, "workload.path: there is no file"),
        ({"machine": {"preset": "nothing"}}, "machine.preset: there is no preset 'nothing'; presets: a100x8-pairs"),
        ({"machine": None}, "machine: is missing; only a workload of kind 'file' brings its own"),
        ({"actions": None}, "actions: is missing; only a workload of kind 'file'"),
        ({"micro_batches": None}, "micro_batches: is missing; only a workload of kind 'file'"),
        ({"micro_batch_orders": [{"group": 1}]}, "micro_batch_orders.0.group: 1 must be at least 2, or 0 for all"),
        ({"micro_batch_orders": [{}, {"layers": 0}]}, "micro_batch_orders.1.layers: 0 must be at least 1"),
        ({"micro_batch_orders": [{"groups": 2}]}, "micro_batch_orders.0.groups: unknown key; known: group, layers"),
        ({"micro_batch_orders": ["all"]}, "micro_batch_orders.0: "),
        ({"micro_batch_orders": [{}], "pipeline": {}}, "micro_batch_orders: stages follow pipeline.order"),
    ],
)  # fmt: skip
def test_mistakes_are_named(change, expected):
    lines = mistakes({**SMALL, **change})
    assert any(line.startswith(expected) for line in lines), lines


@pytest.mark.parametrize(
    ("orders", "micro_batches", "expected"),
    [
        ([{"group": 3}], 4, r"micro_batch_orders\.0\.group: 3 does not divide 4 micro-batches; use \[2, 4\]"),
        ([{}], 1, r"micro_batch_orders\.0: a step of one micro-batch has one order"),
        ([{}, {"layers": 4}], 2, r"micro_batch_orders\.1\.layers: 4 in a block, of 3 in program"),
        ([{}, {}], 2, r"micro_batch_orders\.1: order 'breadth-first' is offered twice"),
    ],
)
def test_orders_that_the_workload_cannot_offer(orders, micro_batches, expected):
    config = parse({**SMALL, "micro_batches": micro_batches, "micro_batch_orders": orders})
    with pytest.raises(InputError, match=expected):
        build_problem(config)


def test_orders_are_offered():
    config = parse({**SMALL, "micro_batches": 4, "micro_batch_orders": [{}, {"group": 2, "layers": 2}]})
    assert parse(config.document).micro_batch_orders == config.micro_batch_orders
    offered = build_problem(config).problem.workload.programs[0].orders
    assert list(offered) == ["breadth-first", "breadth-first-2-layers-2"]


def test_all_mistakes_are_reported_at_once(tmp_path):
    document = {
        **SMALL,
        "workload": {"kind": "synthetic", "layers": "many", "width": True},
        "machine": {"preset": "gh200", "gpus": {"gh200": {"count": 0}}, "peers": 1},
        "planners": [{"kind": "keep-all", "a": 1, "b": 2}, {"kind": "none"}],
        "actions": ["fly"],
    }
    assert len(mistakes(document)) == 8
    path = tmp_path / "bad.toml"
    path.write_text("seed = 'x'\nmicro_batches = 'y'")
    with pytest.raises(InputError) as caught:
        load_config(path)
    lines = str(caught.value).splitlines()
    assert lines[0] == f"{path}:"
    assert {line.split(":")[0] for line in lines[1:]} == {"seed", "micro_batches", "workload", "planners"}


def test_steps_that_no_problem_file_could_hold_are_errors_before_planning():
    config = parse({**SMALL, "micro_batches": 100_000, "workload": {"kind": "synthetic", "layers": 100}})
    with pytest.raises(InputError, match=r"tensor accesses .* lower micro_batches"):
        build_problem(config)


@pytest.mark.parametrize("kind", sorted(PLANNERS))
def test_every_planner_can_be_configured(kind):
    config = parse({**SMALL, "planners": [{"kind": kind}, {"kind": kind, "name": "again"}]})
    assert [type(planner) for planner in config.planners] == [PLANNERS[kind]] * 2
    assert [planner.name for planner in config.planners] == [PLANNERS[kind]().name, "again"]


def test_coordination_can_be_switched_off_where_somebody_coordinates():
    document = {**SMALL, "planners": [{"kind": "ratio-sweep"}, {"kind": "keep-all"}]}
    assert parse(document).coordinate
    config = parse({**document, "coordinate": False})
    assert not config.coordinate and config.document["coordinate"] is False
    simple = {**SMALL, "planners": [{"kind": "keep-all"}, {"kind": "oblivious"}]}
    assert mistakes({**simple, "coordinate": False})[0].startswith("coordinate: none of the planners coordinates")
    ordered = {**SMALL, "planners": [{"kind": "oblivious", "policy": "fcfs"}]}
    assert not parse({**ordered, "coordinate": False}).coordinate
    named = {**SMALL, "planners": [{"kind": "ratio-sweep", "name": "a+coordinated"}]}
    assert mistakes({**named, "coordinate": False})[0].startswith("name: 'a+coordinated' ends in '+coordinated'")
    assert parse(named).planners[0].name == "a+coordinated"


def test_nested_planner_settings():
    document = {**SMALL, "planners": [{"kind": "local-search", "search": {"evaluations": 7}}]}
    (planner,) = parse(document).planners
    assert planner.search.evaluations == 7
    document["planners"][0]["search"]["evaluation"] = 7
    assert mistakes(document)[0].startswith("planners.0.search: unknown key 'evaluation'; known: evaluations")


@pytest.mark.parametrize(
    ("override", "path", "value"),
    [
        ("seed=7", ["seed"], 7),
        ("coordinate=false", ["coordinate"], False),
        ("capacity.bytes=24 GiB", ["capacity", "bytes"], "24 GiB"),
        ('capacity.bytes="24 GiB"', ["capacity", "bytes"], "24 GiB"),
        ("machine.gpus.gpu.count=3", ["machine", "gpus", "gpu", "count"], 3),
        ("machine.uplinks.path.duplex=half", ["machine", "uplinks", "path", "duplex"], "half"),
        ("planners.0.name=a=b", ["planners", 0, "name"], "a=b"),
        ('actions=["peer"]', ["actions"], ["peer"]),
        ("name=x\nseed = 3", ["name"], "x\nseed = 3"),
    ],
)
def test_overrides(override, path, value):
    before = json.dumps(SMALL)
    target = apply_override(SMALL, override)
    for part in path:
        target = target[part]
    assert target == value
    assert json.dumps(SMALL) == before


@pytest.mark.parametrize("override", ["seed", "=3", "a..b=1", "planners.1.kind=x", "planners.x=1", "seed.x=1", ".=1"])
def test_malformed_overrides(override):
    with pytest.raises(InputError, match="-o "):
        apply_override({**SMALL, "seed": 0}, override)


@given(st.text(max_size=30))
def test_any_override_text_is_applied_or_refused(text):
    try:
        parse(apply_override(SMALL, text))
    except InputError as error:
        assert str(error)


def test_overrides_reach_the_problem(tmp_path):
    path = ROOT / "configs" / "runs" / "prototype.toml"
    config = load_config(
        path, ["machine.gpus.gpu.count=2", "micro_batches=3", "workload.layers=1", "capacity.footprint_factor=2"]
    )
    problem = build_problem(config).problem
    assert problem.workload.device_count == len(problem.machine.devices) == 2
    assert problem.workload.micro_batches == 3
    assert problem.machine.name == "prototype-4gpu-12.5, changed"
    assert config.document["machine"]["gpus"]["gpu"]["count"] == 2
    with pytest.raises(InputError, match=r"prototype.toml: seed: input should be a valid integer, got 'x'"):
        load_config(path, ["seed=x"])


def test_capacity_choices():
    assert build_problem(parse(SMALL)).problem.capacity_bytes(0) == 8 * 10**9
    problem = build_problem(parse({**SMALL, "capacity": {"bytes": "1 MB"}})).problem
    assert problem.capacity_bytes(1) == 10**6
    asked = {**SMALL, "capacity": {"footprint_factor": 50.0}}
    built = build_problem(parse(asked))
    assert built.problem.capacity_bytes(0) == built.footprint_bytes[0] // 50
    asked["capacity"]["largest_feasible"] = True
    built = build_problem(parse(asked))
    # By hand, with n = 16 * 64 * 2 bytes: gelu reads 4 n and writes 4 n, and the residual, n, waits to be added later.
    assert largest_op_bytes(built.problem.workload, 0)[1] == 16 * 1024
    assert built.problem.capacity_bytes(0) == 18 * 1024
    assert "layer0.gelu" in built.notes[-1] and "no simple strategy fits into less than 18.4 kB" in built.notes[-1]
    assert PLANNERS["local-search"]().plan(built.problem).status.has_plan
    less = built.problem.with_device_capacity(18 * 1024 - 1)
    assert not PLANNERS["local-search"]().plan(less).status.has_plan
    built = build_problem(parse({**SMALL, "capacity": {"footprint_factor": 0.001}, "workload": {"kind": "synthetic"}}))
    assert "more than the 8 GB that a GPU of this machine has" in built.notes[-1]


def test_reserve_is_not_part_of_the_capacity():
    machine = {**SMALL["machine"], "gpus": {"gpu": {"count": 2, "reserve": "1 GB"}}}
    assert build_problem(parse({**SMALL, "machine": machine})).problem.capacity_bytes(0) == 7 * 10**9
    problem = build_problem(parse({**SMALL, "machine": machine, "capacity": {"bytes": "2 GB"}})).problem
    assert (problem.capacity_bytes(0), problem.machine.memories[0].reserve_bytes) == (2 * 10**9, 10**9)


def test_problem_files(tmp_path):
    problem = build_problem(parse(SMALL)).problem
    write_problem(tmp_path / "p.json", problem)
    document = {"workload": {"kind": "file", "path": "p.json"}, "planners": [{"kind": "keep-all"}]}
    config = parse(document, tmp_path)
    assert config.workload == FileWorkload("p.json")
    assert build_problem(config).problem == problem
    other = {**document, "machine": {"preset": "gh200"}}
    with pytest.raises(InputError, match=r"runs on 2 device\(s\) and machine 'gh200' has 1"):
        build_problem(parse(other, tmp_path))
    with pytest.raises(InputError, match=r"micro_batches: 5, but p\.json has 2; leave it out"):
        build_problem(parse({**document, "micro_batches": 5}, tmp_path))
    changed = build_problem(
        parse({**document, "actions": ["recompute"], "machine": SMALL["machine"]}, tmp_path)
    ).problem
    assert changed.actions == {Action.RECOMPUTE}


def test_synthetic_parameters_reach_the_workload():
    assert parse(SMALL).workload == SyntheticTransformer(layers=2, tokens=16, sequence=16, width=64)


MODEL = {
    **SMALL,
    "workload": {"kind": "model", "model": "mlp", "batch": 4, "sizes": {"layers": 2, "width": 32}},
    "machine": {"preset": "rtx4090x4-one-uplink"},
}


def test_models_are_traced_for_every_gpu_model():
    workload = build_problem(parse(MODEL)).problem.workload
    assert workload.device_program == (0, 0, 0, 0)
    assert workload.micro_batches == 2
    group = {"count": 1, "model": "L4", "under": "switch", "rate": "25 GB/s"}
    mixed = {**MODEL, "machine": {**MODEL["machine"], "gpus": {"rtx4090": {"count": 2}, "l4": group}}}
    workload = build_problem(parse(mixed)).problem.workload
    assert workload.device_program == (0, 0, 1)
    fast, slow = (sum(op.duration_s for op in program.ops) for program in workload.programs)
    assert fast < slow
    assert "RTX-4090" in workload.duration_source and "L4" in workload.duration_source
    assert workload.collectives[0].devices == (0, 1, 2)


@pytest.mark.parametrize(
    ("workload", "message"),
    [
        ({"model": "gpt9"}, "workload: model: 'gpt9' is unknown"),
        ({"sizes": {"depth": 2}}, "workload: model.depth: unknown option"),
        ({"sizes": {"batch": 2}}, "workload.sizes.batch: is not a size; set workload.batch"),
        ({"dtype": "int4"}, "workload: model.dtype: 'int4' is unknown"),
        ({"gpu": "V100-SXM2-16GB"}, "workload: gpu: V100-SXM2-16GB has no bfloat16"),
        ({"coarsen": "finely"}, "workload: coarsen: 'finely' is unknown"),
    ],
)
def test_mistakes_that_only_the_importer_sees(workload, message):
    with pytest.raises(InputError, match=message):
        build_problem(parse({**MODEL, "workload": {**MODEL["workload"], **workload}}))


def test_a_configuration_is_checked_without_jax():
    code = (
        "import sys; from tmojax.config import load_config; load_config('configs/runs/quickstart.toml'); "
        "sys.exit('jax' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0
