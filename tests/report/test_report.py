"""Verdict, tables, page, summary and figures of a small run."""

import dataclasses
import io
import json
import math
import re
import xml.dom.minidom
from html.parser import HTMLParser

import numpy as np
import pytest
import report_example as example

from tmojax.report.figure_style import inline_svg, svg_text
from tmojax.report.figures import draw, write_figures
from tmojax.report.html import report_html
from tmojax.report.memory_use import peak_by_kind
from tmojax.report.outcome import Outcome, RunReport, Shortfall
from tmojax.report.plots import plot_links, plot_memory, plot_plan
from tmojax.report.summary import json_values, summary
from tmojax.report.table import Table, decision_table, planner_table, print_report
from tmojax.report.trace import trace
from tmojax.report.verdict import describe_coordination, headroom_sentence, verdict
from tmojax.simulate import simulate


@pytest.fixture(scope="module")
def report() -> RunReport:
    return example.run_report()


@pytest.fixture(scope="module")
def nothing_fits() -> RunReport:
    made = example.run_report(capacity_bytes=70_000_000)
    short = Shortfall("gpu0", 33_000_000, "compute h2.back", (("h0.z", 10_000_000),), "mixed", 103_000_000, 0.1)
    return dataclasses.replace(made, shortfall=short)


def test_verdict_names_memory_cost_and_actions(report):
    assert report.best is not None and report.best.planner in ("offload", "mixed")
    text = verdict(report)
    assert text.startswith("Fits in 120 MB per GPU with ")
    assert "more time than unlimited memory" in text and "offload 2" in text
    assert headroom_sentence(report).startswith("Coordination headroom 30 %")
    assert verdict(dataclasses.replace(report, interrupted=True)).startswith("Interrupted; best plan so far: Fits")


def test_plan_rejected_by_the_checker_does_not_count(report):
    keep = report.outcomes[0]
    assert not keep.valid and keep.step_s == math.inf and keep.gap is None
    assert report.rejected == (keep,)


def test_verdict_when_nothing_fits(nothing_fits):
    text = verdict(nothing_fits)
    assert text == (
        "Does not fit in 70 MB per GPU: 33 MB (33000000 bytes) too much in gpu0 at compute h2.back. "
        "It fits in 103 MB per GPU with mixed, 100 ms a step."
    )
    out = io.StringIO()
    print_report(nothing_fits, out)
    assert "h0.z" in out.getvalue() and "10000000" in out.getvalue()


def test_plain_text_comes_with_headroom_first_and_the_baseline_beside_the_best(report):
    out = io.StringIO()
    print_report(report, out)
    lines = out.getvalue().splitlines()
    assert lines[0].startswith("Coordination headroom") and lines[1].startswith("Fits in")
    assert "\x1b" not in out.getvalue()
    table = planner_table(report)
    assert "(baseline)" in table.rows[0][0] + table.rows[1][0]
    assert table.rows[-1][0] == "keep-all" and table.rows[-1][2] == "-"


def test_terminal_gets_the_same_figures(report):
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    out = Terminal()
    print_report(report, out)
    assert "Fits in 120 MB" in out.getvalue()


def test_long_decision_tables_keep_every_kind_of_decision(report):
    whole, short = decision_table(report), decision_table(report, 3)
    assert whole is not None and short is not None and len(short.rows) == 3
    assert {row[0] for row in short.rows} == {row[0] for row in whole.rows}


def test_breakdown_is_the_checkers_peak(report):
    for outcome in report.outcomes:
        peaks = peak_by_kind(report.problem, outcome.result.schedule).sum(axis=1).tolist()
        assert outcome.check.peak_bytes == dict(zip(("gpu0", "gpu1", "host"), peaks, strict=True))


def test_plain_table_is_aligned():
    table = Table("t", ("name", "n"), (("a", "1"), ("bcd", "22")), frozenset({1}), frozenset({0}))
    assert table.plain() == "t\n  name   n\n  ----  --\n* a      1\n  bcd   22"


