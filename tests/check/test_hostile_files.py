"""Files that are meant to hurt: `python -m tmojax.check` says what is wrong and exits, soon and with little memory."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from small_plans import KEEP
from test_command import write_run

from tmojax.check.__main__ import main

Make = Callable[[Path], None]
HUGE = 2**62


def replaced(old: str, new: str) -> Make:
    def change(path: Path) -> None:
        assert path.read_text().count(old) >= 1, old
        path.write_text(path.read_text().replace(old, new, 1))

    return change


def written(content: bytes) -> Make:
    return lambda path: path.write_bytes(content) and None


def field(*keys, value) -> Make:
    def change(path: Path) -> None:
        content = json.loads(path.read_text())
        place = content
        for key in keys[:-1]:
            place = place[key]
        place[keys[-1]] = value
        path.write_text(json.dumps(content))

    return change


def edited(change: Callable[[dict], object]) -> Make:
    def apply(path: Path) -> None:
        content = json.loads(path.read_text())
        change(content)
        path.write_text(json.dumps(content))

    return apply


def instead(make: Callable[[Path], object]) -> Make:
    """Something else where the file was."""

    def change(path: Path) -> None:
        path.unlink()
        make(path)

    return change


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-40])


def again(*keys) -> Callable[[dict], object]:
    """The first entry of a list once more."""

    def change(content: dict) -> None:
        place = content
        for key in keys:
            place = place[key]
        place.append(place[0])

    return change


def _tensors(count: int) -> list[dict]:
    return [{"name": f"t{n}", "size_bytes": 1, "kind": "weight", "lifetime": "state"} for n in range(count)]


def _grown(machine: dict, count: int) -> None:
    for name in ("memories", "devices"):
        machine[name] += [machine[name][0] | {"name": f"{name}{n}"} for n in range(count)]


PROGRAM = ("workload", "programs", 0)
BOTH = {
    "nothing": written(b""),
    "cut off": cut,
    "nested lists": written(b"[" * 200_000),
    "nested objects": written(b'{"a":' * 200_000),
    "NaN": replaced('"schema": "', '"x": NaN, "schema": "'),
    "Infinity": replaced('"schema": "', '"x": -Infinity, "schema": "'),
    "key twice": replaced('"schema": "', '"schema": "other", "schema": "'),
    "a million digits": replaced('"schema": "', f'"x": {"9" * 10**6}, "schema": "'),
    "not UTF-8": written(b"\xff\xfe{}"),
    "byte order mark": lambda path: path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes()) and None,
    "half a surrogate pair": replaced('"schema": "', '"schema": "\\ud800'),
    "a key of a million characters": replaced('"schema": "', f'"{"k" * 10**6}": 1, "schema": "'),
    "a folder": instead(Path.mkdir),
    "a link to itself": instead(lambda path: os.symlink(path, path)),
    "a named pipe": instead(os.mkfifo),
    "a device": instead(lambda path: os.symlink("/dev/zero", path)),
    "a list": written(b"[]"),
}
PLAN = BOTH | {
    "1e400": replaced('"step_s": null', '"step_s": 1e400'),
    "exponent of a million digits": replaced('"step_s": null', f'"step_s": 1e{"9" * 10**6}'),
    "unknown instruction": field("lists", value=[[["explode", 0]]]),
    "true for a number": field("lists", value=[[["compute", True, 0]]]),
    "a number that is not whole": field("lists", value=[[["compute", 0.0, 0]]]),
    "a negative size": field("lists", value=[[["lend", -5, 0, 1]]]),
    "an index of 64 bits": field("lists", value=[[["compute", HUGE, 0]]]),
    "a size beyond 64 bits": field("lists", value=[[["lend", 2**70, 0, 1]]]),
    "an instruction of the wrong length": field("lists", value=[[["compute", 0, 0, 0]]]),
    "the hash of another problem": field("problem_hash", value="0" * 64),
}
PROBLEM = BOTH | {
    "K of 62 bits": field("workload", "micro_batches", value=HUGE),
    "no micro-batch": field("workload", "micro_batches", value=0),
    "a negative size": field(*PROGRAM, "tensors", 0, "size_bytes", value=-1),
    "a size of 62 bits": field(*PROGRAM, "tensors", 0, "size_bytes", value=HUGE),
    "a tensor twice": edited(again(*PROGRAM, "tensors")),
    "an op twice": edited(again(*PROGRAM, "ops")),
    "a circle of ops": edited(lambda content: content["workload"]["programs"][0]["ops"].reverse()),
    "a negative time": field(*PROGRAM, "ops", 0, "duration_s", value=-1.0),
    "a time of 1e308": field(*PROGRAM, "ops", 0, "duration_s", value=1e308),
    "a tensor that is none": field(*PROGRAM, "ops", 0, "reads", value=[99]),
    "a million devices": field("workload", "device_program", value=[0] * 10**6),
    "a memory of no bytes": field("machine", "memories", 0, "capacity_bytes", value=0),
    "a reserve above the capacity": field("machine", "memories", 0, "reserve_bytes", value=HUGE),
    "a route to itself": edited(lambda c: c["machine"]["routes"][0].update(destination=1, source=1)),
    "a link that is none": field("machine", "routes", 0, "links", value=[99]),
    "a negative rate": field("machine", "links", 0, "bandwidth_bytes_per_s", value=-1.0),
    "a codec that divides by zero": field("machine", "codecs", 0, "denominator", value=0),
    "a segment without end": field(
        *PROGRAM, "orders", value={"o": [{"first_op": -5, "end_op": HUGE, "micro_batch": 0}]}
    ),
    "an order that runs ops again": field(
        *PROGRAM, "orders", value={"o": [{"first_op": 0, "end_op": 4, "micro_batch": 0}] * 10_000}
    ),
}
TOO_MANY = {
    "instances beside any op": edited(
        lambda content: (
            content["workload"].update(micro_batches=100_000)
            or content["workload"]["programs"].__setitem__(
                0, content["workload"]["programs"][0] | {"ops": [], "tensors": _tensors(1000)}
            )
        )
    ),
    "devices and memories": edited(lambda content: _grown(content["machine"], 2100)),
}
PROBLEM |= TOO_MANY
CASES = [("plan", name) for name in PLAN] + [("problem", name) for name in PROBLEM]


def attack(folder: Path, which: str, name: str) -> list[str]:
    """Make the files; the arguments of the command."""
    plan = write_run(folder, KEEP)
    problem = folder / "problem.json"
    (PLAN if which == "plan" else PROBLEM)[name](plan if which == "plan" else problem)
    return [str(plan), "--problem", str(problem)]


@pytest.mark.timeout(60)
@pytest.mark.parametrize(("which", "name"), CASES)
def test_the_message_is_short_and_the_exit_code_2(tmp_path, capsys, which, name):
    assert main(attack(tmp_path, which, name)) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.startswith("error: ") and len(printed.err) < 1200


def run_limited(arguments: list[str], most_bytes: int, most_s: float) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own that may not take more memory."""

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (most_bytes, most_bytes))

    command = [sys.executable, "-m", "tmojax.check", *arguments]
    one_thread = os.environ | {"OPENBLAS_NUM_THREADS": "1"}
    return subprocess.run(command, capture_output=True, text=True, timeout=most_s, preexec_fn=limit, env=one_thread)


