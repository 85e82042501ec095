"""The command line: files, exit codes, interruption, determinism."""

import contextlib
import importlib
import json
import signal
import subprocess
import sys
import time
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest

from tmojax import session
from tmojax.config import load_config
from tmojax.importers.machine_build import load_machine
from tmojax.planners.base import PlanResult, Status
from tmojax.planners.simple import KeepAll, OffloadAll
from tmojax.problem import Action, Op, Overheads, Phase, Problem, Program, Tensor, TensorKind, Workload
from tmojax.problem.io import read_plan, read_problem, write_problem
from tmojax.run import main

CONFIG = """
seed = 3
micro_batches = 2
actions = ["offload", "recompute"]
[workload]
kind = "synthetic"
layers = 3
[machine]
preset = "prototype-4gpu-12.5"
[capacity]
footprint_factor = {factor}
[output]
jitter_samples = 5
{planners}
"""


def planners(*kinds: str) -> str:
    return "\n".join(f'[[planners]]\nkind = "{kind}"' for kind in kinds)


@pytest.fixture
def run(tmp_path, capfd):
    def call(*arguments: str, kinds=("keep-all", "offload-all"), factor=1.3):
        config = tmp_path / "small.toml"
        config.write_text(CONFIG.format(factor=factor, planners=planners(*kinds)))
        code = main([str(config), "--out", str(tmp_path / "runs"), *arguments])
        out, err = capfd.readouterr()
        return code, out, err

    return call


def test_run_writes_the_contract_and_names_its_folder_last(run):
    code, out, err = run()
    assert code == 0
    folder = Path(out.splitlines()[-1])
    names = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    assert {"config.toml", "provenance.json", "events.jsonl", "problem.json", "plans/offload-all.json", "check.json",
            "summary.json", "trace.json", "report.html", "figures/planners.svg"} <= names  # fmt: skip
    assert not [name for name in names if name.endswith(".tmp")]
    assert "Fits in" in out.splitlines()[0] + out.splitlines()[1]
    assert "keeping everything takes" in err
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["best"] == summary["baseline"] == "offload-all"
    assert summary["step_s"] >= summary["bound_s"] * (1 - 1e-9) and summary["unlimited_step_s"] > 0
    plan = read_plan(folder / "plans" / "offload-all.json")
    assert plan.problem_hash == summary["problem_hash"] and plan.gap == pytest.approx(summary["gap"])
    assert plan.settings["kind"] == "offload-all"
    assert json.loads((folder / "check.json").read_text())["offload-all"]["valid"]
    phases = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    assert [e["phase"] for e in phases if e["event"] == "phase_start"][:4] == [
        "build", "unlimited memory", "lower bound", "plan",
    ]  # fmt: skip
    assert all("compile_s" in e for e in phases if e["event"] == "phase_end" and e["phase"] == "plan")
    assert "report" in [e.get("phase") for e in phases]


def test_resolved_configuration_runs_again_and_gives_the_same_plan(run, tmp_path):
    _, out, _ = run("-o", "machine.hosts.host.capacity='300 GB'")
    folder = Path(out.splitlines()[-1])
    again = load_config(folder / "config.toml")
    assert again.document == load_config(folder / "config.toml").document
    assert tomllib.loads((folder / "config.toml").read_text())["seed"] == 3
    assert main([str(folder / "config.toml"), "--out", str(tmp_path / "again")]) == 0
    other = next((tmp_path / "again").iterdir())
    for name in ("problem.json", "plans/offload-all.json", "config.toml"):
        assert (folder / name).read_bytes() == (other / name).read_bytes()


def test_file_workload_resolves_to_an_absolute_path(run, tmp_path):
    _, out, _ = run()
    folder = Path(out.splitlines()[-1])
    config = tmp_path / "file.toml"
    config.write_text(f'[workload]\nkind = "file"\npath = "runs/{folder.name}/problem.json"\n{planners("offload-all")}')
    assert main([str(config), "--out", str(tmp_path / "two")]) == 0
    second = next((tmp_path / "two").iterdir())
    assert Path(tomllib.loads((second / "config.toml").read_text())["workload"]["path"]).is_absolute()
    assert read_problem(second / "problem.json").workload == read_problem(folder / "problem.json").workload


