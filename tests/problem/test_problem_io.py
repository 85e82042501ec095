import json
import os
import re
import stat
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from problem_strategies import problems, schedules

from tmojax.errors import InputError
from tmojax.problem import (
    INSTRUCTION,
    Kind,
    LinkPolicy,
    ListBuilder,
    Schedule,
    keep_all_footprint_bytes,
    strict_json,
    validate_problem,
)
from tmojax.problem.io import (
    PlanFile,
    plan_from_json,
    plan_to_json,
    problem_from_json,
    problem_hash,
    problem_to_json,
    read_plan,
    read_problem,
    write_plan,
    write_problem,
)
from tmojax.problem.schedule import FIELDS
from tmojax.problem.strict_json import parse_json, readable_text

DOCUMENT = Path(__file__).parents[2] / "docs" / "instance-format.md"


def example(name: str) -> dict:
    """A JSON example of the documentation."""
    match = re.search(rf"<!-- example: {name} -->\n```json\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)
    assert match is not None
    return json.loads(match.group(1))


@pytest.fixture
def tiny() -> dict:
    return example("problem")


@pytest.fixture
def plan() -> dict:
    return example("plan")


def change(document: dict, path: str, value: object) -> None:
    *parents, last = [int(part) if part.isdigit() else part for part in path.split(".")]
    target = document
    for part in parents:
        target = target[part]
    target[last] = value


@given(problems())
def test_problem_round_trip(problem):
    validate_problem(problem)
    text = readable_text(problem_to_json(problem))
    again = problem_from_json(parse_json(text.encode()))
    assert again == problem
    assert readable_text(problem_to_json(again)) == text
    assert problem_hash(again) == problem_hash(problem)


@given(problems(), st.integers(1, 10**6))
def test_hash_tells_problems_apart(problem, extra):
    changed = problem.with_device_capacity(problem.capacity_bytes(0) + extra)
    assert problem_hash(changed) != problem_hash(problem)


@given(schedules(), st.none() | st.floats(0, 1e9), st.integers(0, 2**63 - 1))
def test_plan_round_trip(schedule, time_s, seed):
    plan = PlanFile(schedule, "0" * 64, "p", "feasible", time_s, time_s, 0.0, seed, {"a": [1, 0.5, {"b": None}]}, True)
    text = readable_text(plan_to_json(plan))
    again = plan_from_json(parse_json(text.encode()))
    assert again.schedule.same_as(schedule)
    assert all(instructions.dtype == INSTRUCTION for instructions in again.schedule.lists)
    assert replace(again, schedule=schedule).__dict__ == plan.__dict__
    assert readable_text(plan_to_json(again)) == text


def test_rows_carry_the_fields_of_their_kind():
    rows = ListBuilder()
    rows.compute(3, 1)
    rows.prefetch(7, 0, 1, 0, part=1, parts=4)
    rows.lend(2**40, 1, 0)
    value = plan_to_json(PlanFile(Schedule((rows.build(),), ((),)), "0" * 64, "p", "feasible"))
    assert value["lists"] == [[["compute", 3, 1], ["prefetch", -1, 7, 0, -1, 1, 4, 1, 0], ["lend", 2**40, 1, 0]]]
    assert set(FIELDS) == set(Kind)


def test_documented_example_is_valid(tiny, plan):
    problem = problem_from_json(tiny)
    assert keep_all_footprint_bytes(problem.workload, 0) == 440
    assert plan_from_json(plan).problem_hash == problem_hash(problem)
    assert len(plan_from_json(plan).schedule.lists[0]) == 14


def test_files_are_stable_bytes_and_no_temporary_file_remains(tmp_path, tiny, plan):
    problem = problem_from_json(tiny)
    for name in ("a", "b"):
        write_problem(tmp_path / name, problem)
        write_plan(tmp_path / f"{name}.plan", plan_from_json(plan))
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    assert (tmp_path / "a.plan").read_bytes() == (tmp_path / "b.plan").read_bytes()
    assert read_problem(tmp_path / "a") == problem
    assert read_plan(tmp_path / "a.plan").gap == 0.6
    assert sorted(os.listdir(tmp_path)) == ["a", "a.plan", "b", "b.plan"]


def test_integers_in_number_fields_and_negative_zero_have_one_form(tiny):
    problem = problem_from_json(tiny)
    change(tiny, "machine.links.0.bandwidth_bytes_per_s", 100)
    change(tiny, "machine.links.0.latency_s", -0.0)
    assert problem_hash(problem_from_json(tiny)) == problem_hash(problem)
    link = replace(problem.machine.links[0], bandwidth_bytes_per_s=np.int64(100))
    same = replace(problem, machine=replace(problem.machine, links=(link, problem.machine.links[1])))
    assert problem_hash(same) == problem_hash(problem)


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("schema", "tmojax-problem-2", "schema: expected 'tmojax-problem-1', got 'tmojax-problem-2'"),
        ("comment", "hello", "unknown key 'comment'; known: actions, machine"),
        ("actions", ["offload", "offload"], "actions: lists the same value twice"),
        ("actions", ["swap"], r"actions\[0\]: 'swap' is not one of offload, peer"),
        ("workload.micro_batches", True, "workload.micro_batches: expected an integer, got True"),
        ("workload.micro_batches", 1.0, "workload.micro_batches: expected an integer, got 1.0"),
        ("workload.micro_batches", 10**18, "tensor accesses"),
        ("workload.micro_batches", 10**400, "workload.micro_batches: an integer of 1329 bits does not fit"),
        ("workload.micro_batches", 0, "micro_batches: 0 must be at least 1"),
        ("workload.device_program", [1], r"device_program\[0\]: there is no program 1"),
        ("workload.programs.0.tensors.0.size_bytes", -1, "size_bytes -1 is negative"),
        ("workload.programs.0.tensors.0.size_bytes", 2**62, "more than 64-bit sums can hold"),
        ("workload.programs.0.tensors.1.name", "a", "tensor name 'a' is empty or used twice"),
        ("workload.programs.0.tensors.1.name", "\ud800", r"programs\[0\].tensors\[1\].name: .* surrogate"),
        ("workload.programs.0.ops.1.reads", [0, 9], "names tensor 9"),
        ("workload.programs.0.ops.1.reads", [False], r"programs\[0\].ops\[1\].reads\[0\]: expected an integer"),
        ("workload.programs.0.ops.1.reads", [2**63], r"reads\[0\]: 9223372036854775808 does not fit"),
        ("workload.programs.0.ops.1.duration_s", "1 s", r"ops\[1\].duration_s: expected a finite number, got '1 s'"),
        ("workload.programs.0.ops.1", [], r"ops\[1\]: expected an object, got a list of 0"),
        ("workload.programs.0.ops", {}, r"ops: expected a list, got an object"),
        ("workload.programs.0.orders", {"x": [{"first_op": 0, "end_op": 10**15, "micro_batch": 0}]}, "half-open"),
        ("machine.memories.0.capacity_bytes", 0, "capacity_bytes 0 must be positive"),
        ("machine.memories.0.kind", "hbm", "machine.memories.0.kind|'hbm' is not one of device, host, nvme"),
        ("machine.links.1.bandwidth_bytes_per_s", 0, "must be positive"),
        ("machine.routes.0.links", [7], "there is no link 7"),
        ("machine.devices", [], "devices: a machine needs at least one"),
    ],
)
def test_wrong_problem_fields_are_named(tiny, path, value, message):
    change(tiny, path, value)
    with pytest.raises(InputError, match=message):
        problem_from_json(tiny)


