"""The benchmark suite of `configs/bench/`: every instance can be read, and spans what it is to span. The held-out
instances of `configs/held-out/`: none of them is one of the suite."""

from pathlib import Path

import pytest

from tmojax.build import build_problem
from tmojax.config import RunConfig, load_config
from tmojax.importers.g10 import G10Workload
from tmojax.importers.harmony import HarmonyWorkload
from tmojax.importers.model_zoo import ModelWorkload
from tmojax.problem import Action, largest_op_bytes

FOLDER = Path(__file__).parent.parent / "configs" / "bench"
NAMES = sorted(path.stem for path in FOLDER.glob("*.toml"))
HELD_OUT = sorted((FOLDER.parent / "held-out").glob("*.toml"))


@pytest.fixture(scope="module")
def suite() -> dict[str, RunConfig]:
    return {name: load_config(FOLDER / f"{name}.toml") for name in NAMES}


def machine_of(config):
    assert config.machine is not None
    return config.machine


def test_there_are_at_least_forty(suite):
    assert len(suite) >= 40


def test_every_axis_is_there(suite):
    factors = {config.capacity.footprint_factor for config in suite.values()}
    assert factors == {1.33, 1.5, 2.0, 3.0}
    assert {config.micro_batches for config in suite.values()} == {1, 4, 16}
    assert {len(machine_of(config).devices) for config in suite.values()} >= {1, 2, 4, 8}
    duplex = [any(link.name.endswith("both_ways") for link in machine_of(config).links) for config in suite.values()]
    assert any(duplex) and not all(duplex)
    joined = [any("nvlink" in link.name for link in machine_of(config).links) for config in suite.values()]
    assert any(joined) and not all(joined)
    types = [len({device.model for device in machine_of(config).devices}) for config in suite.values()]
    assert set(types) == {1, 2}
    assert any(config.pipeline for config in suite.values())
    assert any(Action.PEER in (config.actions or ()) for config in suite.values())


def test_profiles_with_their_own_and_with_roofline_times(suite):
    g10 = [config.workload for config in suite.values() if isinstance(config.workload, G10Workload)]
    assert {workload.times for workload in g10} == {"recorded", "roofline"}
    harmony = [config.workload for config in suite.values() if isinstance(config.workload, HarmonyWorkload)]
    assert {workload.profile for workload in harmony} == {"gpt2_xl", "bert_large_seq512"}


def test_models_of_the_zoo_exist(suite):
    from tmojax.models import MODEL_NAMES

    used = {config.workload.model for config in suite.values() if isinstance(config.workload, ModelWorkload)}
    assert used <= set(MODEL_NAMES)


def test_held_out_instances_are_not_of_the_suite(suite):
    """Another machine or another size of the workload, and no name twice; how much is kept need not be another one."""
    posed = [(config.workload, config.machine) for config in suite.values()]
    assert len(HELD_OUT) >= 10
    for path in HELD_OUT:
        config = load_config(path)
        assert path.stem not in NAMES
        assert (config.workload, config.machine) not in posed
        assert f"{len(machine_of(config).devices)}gpu" in path.stem.split("-")


def test_names_say_gpus_micro_batches_and_footprint(suite):
    for name, config in suite.items():
        words = name.split("-")
        assert f"{len(machine_of(config).devices)}gpu" in words
        assert f"k{config.micro_batches}" in words
        assert f"f{config.capacity.footprint_factor:g}" in words


@pytest.mark.long
@pytest.mark.parametrize("name", NAMES[::6])  # all of them take several minutes
def test_the_largest_op_fits(name):
    """Into footprint / factor, unless the instance asks for the least that fits; and no GPU has less than is used."""
    config = load_config(FOLDER / f"{name}.toml", ["capacity.largest_feasible=false"])
    problem = build_problem(config).problem
    capacity = load_config(FOLDER / f"{name}.toml").capacity
    assert capacity is not None
    for device, spec in enumerate(machine_of(config).devices):
        memory = machine_of(config).memories[spec.memory]
        physical = memory.capacity_bytes - memory.reserve_bytes
        needed = largest_op_bytes(problem.workload, device)[1]
        assert needed <= (physical if capacity.largest_feasible else problem.capacity_bytes(device))
        assert problem.capacity_bytes(device) <= physical