@pytest.mark.parametrize("capacity_bytes", [100, 50])
def test_step_without_compute_time_is_reported(capacity_bytes, tmp_path, capfd):
    """In the first case nothing takes any time at all, in the second only copies do."""
    tensors = tuple(Tensor(name, 40, TensorKind.ACTIVATION) for name in ("a", "b"))
    ops = [Op(f"f{i}", Phase.FORWARD, 0.0, writes=(i,)) for i in range(2)]
    ops += [Op(f"b{i}", Phase.BACKWARD, 0.0, reads=(i,)) for i in (1, 0)]
    workload = Workload("timeless", (Program("timeless", tensors, tuple(ops)),), (0,), 1, "synthetic")
    machine = replace(load_machine("prototype-4gpu-12.5"), overheads=Overheads())
    machine = replace(machine, devices=machine.devices[:1])
    problem = Problem("timeless", workload, machine, frozenset({Action.OFFLOAD}))
    write_problem(tmp_path / "problem.json", problem.with_device_capacity(capacity_bytes))
    config = tmp_path / "timeless.toml"
    config.write_text(f'[workload]\nkind = "file"\npath = "problem.json"\n{planners("keep-all", "offload-all")}')
    assert main([str(config), "--out", str(tmp_path / "runs")]) == 0
    out, err = capfd.readouterr()
    values = json.loads((Path(out.splitlines()[-1]) / "summary.json").read_text())
    step_s = min(row["step_s"] for row in values["planners"] if row["step_s"] is not None)
    assert (step_s == 0) == (capacity_bytes == 100) and "Warning" not in err


def test_dry_run_says_what_is_needed_and_writes_nothing(run, tmp_path):
    code, out, _ = run("--dry-run")
    assert code == 0 and "the largest op alone needs" in out and "planners: keep-all, offload-all" in out
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("override", ["nonsense.key=1", "planners=[]", "seed", "workload.layers='x'"])
def test_bad_configuration_is_exit_2_with_a_message(run, tmp_path, override):
    code, out, err = run("-o", override)
    assert code == 2 and not out and err.startswith("error: ") and "Traceback" not in err
    assert not (tmp_path / "runs").exists()


def test_bad_command_line_is_exit_2():
    with pytest.raises(SystemExit) as stopped:
        main(["--nonsense"])
    assert stopped.value.code == 2


def test_op_that_cannot_fit_is_exit_3_and_names_it(run, tmp_path):
    code, _, err = run("-o", 'capacity={bytes="1 MB"}')
    assert code == 3 and "alone needs" in err and "bytes" in err
    (folder,) = (tmp_path / "runs").iterdir()
    assert "alone needs" in json.loads((folder / "summary.json").read_text())["verdict"]


def test_nothing_found_is_exit_4_with_the_nearest_capacity(run):
    code, out, _ = run(kinds=("keep-all",), factor=1.4)
    assert code == 4
    assert "Does not fit in" in out and "It fits in" in out and "Largest in gpu" in out
    summary = json.loads((Path(out.splitlines()[-1]) / "summary.json").read_text())
    short = summary["shortfall"]
    assert short["bytes_over"] > 0 and len(short["largest"]) == 5
    # Keep-all fits exactly in the footprint; bisection stops within a sixty-fourth of it.
    footprint = max(summary["footprint_bytes"])
    assert footprint <= short["fitting_capacity_bytes"] <= footprint * (1 + 1 / 64)


def test_rejected_plan_is_exit_5(run, monkeypatch):
    def broken(self, problem, *, seed=0, seeds=()):
        result = OffloadAll().plan(problem)
        assert result.schedule is not None
        lists = tuple(rows[:-1] for rows in result.schedule.lists)
        return replace(result, planner=self.name, schedule=replace(result.schedule, lists=lists))

    monkeypatch.setattr(KeepAll, "plan", broken)
    code, out, _ = run()
    assert code == 5 and "rejected by the checker" in out
    assert (Path(out.splitlines()[-1]) / "report.html").exists()