def test_missing_key_is_named(tiny):
    del tiny["workload"]["programs"][0]["ops"][2]["phase"]
    with pytest.raises(InputError, match=r"workload.programs\[0\].ops\[2\]: key 'phase' is missing"):
        problem_from_json(tiny)


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("schema", None, "schema: expected 'tmojax-plan-1'"),
        ("extra", 1, "plan: unknown key 'extra'"),
        ("problem_hash", "HASH", "problem_hash: 'HASH' is not 64"),
        ("gap", True, "gap: expected a finite number"),
        ("settings", [], "settings: expected an object"),
        ("time_limited", 0, "time_limited: expected true or false"),
        ("lists.0.0", ["compute", 0], r"lists\[0\]\[0\]: compute takes 2 value\(s\) \(op, micro_batch\), got 1"),
        ("lists.0.0", ["swap", 0], r"lists\[0\]\[0\]: unknown instruction 'swap'; known: compute"),
        ("lists.0.0", [], r"lists\[0\]\[0\]: expected an instruction"),
        ("lists.0.0", [["compute"], 0, 0], r"lists\[0\]\[0\]: unknown instruction a list of 1"),
        ("lists.0.4", ["compute", True, 0], r"lists\[0\]\[4\].op: expected an integer in 0..2147483647, got True"),
        ("lists.0.4", ["compute", -1, 0], r"lists\[0\]\[4\].op: expected an integer in 0"),
        ("lists.0.4", ["compute", 2**31, 0], r"lists\[0\]\[4\].op: .* got 2147483648"),
        ("lists.0.4", ["compute", 10**30, 0], r"lists\[0\]\[4\].op: "),
        ("lists.0.4", ["lend", 2**63, 0, 0], r"lists\[0\]\[4\].size_bytes: "),
        ("lists.0.4", ["lend", -5, 0, 0], r"lists\[0\]\[4\].size_bytes: expected an integer in 0\.\..* got -5"),
        ("lists.0.3.6", 0, r"lists\[0\]\[3\].parts: expected an integer in 1"),
        ("lists.0", 5, r"lists\[0\]: expected a list, got 5"),
        ("initial", [[{"tensor": 0}]], r"initial\[0\]\[0\]: key 'memories' is missing"),
        ("link_policies", [{"kind": "lifo"}], r"link_policies\[0\].kind: 'lifo' is not one of fair"),
        ("link_policies", [{"sequence": [[1]]}], r"link_policies\[0\].sequence\[0\]: expected 2 values, got 1"),
    ],
)
def test_wrong_plan_fields_are_named(plan, path, value, message):
    change(plan, path, value)
    with pytest.raises(InputError, match=message):
        plan_from_json(plan)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"", "line 1, column 1: not JSON"),
        (b"[1, 2", "not JSON .* cut off"),
        (b'{"schema": NaN}', "NaN is not a JSON number"),
        (b'{"schema": -Infinity}', "-Infinity is not a JSON number"),
        (b"[" * 200_000, "nested too deeply"),
        (b'{"a":' * 200_000, "nested too deeply"),
        (b"9" * 100_000, "too long"),
        (b"\xff\xfe", "not UTF-8"),
        (b'{"schema": 1e999}', "schema: expected"),
        (b'{"schema": "tmojax-problem-1", "schema": 1}', "key 'schema' stands twice"),
        (b'{"schema": "tmojax-problem-1", "workload": {"a": 1, "a": 1}}', "workload: key 'a' stands twice|missing"),
        (b'"text"', "expected an object, got 'text'"),
        (b"[" + b"0," * 20_000_001 + b"0]", "at most 20000000 are read"),
    ],
)
def test_hostile_text_is_an_input_error(tmp_path, text, message):
    path = tmp_path / "file.json"
    path.write_bytes(text)
    for read in (read_problem, read_plan):
        with pytest.raises(InputError, match=str(path)) as caught:
            read(path)
        assert len(str(caught.value)) < 1000
    with pytest.raises(InputError, match=message):
        read_problem(path)


