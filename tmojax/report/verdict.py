"""The sentences that a person reads first."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from tmojax.problem import LinkPolicyKind, Problem, Schedule
from tmojax.problem.in_order import DEFAULT
from tmojax.report.activity import COMPUTE_CATEGORIES, read_activity
from tmojax.report.decisions import AWAY, ENCODED, HOST, KEEP, action_rank, count_actions
from tmojax.report.outcome import Outcome, RunReport, device_capacities
from tmojax.report.wording import counted, listing, percent
from tmojax.simulate import Simulation
from tmojax.units import format_bytes, format_seconds

# Below this, the tool says that coordination has nothing to gain.
SMALL_HEADROOM = 0.02
OF_STATE = {HOST: "rest in host memory", AWAY: "leave between uses", ENCODED: "be encoded between uses"}


def per_gpu(sizes: tuple[int, ...]) -> str:
    """Sizes of all GPUs in few words: `4.2 GB per GPU` or `8 GB to 24 GB per GPU`."""
    low, high = min(sizes), max(sizes)
    return f"{format_bytes(low)} per GPU" if low == high else f"{format_bytes(low)} to {format_bytes(high)} per GPU"


def headroom_sentence(report: RunReport) -> str:
    """How much better than the best heuristic a plan could be at most; empty without a bound or a heuristic plan."""
    best, headroom = report.best_heuristic, report.headroom
    if best is None or headroom is None:
        return ""
    text = (
        f"Coordination headroom {percent(headroom)}: the best heuristic ({best.planner}) takes "
        f"{format_seconds(best.step_s)}, the lower bound is {format_seconds(best.bound_s)}"
    )
    return text + ("; there is next to nothing to gain." if headroom < SMALL_HEADROOM else ".")


def contention_sentence(report: RunReport) -> str:
    """What coordination saves against planning each GPU alone; empty where no such plans can be compared."""
    found = report.contention
    off = "" if report.coordinate else "Coordination is off: every GPU plans as if the path were its own. "
    if found is None:
        return off.strip()
    if found.avoided_s <= 0:
        return (
            f"{off}Contention cost avoided by coordination: none; no plan is faster than that of "
            f"{found.without.planner}, {format_seconds(found.without.step_s)} a step without coordination."
        )
    return (
        f"{off}Contention cost avoided by coordination: {format_seconds(found.avoided_s)} a step "
        f"({percent(found.avoided_share)}): {format_seconds(found.without.step_s)} where every GPU plans as if the "
        f"path were its own ({found.without.planner}), {format_seconds(found.coordinated.step_s)} with "
        f"{found.coordinated.planner}."
    )


def verdict(report: RunReport) -> str:
    """One sentence: whether it fits, what it costs against unlimited memory, and what is done for it."""
    best = report.best
    capacity = per_gpu(device_capacities(report.problem))
    if best is None or best.result.schedule is None:
        if report.interrupted:
            return f"Interrupted before there was a plan for {capacity}."
        return f"Does not fit in {capacity}{_why_not(report)}"
    marked = "Interrupted; best plan so far: " if report.interrupted else ""
    text = f"{marked}Fits in {capacity}"
    if 0 < report.unlimited_s < math.inf:
        extra = best.step_s / report.unlimited_s - 1
        more = f"{percent(extra)} more time than" if extra >= 5e-4 else "no more time than"
        text += f" with {more} unlimited memory ({format_seconds(best.step_s)} against "
        text += f"{format_seconds(report.unlimited_s)} a step)"
    else:
        text += f" with {format_seconds(best.step_s)} a step"
    order = best.result.schedule.order
    how = f", micro-batches in the order {order}" if order != DEFAULT else ""
    return f"{text}: {describe_actions(report.problem, best.result.schedule)}{how}."


def _why_not(report: RunReport) -> str:
    short = report.shortfall
    if short is None:
        return ": no planner found a valid plan."
    text = f": {format_bytes(short.bytes_over)} ({short.bytes_over} bytes) too much in {short.memory} at {short.where}"
    if short.fitting_capacity_bytes:
        text += (
            f". It fits in {format_bytes(short.fitting_capacity_bytes)} per GPU with {short.fitting_planner}, "
            f"{format_seconds(short.fitting_step_s)} a step"
        )
    return text + "."


def describe_actions(problem: Problem, schedule: Schedule) -> str:
    """What a plan does, as `recompute 48 activations, offload 12 and keep 30`; ranges where GPUs differ."""
    found = [count_actions(problem, schedule, device) for device in range(problem.workload.device_count)]
    parts: list[str] = []
    noun = "activation"  # said once
    for action in sorted({action for counts in found for action in counts}, key=action_rank):
        low, high = (f(counts.get(action, 0) for counts in found) for f in (min, max))
        before = "" if low == high else f"{low} to "
        if words := [OF_STATE[word] for word in action.split(" + ") if word in OF_STATE]:
            parts.append(f"let {before}{counted(high, 'persistent tensor')} {' and '.join(words)}")
        else:
            parts.append(f"{action} {before}{counted(high, noun) if noun else high}")
            noun = ""
    if not parts or all(set(counts) <= {KEEP} for counts in found):
        return "everything stays in device memory"
    return listing(parts)


def describe_coordination(problem: Problem, schedule: Schedule, simulation: Simulation) -> str:
    """How GPUs are kept out of each other's way: when each starts to compute, how shared links are given out."""
    starts = [
        float(activity.start_s[activity.of(*COMPUTE_CATEGORIES)].min(initial=math.inf))
        for activity in read_activity(problem, schedule, simulation)
    ]
    spread = np.array(starts) - min(starts)
    names = [device.name for device in problem.machine.devices]
    if spread.max() <= 0.002 * simulation.step_s:
        start = "all GPUs start together"
    else:
        later = [f"{name} {format_seconds(late)}" for name, late in zip(names, spread, strict=True) if late > 0]
        start = f"staggered starts ({', '.join(later)} after the first)"
    kinds: dict[str, list[str]] = {}
    for link, policy in zip(problem.machine.links, schedule.link_policies, strict=False):
        if policy.kind is not LinkPolicyKind.FAIR:
            slots = f" with {policy.slots} slots" if policy.slots > 1 else ""
            kinds.setdefault(f"{policy.kind}{slots}", []).append(link.name)
    if not kinds:
        return f"{start}; links are shared fairly"
    return f"{start}; " + "; ".join(f"{kind} on {listing(links)}" for kind, links in kinds.items())


def comparison_title(report: RunReport) -> str:
    """The finding of the comparison of planners."""
    best, baseline = report.best, report.baseline
    if best is None:
        return "No planner found a valid plan"
    text = best.planner
    text += f": {percent(best.gap)} above the lower bound" if best.gap is not None else " is the fastest"
    return text + _against_baseline(best, baseline)


def _against_baseline(best: Outcome, baseline: Outcome | None) -> str:
    if baseline is None or baseline is best or not 0 < baseline.step_s < math.inf:
        return ""
    return f", {percent(1 - best.step_s / baseline.step_s)} less time than {baseline.planner}"


def short_reasons(counts: Mapping[str, int]) -> str:
    """Counts of broken rules in few words."""
    return listing([f"{count} x {rule}" for rule, count in counts.items()])