def test_interrupted_run_writes_the_best_plan_so_far_and_says_so(run, monkeypatch):
    def stop(self, problem, *, seed=0, seeds=()):
        raise KeyboardInterrupt

    monkeypatch.setattr(KeepAll, "plan", stop)
    monkeypatch.setattr(session.Session, "_time_without_limit", lambda self, found: None)
    code, out, err = run(kinds=("offload-all", "keep-all"))
    assert code == 130 and "interrupted" in err
    folder = Path(out.splitlines()[-1])
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["interrupted"] and summary["best"] == "offload-all"
    assert summary["verdict"].startswith("Interrupted; best plan so far")
    assert read_plan(folder / "plans" / "offload-all.json").step_s == summary["step_s"]


def test_error_inside_a_planner_is_a_row_and_costs_the_others_nothing(run, monkeypatch):
    def fail(self, problem, *, seed=0, seeds=()):
        raise ZeroDivisionError("float division by zero")

    monkeypatch.setattr(KeepAll, "plan", fail)
    monkeypatch.setattr(session.Session, "_time_without_limit", lambda self, found: None)
    code, out, _ = run(kinds=("keep-all", "offload-all"))
    assert code == 1
    folder = Path(out.splitlines()[-1])
    summary = json.loads((folder / "summary.json").read_text())
    row = next(row for row in summary["planners"] if row["planner"] == "keep-all")
    assert row["status"] == "stopped by an error of its own" and not row["valid"]
    assert "ZeroDivisionError: float division by zero" in out
    assert "Traceback" in (folder / "failures" / "keep-all.txt").read_text() and "Traceback" not in out
    assert summary["best"] == "offload-all"