def test_repeated_key_deep_inside_is_named(tmp_path, tiny):
    path = tmp_path / "file.json"
    path.write_text(json.dumps(tiny).replace('"name": "make_b"', '"name": "make_b", "name": "make_b"'))
    with pytest.raises(InputError, match=r"workload.programs\[0\].ops\[1\]: key 'name' stands twice"):
        read_problem(path)


def test_not_readable_files(tmp_path, monkeypatch):
    with pytest.raises(InputError, match="there is no such file"):
        read_problem(tmp_path / "missing")
    with pytest.raises(InputError, match="cannot be read"):
        read_problem(tmp_path)
    with pytest.raises(InputError, match="not a regular file"):
        read_problem(os.devnull)
    with pytest.raises(InputError, match="not a file name"):
        read_problem("a\0b")
    large = tmp_path / "large"
    with open(large, "wb") as file:
        file.truncate(strict_json.MAX_FILE_BYTES + 1)
    with pytest.raises(InputError, match="at most 512000000 are read"):
        read_problem(large)


def test_failed_write_leaves_the_old_file(tmp_path, tiny, plan):
    target = tmp_path / "plan.json"
    good = plan_from_json(plan)
    write_plan(target, good)
    before = target.read_bytes()
    with pytest.raises(InputError, match="step_s: expected a finite number"):
        write_plan(target, replace(good, step_s=float("nan")))
    with pytest.raises(InputError, match=r"settings.a: .* not a JSON value"):
        write_plan(target, replace(good, settings={"a": object()}))
    assert target.read_bytes() == before
    assert os.listdir(tmp_path) == ["plan.json"]
    with pytest.raises(InputError, match="cannot be written"):
        write_problem(tmp_path / "missing" / "a.json", problem_from_json(tiny))
    assert stat.S_IMODE(target.stat().st_mode) & 0o444 == 0o444 & ~os.umask(os.umask(0))


