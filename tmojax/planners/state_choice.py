"""Which weights, gradients and optimizer state stay on a device, and which come and go.

Where state does not fit, what has to move is a question of whole tensors: while one is updated, others must be away
for it, so that the best choice is a packing, which rules for all state alike miss by far. Besides the plan given,
choices in which no more is elsewhere than has to (`tmojax.planners.state_levels`), choices that move the fewest bytes
at all (lists are decoded, not simulated) and the best plan in a few numbers (`tmojax.planners.state_outline`) are
starts of a search on the exact simulator: blocks of one kind of state in the order of their updates, from coarse to
fine, then, from the best, random changes and exchanges.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import chain

import numpy as np

from tmojax.errors import InputError
from tmojax.planners.ratio import fair_rate
from tmojax.planners.state_levels import StateLevels
from tmojax.planners.state_outline import best_outline
from tmojax.planners.sweep import sweep
from tmojax.planners.workbench import Candidate, Workbench
from tmojax.problem import Action, Kind, Problem
from tmojax.problem.step_view import StepView
from tmojax.relax.coordinate import host_links
from tmojax.relax.decisions import DeviceDecision, Rest, rests_of
from tmojax.relax.decode import DoesNotFit

SINGLE = 1 / 64  # of all state: larger tensors are decided alone, smaller ones with others of their kind and update
NEGLIGIBLE = 1e-3  # of the largest unit: units below are not decided at all
FEW = 240  # simulations: too few for more than one start
AGAIN_AFTER = 60  # simulations without a better plan, the random changes start from the best one again


@dataclass(frozen=True)
class StateSettings:
    """evaluations: exact simulations at most. decodes: lists that are decoded in search of few bytes, for each kind of
    device and each of `starts`. instructions: of all simulated lists together, and half as many of the decoded ones, at
    most, so that large problems take bounded time. threshold, byte_threshold: relative slow-down, and bytes more,
    accepted at first; they fall to zero.
    """

    evaluations: int = 1000
    decodes: int = 2000
    starts: int = 2
    instructions: int = 8_000_000
    threshold: float = 0.01
    byte_threshold: float = 0.05

    def __post_init__(self) -> None:
        for name in ("evaluations", "decodes", "starts", "instructions"):
            if getattr(self, name) < 1:
                raise InputError(f"{name}: {getattr(self, name)} must be at least 1")
        for name in ("threshold", "byte_threshold"):
            if getattr(self, name) < 0:
                raise InputError(f"{name}: {getattr(self, name)} must not be negative")


@dataclass(frozen=True, eq=False)
class Family:
    """State tensors of one kind. units: indices of the `StepView`'s state tensors that are decided together, in the
    order of their updates. resting: no micro-batch uses them. options: where they may rest. unit_bytes [units]."""

    resting: bool
    options: tuple[Rest, ...]
    units: tuple[np.ndarray, ...]
    unit_bytes: np.ndarray


def state_families(problem: Problem, view: StepView) -> tuple[Family, ...]:
    """The state tensors of a device by kind and update; tensors of which copies hardly matter are left out."""
    program = problem.workload.program(view.device)
    used_by: dict[int, int] = {}
    for step_op in (True, False):  # tensors that no step op uses stand where a micro-batch uses them
        for index, op in enumerate(program.ops):
            if op.step_op is step_op and not op.collective:
                for tensor in (*op.reads, *op.writes, *op.updates):
                    used_by.setdefault(tensor, index)
    large = SINGLE * float(view.state_bytes.sum())
    together: dict[tuple[str, bool, int], dict[int, list[int]]] = {}
    singles: dict[tuple[str, int], int] = {}
    for index, tensor in enumerate(view.state_tensor.tolist()):
        kind, place = str(program.tensors[tensor].kind), used_by.get(tensor, len(program.ops))
        rank = 0
        if view.state_bytes[index] > large:
            rank = singles[kind, place] = singles.get((kind, place), 0) + 1
        key = kind, bool(view.state_resting[index]), rank
        together.setdefault(key, {}).setdefault(place, []).append(index)
    size = {key: {place: int(view.state_bytes[unit].sum()) for place, unit in places.items()}
            for key, places in together.items()}  # fmt: skip
    least = NEGLIGIBLE * max((max(places.values()) for places in size.values()), default=0)
    families = []
    for key, places in together.items():
        chosen = [place for place in sorted(places) if size[key][place] > least]
        if chosen:
            units = tuple(np.array(places[place], np.int64) for place in chosen)
            unit_bytes = np.array([size[key][place] for place in chosen])
            families.append(Family(key[1], rests_of(problem, key[1]), units, unit_bytes))
    return tuple(families)


class StateMoves:
    """Random changes of where state rests: runs of one kind, and exchanges."""

    def __init__(self, bench: Workbench) -> None:
        self.families = {d: state_families(bench.problem, bench.view(d)) for d in sorted(set(bench.device_class))}
        self._class = bench.device_class

    @property
    def resting(self) -> dict[int, list[np.ndarray]]:
        """Units that no micro-batch uses, of every class of devices that has such."""
        found = {device: [unit for family in families if family.resting for unit in family.units]
                 for device, families in self.families.items()}  # fmt: skip
        return {device: units for device, units in found.items() if units}

    def propose(self, rng: np.random.Generator, device: int, decision: DeviceDecision) -> DeviceDecision:
        """`decision` with the state of one unit or run changed, and often of further ones; itself without state."""
        families = self.families[self._class[device]]
        state_out = decision.state_out.astype(np.int8)
        while families:
            family = families[int(rng.integers(len(families)))]
            count = len(family.units)
            length = 1 if rng.random() < 0.6 else int(rng.integers(1, count + 1))
            begin = int(rng.integers(0, count - length + 1))
            _change(rng, family, state_out, np.concatenate(family.units[begin : begin + length]))
            if rng.random() < 0.5:
                break
        return replace(decision, state_out=state_out)

    def exchange(self, rng: np.random.Generator, device: int, decision: DeviceDecision) -> DeviceDecision:
        """`decision` with one to three single units changed, large ones more often; itself without state."""
        families = self.families[self._class[device]]
        if not families:
            return decision
        state_out = decision.state_out.astype(np.int8)
        units = [(family, unit) for family in families for unit in family.units]
        weight = np.sqrt(np.concatenate([family.unit_bytes for family in families]).astype(float))
        for _ in range(1 + int(rng.random() < 0.7) + int(rng.random() < 0.4)):
            family, unit = units[int(rng.choice(len(units), p=weight / weight.sum()))]
            _change(rng, family, state_out, unit)
        return replace(decision, state_out=state_out)


def _change(rng: np.random.Generator, family: Family, state_out: np.ndarray, members: np.ndarray) -> None:
    """Give all members one option that the first of them does not have."""
    options = [option for option in family.options if option != state_out[members[0]]]
    state_out[members] = options[int(rng.integers(len(options)))]


def improve_state(
    bench: Workbench, start: Candidate, settings: StateSettings | None = None, seed: int = 0
) -> Candidate:
    """`start` with state somewhere else, and coordinated anew, if that is faster; never slower. Deterministic.

    Of steps so large that only some hundred plans can be simulated, only the blocks of the fastest start are tried.
    """
    settings = settings or StateSettings()
    moves = StateMoves(bench)
    if Action.OFFLOAD not in bench.problem.actions or not any(moves.families.values()):
        return start
    before = bench.simulations
    levels = StateLevels(bench, moves.resting, start).search()
    fastest = start if levels is None or levels.step_s >= start.step_s else levels
    rows = max(1, sum(len(rows) for rows in fastest.schedule.lists))
    evaluations = min(settings.evaluations, settings.instructions // rows) - (bench.simulations - before)
    if evaluations < FEW:
        search = _Search(bench, moves, fastest)
        search.blocks(max(8, evaluations // 2))
        return search.best
    searches = [_Search(bench, moves, plan) for plan in (start, levels) if plan is not None]
    if _moves_state(bench.problem, start):
        tries = (few_bytes(bench, moves, start.decisions, settings, seed + n) for n in range(settings.starts))
        light = [found for found in (sweep(bench, tried) for tried in tries) if isinstance(found, Candidate)]
        if light:
            searches.append(_Search(bench, moves, min(light, key=lambda plan: plan.step_s)))
    outline = best_outline(bench, start, evaluations // 4)  # of which many do not fit and are not simulated
    if outline is not None:
        evaluations -= evaluations // 4
        searches.append(_Search(bench, moves, outline))
    for number, search in enumerate(searches):
        evaluations -= search.blocks(evaluations // (len(searches) + 1 - number))
    best = min(searches, key=lambda search: search.best.step_s)
    best.random(evaluations, np.random.default_rng(seed), settings.threshold)
    best.consider(sweep(bench, best.best.decisions))
    return best.best


def state_share(bench: Workbench, plan: Candidate) -> float:
    """How much of the step copies of state, one way, keep a device's fair share of its host path busy; of the device
    where that is most."""
    if not plan.step_s:
        return 0.0  # nothing moves
    shares = [0.0]
    for device, rows in enumerate(plan.schedule.lists):
        tensors = bench.problem.workload.program(device).tensors
        moved = rows["tensor"][(rows["kind"] == Kind.OFFLOAD) & np.isin(rows["owner"], (-1, device))]
        moved_bytes = sum(tensors[t].size_bytes for t in moved.tolist() if tensors[t].lifetime == "state")
        shares.append(moved_bytes / fair_rate(bench, device) / plan.step_s)
    return max(shares)


def _moves_state(problem: Problem, plan: Candidate) -> bool:
    """Whether copies of state leave a device."""
    for device, rows in enumerate(plan.schedule.lists):
        moved = rows["tensor"][rows["kind"] == Kind.OFFLOAD]
        tensors = problem.workload.program(device).tensors
        if any(tensors[tensor].lifetime == "state" for tensor in np.unique(moved).tolist()):
            return True
    return False


def few_bytes(bench: Workbench, moves: StateMoves, start: tuple[DeviceDecision, ...], settings: StateSettings,
              seed: int) -> tuple[DeviceDecision, ...]:  # fmt: skip
    """Decisions with state resting where the fewest bytes cross the links in both directions together, found by
    blocks and annealing on decoded lists, for every kind of device from the first of its kind in `start`."""
    found: dict[int, DeviceDecision] = {}
    classes = sorted(set(bench.device_class))
    for first in classes:
        found[first] = start[first]
        if moves.families[first]:
            rows = len(classes) * max(1, _rows(bench, first, start[first]))
            decodes = min(settings.decodes, max(8, settings.instructions // (2 * rows)))
            found[first] = _few_bytes(bench, moves, first, start[first], decodes, settings.byte_threshold,
                                      np.random.default_rng(seed))  # fmt: skip
    return tuple(found[first] for first in bench.device_class)


def _rows(bench: Workbench, device: int, decision: DeviceDecision) -> int:
    decoded = bench.decode(device, decision)
    return 0 if isinstance(decoded, DoesNotFit) else len(decoded.rows)


def _few_bytes(bench: Workbench, moves: StateMoves, device: int, start: DeviceDecision, rounds: int, threshold: float,
               rng: np.random.Generator) -> DeviceDecision:  # fmt: skip
    def moved_bytes(decision: DeviceDecision) -> float:
        decoded = bench.decode(device, decision)
        return float("inf") if isinstance(decoded, DoesNotFit) else float(sum(decoded.moved_bytes))

    decoded = bench.decode(device, start)
    if isinstance(decoded, DoesNotFit):
        return start
    best, best_bytes = start, float(sum(decoded.moved_bytes))
    for number, (members, option) in enumerate(_blocks_of(moves.families[device])):
        if number >= rounds // 2:
            break
        tried = _with_rest(best, members, option)
        if (tried_bytes := moved_bytes(tried)) < best_bytes:
            best, best_bytes = tried, tried_bytes
    current, current_bytes = best, best_bytes
    for number in range(rounds):
        tried = moves.exchange(rng, device, current)
        tried_bytes = moved_bytes(tried)
        accepted = 1 + threshold * (1 - number / rounds) * float(rng.exponential())
        if tried_bytes <= current_bytes * accepted:
            current, current_bytes = tried, tried_bytes
            if tried_bytes < best_bytes:
                best, best_bytes = tried, tried_bytes
    return best


class _Search:
    """The best plan so far, from one start."""

    def __init__(self, bench: Workbench, moves: StateMoves, start: Candidate) -> None:
        self.bench, self.moves, self.best = bench, moves, start

    def consider(self, found: Candidate | DoesNotFit) -> bool:
        if isinstance(found, DoesNotFit) or not found.step_s < self.best.step_s * (1 - 1e-9):
            return False
        self.best = found
        return True

    def _evaluate(self, base: Candidate, devices: Iterable[int], change: Callable[[int], DeviceDecision]):
        """`base` with the decisions of `devices` changed, simulated; None where that is what it has already."""
        decisions = list(base.decisions)
        for device in devices:
            decisions[device] = change(device)
        if all(new.same_as(old) for new, old in zip(decisions, base.decisions, strict=True)):
            return None
        return self.bench.evaluate(tuple(decisions), base.coordination, base.lookahead_runs)

    def blocks(self, evaluations: int) -> int:
        """Every block of every family to every other option, equal devices alike; halved blocks, until a round of all
        sizes has found nothing or so many plans are simulated. Returns how many were."""
        simulated, improved = 0, True
        while improved:
            improved = False
            for devices, members, option in _blocks(self.bench, self.moves):
                if simulated >= evaluations:
                    return simulated

                def change(device: int, members=members, option=option) -> DeviceDecision:
                    return _with_rest(self.best.decisions[device], members, option)

                found = self._evaluate(self.best, devices, change)
                simulated += found is not None
                improved |= found is not None and self.consider(found)
        return simulated

    def random(self, evaluations: int, rng: np.random.Generator, threshold: float) -> None:
        """Random changes, of one device or of all that decide alike; a little slower plans are accepted at first."""
        current, since = self.best, 0
        for number in range(evaluations):
            device = int(rng.integers(self.bench.device_count))
            old, first = current.decisions[device], self.bench.device_class[device]
            new = (self.moves.propose, self.moves.exchange)[int(rng.integers(2))](rng, device, old)
            same = [device]
            if rng.random() < 0.6:
                same = [d for d, other in enumerate(current.decisions)
                        if self.bench.device_class[d] == first and other.same_as(old)]  # fmt: skip
            found = self._evaluate(current, same, lambda _, new=new: new)
            since += 1
            if isinstance(found, Candidate):
                if found.step_s <= current.step_s * (1 + threshold * (1 - number / evaluations)):
                    current = found
                if self.consider(found):
                    since = 0
            if since > AGAIN_AFTER:
                current, since = self.best, 0


def _with_rest(decision: DeviceDecision, members: np.ndarray, option: Rest) -> DeviceDecision:
    state_out = decision.state_out.astype(np.int8)
    state_out[members] = option
    return replace(decision, state_out=state_out)


def _blocks(bench: Workbench, moves: StateMoves) -> Iterator[tuple[list[int], np.ndarray, Rest]]:
    """(equal devices, state tensors, option) of every block, large ones first."""
    for devices in _equal_devices(bench):
        for members, option in _blocks_of(moves.families[bench.device_class[devices[0]]]):
            yield devices, members, option


def _blocks_of(families: tuple[Family, ...]) -> Iterator[tuple[np.ndarray, Rest]]:
    size = max((len(family.units) for family in families), default=0)
    while size:
        for family in families:
            for begin in range(0, len(family.units), size):
                members = np.concatenate(family.units[begin : begin + size])
                yield from ((members, option) for option in family.options)
        size //= 2


def _equal_devices(bench: Workbench) -> list[list[int]]:
    """All devices of a class; then, where their links differ, those of one speed."""
    machine = bench.problem.machine
    classes: dict[int, dict[float, list[int]]] = {}
    for device, first in enumerate(bench.device_class):
        speed = min(machine.links[link].bandwidth_bytes_per_s for link in host_links(machine, device))
        classes.setdefault(first, {}).setdefault(speed, []).append(device)
    alike = [sorted(chain.from_iterable(by_speed.values())) for by_speed in classes.values()]
    return alike + [devices for by_speed in classes.values() if len(by_speed) > 1 for devices in by_speed.values()]