@pytest.mark.parametrize("case", [("plan", "a named pipe"), ("plan", "1e400"), ("problem", "a circle of ops")])
def test_the_same_from_the_command_line(tmp_path, case):
    result = run_limited(attack(tmp_path, *case), 2 * 10**9, 60)
    assert result.returncode == 2 and result.stderr.startswith("error: ") and "Traceback" not in result.stderr


LARGE = {
    "100 MB of nested lists": (written(b"[" * 10**8), 2),
    "100 MB of nested objects": (written(b'{"a":' * (2 * 10**7)), 2),
    "100 MB of one string": (written(b'"' + b"x" * 10**8 + b'"'), 2),
    "too many values": (written(b'{"schema":[' + b"0," * 21_000_000 + b"0]}"), 2),
    "ten million values": (written(b'{"schema":[' + b"0," * 10_000_000 + b"0]}"), 2),
    "a million lists": (field("lists", value=[[]] * 10**6), 5),
    "a million wrong turns": (
        field("link_policies", value=[
            {"kind": "order", "slots": 1, "device_rank": [], "sequence": [[0, 0]] * 10**6} for _ in range(3)
        ]),
        5,
    ),
    "a million wrong instructions": (field("lists", value=[[["retire", 5]] * 10**6]), 5),
    "a slice of two billion": (field("lists", value=[[["prefetch", -1, 1, 0, -1, 5, 2**31 - 1, 0, 1]]]), 5),
}  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("name", LARGE)
def test_large_plans_stay_within_bounds(tmp_path, name):
    make, exit_code = LARGE[name]
    plan = write_run(tmp_path, KEEP)
    make(plan)
    result = run_limited([str(plan)], 4 * 10**9, 240)
    assert result.returncode == exit_code, result.stderr[-300:]
    assert "Traceback" not in result.stderr and len(result.stdout) < 40 * 10**6
