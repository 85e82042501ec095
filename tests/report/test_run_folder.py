"""Run folders, events, TOML text and provenance."""

import json
import tomllib
from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tmojax.errors import InputError
from tmojax.report.provenance import git_commit, provenance
from tmojax.report.run_folder import RunFolder
from tmojax.report.toml_text import toml_text

NOW = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)


def test_name_has_configuration_time_and_hash(tmp_path):
    first, second = (RunFolder(tmp_path / "runs", "a b/c", "0123456789ab", NOW) for _ in range(2))
    assert first.path.name == "a-b-c-20260102T030405Z-01234567"
    assert second.path.name == "a-b-c-20260102T030405Z-01234567-2"


def test_events_are_on_disk_at_once_and_failures_are_marked(tmp_path):
    folder = RunFolder(tmp_path, "run", "0" * 8)
    with pytest.raises(ZeroDivisionError), folder.phase("plan", planner="p") as found:
        found["compile_s"] = 0.5
        assert [json.loads(line)["event"] for line in (folder.path / "events.jsonl").open()] == ["phase_start"]
        _ = 1 / 0
    start, end = (json.loads(line) for line in (folder.path / "events.jsonl").open())
    assert start["phase"] == end["phase"] == "plan" and end["planner"] == "p"
    assert end["compile_s"] == 0.5 and end["failed"] == "ZeroDivisionError" and end["duration_s"] >= 0
    folder.close()


def test_files_are_written_whole_in_subfolders(tmp_path):
    folder = RunFolder(tmp_path, "run", "0" * 8)
    folder.write_json("plans/x.json", {"b": 1, "a": [None]})
    assert json.loads((folder.path / "plans" / "x.json").read_text()) == {"a": [None], "b": 1}
    assert {p.name for p in folder.path.rglob("*")} == {"events.jsonl", "plans", "x.json"}


def test_folder_that_cannot_be_made_is_an_input_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="--out"):
        RunFolder(tmp_path / "file", "run", "0" * 8)


plain = st.one_of(st.booleans(), st.integers(-(2**60), 2**60), st.floats(allow_nan=False, allow_infinity=False),
                  st.text(st.characters(exclude_categories=("Cs",)), max_size=20))  # fmt: skip
keys = st.text('ab-. é"', max_size=4)
values = st.recursive(
    plain, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=3), max_leaves=12
)


@given(st.dictionaries(st.text("abc.", max_size=3), values, max_size=5))
def test_toml_text_reads_back_equal(document):
    assert tomllib.loads(toml_text(document)) == document


def test_toml_text_leaves_out_none():
    given = {"a": None, "t": {"b": None, "c": [{"d": 1, "e": None}]}}
    assert tomllib.loads(toml_text(given)) == {"t": {"c": [{"d": 1}]}}


def test_provenance_is_json_and_names_versions(tmp_path):
    content = json.loads(json.dumps(provenance(seed=7, command_line=["x"])))
    assert content["seed"] == 7 and content["command_line"] == ["x"]
    assert {"python", "numpy", "jax", "numba", "highspy", "tmojax"} <= content["versions"].keys()
    assert git_commit(tmp_path) is None
