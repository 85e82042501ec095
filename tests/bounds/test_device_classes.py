"""Devices that are alike share one set of columns, also where each has links of its own."""

from dataclasses import replace

import pytest

from tmojax.bounds import bound, device_classes
from tmojax.importers.machine_build import load_machine
from tmojax.importers.synthetic import SyntheticTransformer, synthetic_transformer
from tmojax.problem import Action, Problem, keep_all_footprint_bytes


def on_preset(name: str, micro_batches: int = 2) -> Problem:
    machine = load_machine(name)
    gpus = sum(device.kind == "gpu" for device in machine.devices)
    workload = synthetic_transformer(SyntheticTransformer(layers=3, parameters=10**8), gpus, micro_batches)
    problem = Problem(name, workload, machine, frozenset({Action.OFFLOAD}))
    return problem.with_device_capacity(int(keep_all_footprint_bytes(workload, 0) / 1.5))


@pytest.mark.parametrize(
    "name, classes",
    [("a100x8-pairs", 1), ("v100x8-shared-sockets", 1), ("rtxpro6000x8-two-roots", 1), ("rtx3090x4-one-on-x1", 2),
     ("two-types-x4", 1)],
)  # fmt: skip
def test_links_that_are_alike_say_the_same(name, classes, monkeypatch):
    problem = on_preset(name)
    merged = bound(problem)
    assert merged.details["device_classes"] == classes
    facts = device_classes._link_facts
    monkeypatch.setattr(
        device_classes, "_link_facts", lambda *given: {link: (link, *fact) for link, fact in facts(*given).items()}
    )
    apart = bound(problem)
    assert apart.details["device_classes"] >= classes
    assert merged.bound_s == pytest.approx(apart.bound_s, rel=2e-3)


def test_one_other_load_keeps_devices_apart():
    problem = on_preset("v100x8-shared-sockets")
    links = tuple(replace(link, bandwidth_bytes_per_s=0.5 * link.bandwidth_bytes_per_s)
                  if link.name.startswith("socket1") else link for link in problem.machine.links)  # fmt: skip
    uneven = replace(problem, machine=replace(problem.machine, links=links))
    found = device_classes.device_classes(uneven)
    assert [one.devices for one in found] == [(0, 1, 2, 3), (4, 5, 6, 7)]