@given(st.binary(max_size=200) | st.text(max_size=100).map(str.encode))
@settings(max_examples=200)
def test_any_bytes_give_a_value_or_an_input_error(data):
    try:
        value = parse_json(data)
        for read in (problem_from_json, plan_from_json):
            with pytest.raises(InputError):
                read(value)
    except InputError:
        pass


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@given(st.data())
@settings(max_examples=300)
def test_any_damage_to_a_file_is_an_input_error_or_harmless(data):
    """Replace any value of the documented examples by any other JSON value."""
    for name, read in (("problem", problem_from_json), ("plan", plan_from_json)):
        document = example(name)
        target, key = document, data.draw(st.sampled_from(sorted(document)))
        while isinstance(target[key], dict | list) and target[key] and data.draw(st.booleans()):
            target = target[key]
            key = data.draw(st.sampled_from(sorted(target) if isinstance(target, dict) else range(len(target))))
        target[key] = data.draw(JSON_VALUES)
        try:
            read(document)
        except InputError as error:
            assert str(error)


def test_hundred_thousand_instructions_survive(tmp_path):
    rows = ListBuilder()
    for index in range(25_000):
        rows.compute(index, 0)
        rows.offload(index, 0, 0, 1)
        rows.release(index, 0, 0)
        rows.prefetch(index, 0, 1, 0)
    schedule = Schedule((rows.build(),), ((),), (LinkPolicy(),))
    write_plan(tmp_path / "plan.json", PlanFile(schedule, "0" * 64, "p", "feasible"))
    assert read_plan(tmp_path / "plan.json").schedule.same_as(schedule)


def test_unknown_kind_and_wrong_array_are_refused_on_writing():
    rows = np.zeros(3, INSTRUCTION)
    rows["kind"] = (0, 12, 0)
    with pytest.raises(InputError, match=r"lists\[0\]\[1\]: unknown instruction kind 12"):
        plan_to_json(PlanFile(Schedule((rows,), ((),)), "0" * 64, "p", "feasible"))
    with pytest.raises(InputError, match=r"lists\[0\]: expected a one-dimensional array"):
        plan_to_json(PlanFile(Schedule((np.zeros(3),), ((),)), "0" * 64, "p", "feasible"))
