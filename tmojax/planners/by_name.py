"""Plans that a `jax.checkpoint` policy can carry out: one decision per name, the same on all devices.

A policy of names (`jax.checkpoint_policies.save_and_offload_only_these_names`) saves or offloads what is named and
recomputes everything else. This planner searches under that restriction, so its plan *is* the policy
(`tmojax.execute.jitted_step`).
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from tmojax.errors import InputError
from tmojax.planners.base import Planner, PlanResult, Status, Stopwatch, does_not_fit
from tmojax.planners.simple import layer_count
from tmojax.planners.workbench import Candidate, Workbench
from tmojax.problem import Action, Problem
from tmojax.problem.step_view import StepView
from tmojax.problem.workload import Phase
from tmojax.relax.coordinate import together
from tmojax.relax.decisions import SIMPLE, Choice, DeviceDecision
from tmojax.relax.decode import NEVER, DoesNotFit

Choices = tuple[Choice, ...]
SHORTEST_IDLE = 3  # slots from last to next use between which a tensor can leave and come back


@dataclass(frozen=True)
class ByName(Planner):
    """Save, offload or recompute per name; activations without a name are recomputed, state stays on the device.

    `names`: names, each with the tensors that have it. Empty: every activation is a name of its own. `kept`: tensors
    that the policy does not reach, and `never_recomputed`: names that it cannot recompute (inputs of the layers of a
    scan); `tmojax.execute.planner_for` fills in all three. `tie_layers`: names that differ in numbers only are decided
    together. What is offloaded leaves at once, as a compiled step has it, and comes back up to `lookahead_layers` ahead
    of its use. All combinations are simulated if there are at most `most_simulations`; else names are changed one by
    one, from three starts, as long as that helps.
    """

    name: str = "by-name"
    names: dict[str, tuple[str, ...]] = field(default_factory=dict)
    kept: tuple[str, ...] = ()
    never_recomputed: tuple[str, ...] = ()
    tie_layers: bool = True
    lookahead_layers: int = 1
    most_simulations: int = 300

    def __post_init__(self) -> None:
        for setting in ("lookahead_layers", "most_simulations"):
            if getattr(self, setting) < 1:
                raise InputError(f"{setting}: {getattr(self, setting)} must be at least 1")
        tensors = [tensor for group in self.names.values() for tensor in group]
        if len(set(tensors)) != len(tensors):
            repeated = next(tensor for tensor in tensors if tensors.count(tensor) > 1)
            raise InputError(f"names: tensor {repeated!r} is listed twice; list every tensor once")

    def actions(self, problem: Problem) -> frozenset[Action]:
        return problem.actions & {Action.OFFLOAD, Action.RECOMPUTE}

    def plan(self, problem: Problem, *, seed: int = 0, seeds: tuple[PlanResult, ...] = ()) -> PlanResult:
        """Search. Raises InputError for tensors in `names` that the workload does not have."""
        watch = Stopwatch()
        bench = Workbench(problem)
        groups = _Groups(bench, self)
        if groups.stuck:
            message = f"{groups.stuck!r} cannot be recomputed, and it has no name; name it, or allow recompute"
            return PlanResult(self.name, Status.NOT_FOUND, message=message, plan_s=watch.read_s())
        search = _Search(bench, groups, self.lookahead_layers, self.most_simulations)
        best = search.run()
        if isinstance(best, DoesNotFit):
            return does_not_fit(self.name, problem, best, watch)
        if best.step_s == math.inf:
            return PlanResult(
                self.name, Status.NOT_FOUND, message="every fitting combination deadlocks", plan_s=watch.read_s()
            )
        return PlanResult(
            self.name, Status.FEASIBLE, best.schedule, best.step_s, watch.read_s(), candidate=best,
            details={"names": len(groups.keys), "simulations": bench.simulations, "exhaustive": search.exhaustive},
        )  # fmt: skip


class _Groups:
    """Candidates of all devices by what is decided together.

    `keys` [group]: label. `options` [group]. `label` [device class][I]: name of each candidate, empty without one (it
    is recomputed), or None for what is kept. `group_of`, `allowed`: group and options by name; a name that does not
    have the option that its group takes is kept.
    `stuck`: an activation that has to be recomputed and cannot be, or the empty string.
    """

    def __init__(self, bench: Workbench, settings: ByName) -> None:
        self.bench, names = bench, settings.names
        self.label: dict[int, list[str | None]] = {}
        self.group_of: dict[str, int] = {}
        self.allowed: dict[str, set[Choice]] = {}
        self.keys: list[str] = []
        self.stuck = ""
        actions = bench.problem.actions
        name_of = {tensor: name for name, tensors in names.items() for tensor in tensors}
        kept = set(settings.kept)
        present = {tensor.name for program in bench.problem.workload.programs for tensor in program.tensors}
        unknown = [tensor for tensor in (*name_of, *settings.kept) if tensor not in present]
        if unknown:
            raise InputError(f"names: the workload has no tensor {unknown[0]!r}; take planner_for of this step")
        for device in sorted(set(bench.device_class)):
            view, program = bench.view(device), bench.problem.workload.program(device)
            self.label[device] = labels = []
            for index, tensor in enumerate(view.tensor.tolist()):
                own = program.tensors[tensor].name
                if program.ops[program.producer[tensor]].phase is not Phase.FORWARD or own in kept:
                    labels.append(None)
                    continue
                name = name_of.get(own, "") if names else own
                labels.append(name)
                recomputable = bool(view.may_recompute[index]) and Action.RECOMPUTE in actions
                if not name:
                    if view.needed[index] and not recomputable:
                        self.stuck = self.stuck or own
                    continue
                key = re.sub(r"\d+", "#", name) if settings.tie_layers else name
                if key not in self.keys:
                    self.keys.append(key)
                self.group_of[name] = self.keys.index(key)
                allowed = self.allowed.setdefault(name, set(SIMPLE))
                if view.idle_to[index] - view.idle_from[index] < SHORTEST_IDLE or Action.OFFLOAD not in actions:
                    allowed.discard(Choice.OFFLOAD)
                if name in settings.never_recomputed or not recomputable:
                    allowed.discard(Choice.RECOMPUTE)
        self.options = [
            tuple(c for c in SIMPLE if any(self.group_of[n] == group and c in self.allowed[n] for n in self.group_of))
            for group in range(len(self.keys))
        ]

    def lookahead(self, decisions: tuple[DeviceDecision, ...], layers: int) -> tuple[int, ...]:
        """How many runs ahead of its use each device may fetch: so few that everything offloaded does leave."""
        ahead = []
        for device, decision in enumerate(decisions):
            view = self.bench.view(device)
            per_layer = len(view.slot_op) // (2 * max(1, layer_count(self.bench.problem, view)))
            idle = (view.idle_to - view.idle_from)[decision.choice == Choice.OFFLOAD]
            ahead.append(max(1, min(layers * per_layer, int(idle.min(initial=NEVER)) - 2)))
        return tuple(ahead)

    def decisions(self, choices: Choices) -> tuple[DeviceDecision, ...]:
        """The decisions of all devices for one choice per group."""
        by_class = {d: self._decide(self.bench.view(d), labels, choices) for d, labels in self.label.items()}
        return tuple(by_class[first] for first in self.bench.device_class)

    def _decide(self, view: StepView, labels: list[str | None], choices: Choices) -> DeviceDecision:
        choice = np.full(len(view.tensor), Choice.KEEP, np.int8)
        forward = view.producer_slot < view.forward_end
        for index, name in enumerate(labels):
            if name:
                wanted = choices[self.group_of[name]]
                choice[index] = wanted if wanted in self.allowed[name] else Choice.KEEP
            elif name == "":
                choice[index] = Choice.RECOMPUTE
        # What nobody reads again, not even a recomputation, is dropped: so does JAX.
        read_again = view.needed.copy()
        for index in np.argsort(-view.producer_slot, kind="stable"):
            read_again[index] |= any(choice[d] == Choice.RECOMPUTE and read_again[d] for d in view.dependents[index])
            if forward[index] and not read_again[index]:
                choice[index] = Choice.RECOMPUTE
        return DeviceDecision(choice, np.zeros(len(view.state_tensor), np.int8))


class _Search:
    """Simulates combinations; better is: fits, then faster; among those that do not fit, fewer bytes too many."""

    def __init__(self, bench: Workbench, groups: _Groups, lookahead_layers: int, most_simulations: int) -> None:
        self.bench, self.groups, self.left = bench, groups, most_simulations
        self.lookahead_layers = lookahead_layers
        self.exhaustive = math.prod(map(len, groups.options)) <= most_simulations
        self.known: dict[Choices, Candidate | DoesNotFit] = {}

    def run(self) -> Candidate | DoesNotFit:
        if self.exhaustive:
            for choices in itertools.product(*self.groups.options):
                self.evaluate(choices)
        else:
            for start in self.starts():
                self.descend(start)
        return min(self.known.values(), key=_rank)

    def starts(self) -> Iterator[Choices]:
        for wanted in SIMPLE:
            yield tuple(wanted if wanted in options else options[0] for options in self.groups.options)

    def descend(self, choices: Choices) -> None:
        best = _rank(self.evaluate(choices))
        improved = True
        while improved and self.left > 0:
            improved = False
            for group, options in enumerate(self.groups.options):
                for option in options:
                    if self.left <= 0:
                        return
                    changed = (*choices[:group], option, *choices[group + 1 :])
                    rank = _rank(self.evaluate(changed))
                    if rank < best:
                        choices, best, improved = changed, rank, True

    def evaluate(self, choices: Choices) -> Candidate | DoesNotFit:
        if choices not in self.known:
            self.left -= 1
            decisions = self.groups.decisions(choices)
            ahead = self.groups.lookahead(decisions, self.lookahead_layers)
            self.known[choices] = self.bench.evaluate(
                decisions, together(self.bench.problem), ahead, release_at_once=True
            )
        return self.known[choices]


def _rank(found: Candidate | DoesNotFit) -> tuple[bool, float]:
    return (True, found.bytes_over) if isinstance(found, DoesNotFit) else (False, found.step_s)