@pytest.mark.usefixtures("interrupts")
def test_interruption_that_a_library_swallows_ends_the_run_behind_the_planner(run, monkeypatch):
    def swallow(self, problem, *, seed=0, seeds=()):
        with contextlib.suppress(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        return PlanResult(self.name, Status.NOT_FOUND, message="none")

    monkeypatch.setattr(OffloadAll, "plan", swallow)
    monkeypatch.setattr(session.Session, "_time_without_limit", lambda self, found: None)
    code, out, err = run(kinds=("offload-all", "keep-all"))
    assert code == 130 and "keep-all: planning" not in err
    summary = json.loads((Path(out.splitlines()[-1]) / "summary.json").read_text())
    assert summary["interrupted"] and summary["verdict"].startswith("Interrupted before there was a plan")
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.usefixtures("interrupts")
def test_interruption_waits_for_the_end_of_an_import(run, monkeypatch, tmp_path):
    """Compiled modules may end the process when an exception passes through their initialisation."""
    (tmp_path / "interrupted_module.py").write_text("import signal\nsignal.raise_signal(signal.SIGINT)\nWHOLE = True\n")
    monkeypatch.syspath_prepend(tmp_path)
    whole = []

    def stop(self, problem, *, seed=0, seeds=()):
        whole.append(importlib.import_module("interrupted_module").WHOLE)
        time.sleep(60)

    monkeypatch.setattr(OffloadAll, "plan", stop)
    monkeypatch.setattr(session.Session, "_time_without_limit", lambda self, found: None)
    code, out, _ = run(kinds=("offload-all", "keep-all"))
    assert code == 130 and whole == [True]
    assert json.loads((Path(out.splitlines()[-1]) / "summary.json").read_text())["interrupted"]


@pytest.mark.usefixtures("interrupts")
def test_interruption_while_the_report_is_written_waits_for_it(run, monkeypatch):
    written = session.write_figures

    def interrupted(folder, figures):
        signal.raise_signal(signal.SIGINT)
        return written(folder, figures)

    monkeypatch.setattr(session, "write_figures", interrupted)
    code, out, err = run()
    assert code == 0 and "once more" in err
    assert (Path(out.splitlines()[-1]) / "report.html").exists()


@pytest.mark.usefixtures("interrupts")
def test_second_interruption_while_the_report_is_written_ends_it_without_a_traceback(run, monkeypatch):
    def interrupted(folder, figures):
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(session, "write_figures", interrupted)
    code, out, err = run()
    assert code == 130 and err.splitlines()[-1] == "interrupted" and not out


def test_reader_that_closes_the_pipe_is_no_error(tmp_path):
    config = tmp_path / "small.toml"
    config.write_text(CONFIG.format(factor=1.3, planners=planners("offload-all")))
    command = [sys.executable, "-m", "tmojax.run", str(config), "--out", str(tmp_path / "runs")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        err = process.stderr.read()
    assert process.returncode == 0 and "Traceback" not in err and "BrokenPipe" not in err


def test_time_budget_skips_what_is_left(run):
    code, out, _ = run("-o", "time_budget='0 s'")
    assert code == 4 and "time budget" in out


def test_planner_without_plan_is_a_row_not_a_failure(run, monkeypatch):
    def none(self, problem, *, seed=0, seeds=()):
        return PlanResult(self.name, Status.NOT_FOUND, message="of its own reasons")

    monkeypatch.setattr(KeepAll, "plan", none)
    code, out, _ = run()
    assert code == 0 and "keep-all: of its own reasons" in out


def test_coordination_off_plans_alone_and_states_what_contention_costs(run):
    code, out, _ = run("-o", "coordinate=false", kinds=("offload-all", "ratio-sweep"), factor=1.5)
    assert code == 0
    folder = Path(out.splitlines()[-1])
    summary = json.loads((folder / "summary.json").read_text())
    rows = {row["planner"]: row for row in summary["planners"]}
    assert list(rows) == ["offload-all", "ratio-sweep", "ratio-sweep+coordinated"]
    assert [row["comparison"] for row in rows.values()] == [False, False, True]
    assert [row["uncoordinated"] for row in rows.values()] == [True, True, False]
    assert all(row["valid"] for row in rows.values())
    # The plan of the run is one without coordination; the other is there to be compared with.
    assert summary["best"] == "ratio-sweep" and not summary["coordinate"]
    found = summary["contention"]
    assert found["uncoordinated_step_s"] == rows["ratio-sweep"]["step_s"]
    assert found["coordinated_step_s"] == rows["ratio-sweep+coordinated"]["step_s"]
    assert found["avoided_s"] == found["uncoordinated_step_s"] - found["coordinated_step_s"] > 0
    assert found["avoided_share"] == found["avoided_s"] / found["uncoordinated_step_s"]
    sentence = summary["contention_sentence"]
    assert sentence.startswith("Coordination is off") and "Contention cost avoided by coordination: " in sentence
    assert sentence in out and sentence in (folder / "report.html").read_text()
    assert read_plan(folder / "plans" / "ratio-sweep+coordinated.json").settings["kind"] == "ratio-sweep"
    assert json.loads((folder / "check.json").read_text())["ratio-sweep+coordinated"]["valid"]


def test_contention_of_a_coordinated_run_is_that_of_the_oblivious_plan(run):
    code, out, _ = run(kinds=("offload-all", "oblivious", "ratio-sweep"), factor=1.5)
    assert code == 0
    summary = json.loads((Path(out.splitlines()[-1]) / "summary.json").read_text())
    times = {row["planner"]: row["step_s"] for row in summary["planners"]}
    found = summary["contention"]
    assert found["uncoordinated_planner"] == "oblivious-fair" and found["coordinated_planner"] == summary["best"]
    assert found["avoided_s"] == times["oblivious-fair"] - min(times.values())
    _, out, _ = run(kinds=("offload-all",), factor=1.5)
    summary = json.loads((Path(out.splitlines()[-1]) / "summary.json").read_text())
    assert summary["contention"] is None and summary["contention_sentence"] == ""


def test_time_budget_may_end_before_the_comparison(run):
    code, out, _ = run("-o", "coordinate=false", "-o", "time_budget=1 us", kinds=("offload-all", "ratio-sweep"))
    summary = json.loads((Path(out.splitlines()[-1]) / "summary.json").read_text())
    assert code in (0, 4) and summary["contention"] is None
    assert summary["contention_sentence"] == "Coordination is off: every GPU plans as if the path were its own."
