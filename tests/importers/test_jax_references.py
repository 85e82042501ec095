"""The importer's peak of temporaries against what XLA plans for the same steps."""

import json
from pathlib import Path

import pytest
from imported_steps import gpt2, imported, temporaries_bytes

REFERENCES = Path(__file__).parents[2] / "experiments" / "importer_reference" / "results"

# Temporary memory that XLA plans for the same steps, in bytes: jax and plugin 0.10.2, no autotuning, compiled for a
# GPU that was not there (experiments/importer_reference).
XLA_TEMPORARY_BYTES = {"gpt2": 11_492_624_920, "gpt2-xl": 73_609_971_736}
# The same quantity for another implementation of these models with the same settings, in GiB.
OTHER_TEMPORARY_GIB = {"gpt2": 10.7, "gpt2-xl": 66.2}


def test_peak_of_temporaries_is_that_of_the_compiled_step():
    assert temporaries_bytes(gpt2()) == pytest.approx(XLA_TEMPORARY_BYTES["gpt2"], rel=0.02)
    assert temporaries_bytes(gpt2()) == pytest.approx(OTHER_TEMPORARY_GIB["gpt2"] * 2**30, rel=0.12)


@pytest.mark.long
def test_peak_of_temporaries_is_that_of_the_compiled_step_at_xl():
    peak = temporaries_bytes(imported("gpt2-xl", "H100-SXM5-80GB"))
    assert peak == pytest.approx(XLA_TEMPORARY_BYTES["gpt2-xl"], rel=0.02)
    assert peak == pytest.approx(OTHER_TEMPORARY_GIB["gpt2-xl"] * 2**30, rel=0.12)


@pytest.mark.long
@pytest.mark.parametrize("path", sorted(REFERENCES.glob("*.json")), ids=lambda path: path.stem)
def test_peak_of_temporaries_on_steps_that_the_rules_were_not_made_for(path):
    reference = json.loads(path.read_text())
    gpu = {"NVIDIA A100-SXM4-40GB": "A100-SXM4-40GB", "NVIDIA H100 80GB HBM3": "H100-SXM5-80GB"}[reference["target"]]
    step = imported(reference["model"], gpu, **reference["options"])
    assert temporaries_bytes(step) == pytest.approx(reference["temp_size_in_bytes"], rel=0.12)


def test_references_are_the_recorded_ones():
    recorded = json.loads((REFERENCES / "gpt2-a100.json").read_text())
    assert recorded["temp_size_in_bytes"] == XLA_TEMPORARY_BYTES["gpt2"]
    recorded = json.loads((REFERENCES / "gpt2-xl-h100.json").read_text())
    assert recorded["temp_size_in_bytes"] == XLA_TEMPORARY_BYTES["gpt2-xl"]
