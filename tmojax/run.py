"""`python -m tmojax.run CONFIG [-o key.path=value]... [--sweep key.path=value,value] [--out runs] [--dry-run]`
(docs/configuration.md, docs/reading-a-report.md)."""

from __future__ import annotations

import argparse
import hashlib
import os
import sys
from collections.abc import Callable, Sequence

from tmojax.build import build_problem
from tmojax.config import RunConfig, load_config
from tmojax.errors import InfeasibleError, InputError, TmojaxError
from tmojax.problem.strict_json import canonical_text
from tmojax.report.interrupts import Interrupts
from tmojax.report.outcome import RunReport
from tmojax.report.run_folder import RunFolder
from tmojax.report.streams import stdout_to_stderr
from tmojax.report.summary import SUMMARY_SCHEMA
from tmojax.report.table import print_report
from tmojax.session import Session, facts, require_room_for_largest_op
from tmojax.sweep import run_sweep

FAILED, NOTHING_FOUND, REJECTED, INTERRUPTED = 1, 4, 5, 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code.

    0: a checked plan was written; 2: bad command line, configuration or input; 3: proved infeasible; 4: nothing
    feasible found; 5: the checker rejected a plan (a bug); 1: an error inside a planner (a bug), the plans of the
    others are written; 130: interrupted, the best plan so far is written.
    """
    parser = argparse.ArgumentParser(prog="python -m tmojax.run", description="Plan a training step and report.")
    parser.add_argument("config", metavar="CONFIG", help="TOML file of the run")
    parser.add_argument("-o", dest="overrides", metavar="KEY.PATH=VALUE", action="append", default=[],
                        help="replace one value of the configuration (repeatable)")  # fmt: skip
    parser.add_argument("--sweep", metavar="KEY.PATH=V1,V2,...", help="run once for each value; plans are offered to "
                        "each other, so that more memory never gives a slower one")  # fmt: skip
    parser.add_argument("--out", default="runs", help="folder in which the run's folder is made (default: runs)")
    parser.add_argument("--dry-run", action="store_true", help="print what would be planned and whether it can fit")
    given = parser.parse_args(arguments)
    command_line = ["python", "-m", "tmojax.run", *(arguments or sys.argv[1:])]
    try:
        if given.sweep is not None:
            if given.dry_run:
                raise InputError("--dry-run: is for one problem; leave --sweep out, or give one of its values with -o")
            return _sweep(given, command_line)
        config = load_config(given.config, given.overrides)
        if given.dry_run:
            return _dry_run(config)
        return _run(config, given.out, command_line)
    except TmojaxError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED


def _dry_run(config: RunConfig) -> int:
    built = build_problem(config)
    for line in facts(built):
        print(line)
    require_room_for_largest_op(built.problem)
    print("planners: " + ", ".join(planner.name for planner in config.planners))
    return 0


def _run(config: RunConfig, out: str, command_line: list[str]) -> int:
    digest = hashlib.sha256(canonical_text(config.document).encode("ascii")).hexdigest()
    folder = RunFolder(out, config.name, digest)
    try:
        with Interrupts() as interrupts:
            session = Session(config, folder, command_line, interrupts)
            session.say(f"writing to {folder.path}")
            try:
                with stdout_to_stderr():
                    session.run()
            except KeyboardInterrupt:
                session.interrupted = True
                session.say("interrupted; writing what was found")
            except InfeasibleError as error:
                folder.write_json("summary.json", {"schema": SUMMARY_SCHEMA, "verdict": str(error), "planners": []})
                raise
            if session.interrupted and not session.has_problem:
                return INTERRUPTED
            interrupts.writing = True
            report = session.write()
        _print(lambda: print_report(report, sys.stdout), str(folder.path))
    finally:
        folder.close()
    return INTERRUPTED if session.interrupted else _exit_code([report])


def _sweep(given: argparse.Namespace, command_line: list[str]) -> int:
    swept = run_sweep(
        lambda override: load_config(given.config, [*given.overrides, override]), given.sweep, given.out, command_line
    )
    _print(lambda: None, swept.text)
    if swept.interrupted:
        return INTERRUPTED
    return _exit_code(swept.reports) if swept.reports else InfeasibleError.exit_code


def _print(report: Callable[[], None], text: str) -> None:
    """Print a report and a text behind it to stdout."""
    try:
        report()
        print(text, flush=True)
    except BrokenPipeError:  # whoever read stdout has seen enough; Python must not try to flush it again
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _exit_code(reports: Sequence[RunReport]) -> int:
    """0 if one of the runs has a plan and none shows a bug."""
    if any(report.rejected for report in reports):
        return REJECTED
    if any(report.failed for report in reports):
        return FAILED
    return 0 if any(report.best is not None for report in reports) else NOTHING_FOUND


if __name__ == "__main__":
    sys.exit(main())
