"""A GPU that is to start after work which the first does behind a collective of both never starts."""

from pathlib import Path

import pytest

from tmojax.build import build_problem
from tmojax.check import check
from tmojax.config import load_config
from tmojax.planners.base import Status
from tmojax.planners.fluid import Oblivious
from tmojax.planners.ratio import RatioSweep

CONFIG = Path(__file__).parents[2] / "configs" / "bench" / "g10-bert-128-4gpu-roofline-k1-f2.toml"


@pytest.fixture(scope="module")
def problem():
    """One micro-batch of BERT: gradients are synchronised layer by layer during backward."""
    return build_problem(load_config(CONFIG)).problem


def test_no_plan_is_told(problem):
    found = Oblivious(policy="fcfs", stagger_share=1.0).plan(problem)
    assert found.status is Status.NOT_FOUND and found.schedule is None and "collective" in found.message


def test_thresholds_are_still_compared(problem):
    """All of them deadlock with starts spread over a whole micro-batch, so they are compared without."""
    found, first = RatioSweep().plan(problem), RatioSweep(link_loads=(1000.0,)).plan(problem)
    assert check(problem, found.schedule).valid
    assert found.step_s < 0.5 * first.step_s
