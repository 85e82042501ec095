"""Bounds and planners against the optima of the library: nothing is below an optimum, no bound is above one.

An optimum is that of the family in `tmojax.planners.exhaustive`. `pytest -m long tests/tiny_instances -s` prints how
often each planner attains it.
"""

import pytest
from recompute import read, search
from table import KINDS, ratio, table
from tiny_generator import tiny_instance

from tmojax.bounds import bound
from tmojax.check import check
from tmojax.planners.base import Status
from tmojax.problem.io import problem_hash
from tmojax.simulate import simulate

LIBRARY = read()
SAMPLE = LIBRARY[::12]


def label(item) -> str:
    return str(item["arguments"]["seed"])


def test_the_library_is_what_it_says():
    assert len(LIBRARY) >= 200
    assert len({item["problem_sha256"] for item in LIBRARY}) == len(LIBRARY)
    for name, least in (("gpus", 2), ("micro_batches", 2), ("path", 6), ("state", 2), ("collective", 2),
                        ("latency", 2), ("layers", 3)):  # fmt: skip
        assert len({item["arguments"][name] for item in LIBRARY}) >= least, name
    for item in SAMPLE:
        assert problem_hash(tiny_instance(**item["arguments"])) == item["problem_sha256"]


@pytest.mark.parametrize("item", LIBRARY, ids=label)
def test_no_bound_is_above_the_optimum(item):
    report = bound(tiny_instance(**item["arguments"]))
    assert report.bound_s <= item["optimum_s"] * (1 + 1e-9)
    assert report.repeated_s <= report.bound_s * (1 + 1e-9)


@pytest.mark.long
def test_how_near_the_bound_is_to_the_optimum(capsys):
    ratios = {"fractions": [], "whole tensors too": []}
    for item in LIBRARY:
        parts = bound(tiny_instance(**item["arguments"])).parts
        fractions = max(part.step_s for part in parts if part.name != "whole")
        ratios["fractions"].append(item["optimum_s"] / fractions)
        ratios["whole tensors too"].append(item["optimum_s"] / max(part.step_s for part in parts))
    with capsys.disabled():
        for name, values in ratios.items():
            values.sort()
            attained = sum(value <= 1 + 1e-5 for value in values)
            print(f"\n{name}: optimum / bound: median {values[len(values) // 2]:.3f}, mean "
                  f"{sum(values) / len(values):.3f}; {attained} of {len(values)} attained")  # fmt: skip
    assert sum(value <= 1 + 1e-5 for value in ratios["whole tensors too"]) >= 25


@pytest.mark.parametrize("item", LIBRARY[1::45], ids=label)
def test_the_search_finds_the_optimum_again(item):
    problem = tiny_instance(**item["arguments"])
    result = search().plan(problem)
    assert result.status is Status.OPTIMAL and result.schedule is not None
    assert result.step_s == pytest.approx(item["optimum_s"], rel=1e-9)
    assert check(problem, result.schedule).valid
    assert simulate(problem, result.schedule).step_s == pytest.approx(result.step_s, rel=1e-9)


COMPILED = "gradient"  # for every shape of problem, which takes seconds
QUICK = [kind for kind in KINDS if kind != COMPILED]


@pytest.mark.parametrize("kind", QUICK)
def test_no_planner_is_below_the_optimum(kind):
    assert all(ratio(kind, item) >= 1 - 1e-9 for item in LIBRARY[3::105])


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_every_planner_on_many(kind, capsys):
    lines = table(LIBRARY[:: 34 if kind == COMPILED else 3], [kind])
    with capsys.disabled():
        print("\n" + lines[-1])