class _Page(HTMLParser):
    def __init__(self):
        super().__init__()
        self.open, self.links, self.ids = [], [], []

    def handle_starttag(self, tag, attrs):
        if tag not in ("meta", "br", "link", "img", "input", "hr"):
            self.open.append(tag)
        self.links += [v for k, v in attrs if k in ("href", "src", "xlink:href")]
        self.ids += [v for k, v in attrs if k == "id"]

    def handle_startendtag(self, tag, attrs):
        self.links += [v for k, v in attrs if k in ("href", "src", "xlink:href")]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_page_is_whole_offline_and_small(report, nothing_fits):
    for case in (report, nothing_fits):
        page = report_html(case, {name: svg_text(figure) for name, figure in draw(case).items()})
        parser = _Page()
        parser.feed(page)
        assert parser.open == []
        assert all(link.startswith(("#", "data:image/png;base64,")) for link in parser.links)
        assert len(set(parser.ids)) == len(parser.ids)
        assert not re.search(r"<script|@import|url\((?!#)", page)
        assert set(re.findall(r"https?://[^\"' <]+", page)) <= {"http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"}
        assert len(page) < 1_500_000
        assert verdict(case) in page.replace("&#39;", "'")


def test_page_escapes_names(report):
    problem = dataclasses.replace(report.problem, name="<b>x</b>")
    assert "<b>x" not in report_html(dataclasses.replace(report, problem=problem), {})


def test_summary_is_json_with_the_contract_fields(report, nothing_fits):
    content = json.loads(json.dumps(summary(report), allow_nan=False))
    assert {"verdict", "headroom", "planners", "bound_s", "gap"} <= content.keys()
    for planner in content["planners"]:
        assert {"planner", "status", "valid", "step_s", "bound_s", "gap", "peak_bytes", "moved_bytes", "plan_s",
                "compile_s", "jitter", "details"} <= planner.keys()  # fmt: skip
    best = next(p for p in content["planners"] if p["planner"] == content["best"])
    assert best["valid"] and best["moved_bytes"]["uplink.out"] > 0 and best["jitter"]["p95_s"] > 0
    rejected = next(p for p in content["planners"] if p["planner"] == "keep-all")
    assert rejected["step_s"] is None and rejected["gap"] is None and rejected["violations"]["capacity"] > 0
    assert json.dumps(summary(nothing_fits), allow_nan=False)


def test_json_values_of_numpy_and_infinity():
    given = {"a": np.float64("inf"), "b": np.arange(2), 3: (1.5, None, True), "c": {"d": float("nan")}}
    assert json_values(given) == {"a": None, "b": [0, 1], "3": [1.5, None, True], "c": {"d": None}}


def test_figures_are_small_valid_and_equal_for_equal_runs(report, tmp_path):
    texts = write_figures(tmp_path, draw(report), png=True)
    assert set(texts) == {"planners", "plan", "memory", "links"}
    assert texts == {name: svg_text(figure) for name, figure in draw(report).items()}
    for name, text in texts.items():
        xml.dom.minidom.parseString(text)
        xml.dom.minidom.parseString(inline_svg(text, name))
        assert (tmp_path / f"{name}.svg").stat().st_size < 1_500_000
        assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.long
def test_figures_of_100k_instructions_stay_small():
    problem = example.problem(4, 150, 16, 10**10)
    schedule = example.schedule(problem)
    assert sum(map(len, schedule.lists)) > 100_000
    simulation = simulate(problem, schedule, record=True)
    for plot in (plot_memory, plot_links, plot_plan):
        assert len(svg_text(plot(problem, schedule, simulation))) < 1_500_000


def test_coordination_is_described(report):
    best = report.best
    assert describe_coordination(report.problem, best.result.schedule, best.simulation) == (
        "all GPUs start together; links are shared fairly"
    )


def test_links_that_nothing_crosses_are_no_problem():
    problem = example.problem(1)
    schedule = example.schedule(problem, offload=False, recompute=False)
    simulation = simulate(problem, schedule, record=True)
    assert simulation.segments[0][0].size == 0
    assert not [e for e in trace(problem, schedule, simulation)["traceEvents"] if e["name"] == "rate gpu0.out"]
    assert "gpu0.out" not in svg_text(plot_links(problem, schedule, simulation))


def test_outcome_without_schedule_has_no_plan(report):
    outcome = Outcome(dataclasses.replace(report.outcomes[0].result, schedule=None))
    assert not outcome.valid and outcome.step_s == math.inf
