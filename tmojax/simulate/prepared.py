"""The entry points: lower a schedule once, run it under one or many conditions."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from tmojax.errors import InputError
from tmojax.problem import LinkPolicy, Problem, Schedule
from tmojax.simulate.arrays import Rules, new_state
from tmojax.simulate.kernel import WORK, run_events
from tmojax.simulate.lower import Lowered, lower
from tmojax.simulate.policies import rules_of
from tmojax.simulate.simulation import Events, Simulation
from tmojax.simulate.tables import table_of


class Prepared:
    """A schedule lowered for the event loop. Lowering costs more than a run, so variants share it."""

    def __init__(self, problem: Problem, schedule: Schedule) -> None:
        self.problem = problem
        self.schedule = schedule
        self._machine = table_of(problem).machine
        self._lowered = {1: lower(problem, schedule)}

    def run(
        self,
        *,
        link_policies: Sequence[LinkPolicy] | None = None,
        op_scale: Sequence[ArrayLike | None] | None = None,
        link_scale: ArrayLike | None = None,
        steps: int = 1,
        record: bool = False,
    ) -> Simulation:
        """Simulate.

        `link_policies`: one per link, empty for all fair, None for those of the schedule. `op_scale`: per device None
        or an array (instruction,) of factors on the time of compute, encode and decode (other entries are ignored).
        `link_scale`: array (link,) of factors on bandwidths. `steps`: how many times the lists are issued (semantics
        8.7); factors are the same in every step. `record`: keep link rates over time. Raises InputError.
        """
        lowered = self._lower(steps)
        rules = rules_of(self.problem, self._machine, lowered, self._policies(link_policies))
        if link_scale is not None:
            rules = rules._replace(bandwidth=self._machine.bandwidth * self._link_scale(link_scale))
        work_s = lowered.work_s if op_scale is None else self._scaled(lowered, op_scale)
        return self._simulate(lowered, rules, work_s, record)

    def run_batch(
        self,
        *,
        link_policies: Sequence[Sequence[LinkPolicy]] | None = None,
        op_scale: Sequence[ArrayLike | None] | None = None,
        link_scale: ArrayLike | None = None,
        steps: int = 1,
    ) -> NDArray[np.float64]:
        """`step_s` of many variants of one schedule, shape (batch,); inf where one deadlocks.

        Each argument has a leading axis of size batch or is None: `link_policies` a sequence of what `run` takes,
        `op_scale` per device None or (batch, instruction), `link_scale` (batch, link). Raises InputError.
        """
        lowered = self._lower(steps)
        op_arrays = None if op_scale is None else [None if s is None else np.asarray(s, np.float64) for s in op_scale]
        link_array = None if link_scale is None else np.asarray(link_scale, np.float64)
        sizes = {"link_policies": None if link_policies is None else len(link_policies)}
        sizes["link_scale"] = None if link_array is None else len(link_array)
        for device, array in enumerate(op_arrays or ()):
            sizes[f"op_scale[{device}]"] = None if array is None else len(array)
        given = {name: size for name, size in sizes.items() if size is not None}
        if len(set(given.values())) != 1:
            raise InputError(
                f"run_batch: leading sizes {given}; give at least one argument, and all with the same size"
            )
        batch = next(iter(given.values()))
        shared = None
        if link_policies is None:
            shared = rules_of(self.problem, self._machine, lowered, self.schedule.link_policies)
        result = np.empty(batch)
        for sample in range(batch):
            rules = shared
            if rules is None:
                assert link_policies is not None
                rules = rules_of(self.problem, self._machine, lowered, link_policies[sample])
            if link_array is not None:
                rules = rules._replace(bandwidth=self._machine.bandwidth * self._link_scale(link_array[sample]))
            work_s = lowered.work_s
            if op_arrays is not None:
                work_s = self._scaled(lowered, [None if array is None else array[sample] for array in op_arrays])
            result[sample] = self._simulate(lowered, rules, work_s, False).step_s
        return result

    def _lower(self, steps: int) -> Lowered:
        if steps not in self._lowered:
            self._lowered[steps] = lower(self.problem, self.schedule, steps)
        return self._lowered[steps]

    def _policies(self, link_policies: Sequence[LinkPolicy] | None) -> Sequence[LinkPolicy]:
        return self.schedule.link_policies if link_policies is None else link_policies

    def _link_scale(self, link_scale: ArrayLike) -> NDArray[np.float64]:
        factors = np.asarray(link_scale, np.float64)
        if factors.shape != self._machine.bandwidth.shape:
            raise InputError(
                f"link_scale: shape {factors.shape}; give one factor per link {self._machine.bandwidth.shape}"
            )
        if not (np.isfinite(factors) & (factors > 0)).all():
            raise InputError(f"link_scale: {factors}; factors must be positive and finite")
        return factors

    def _scaled(self, lowered: Lowered, op_scale: Sequence[ArrayLike | None]) -> NDArray[np.float64]:
        if len(op_scale) != lowered.length.size:
            raise InputError(f"op_scale: {len(op_scale)} entries; give one per device ({lowered.length.size}), or None")
        work_s = lowered.work_s.copy()
        for device, scale in enumerate(op_scale):
            if scale is None:
                continue
            factors = np.asarray(scale, np.float64)
            if factors.shape != (lowered.length[device],):
                raise InputError(
                    f"op_scale[{device}]: shape {factors.shape}; give one factor for each of {lowered.length[device]}"
                )
            nodes = lowered.nodes(device)
            factors = np.where(lowered.graph.kind[nodes] == WORK, np.tile(factors, lowered.steps), 1.0)
            if not (np.isfinite(factors) & (factors >= 0)).all():
                raise InputError(f"op_scale[{device}]: factors must be finite and not negative")
            work_s[nodes] *= factors
        return work_s

    def _simulate(self, lowered: Lowered, rules: Rules, work_s: NDArray[np.float64], record: bool) -> Simulation:
        state = new_state(lowered.graph, rules.bandwidth.size)
        segments = np.empty((4096 if record else 0, 3))
        count, needed = run_events(lowered.graph, rules, work_s, state, segments)
        if record and needed > len(segments):
            segments = np.empty((needed, 3))
            run_events(lowered.graph, rules, work_s, state, segments)
        events = Events(
            state.start_s,
            state.flow_start_s,
            state.end_s,
            state.busy_s,
            int(count),
            segments[:needed] if record else None,
        )
        return Simulation(lowered, self._machine, events)


def prepare(problem: Problem, schedule: Schedule) -> Prepared:
    """Lower a schedule for repeated simulation. Raises InputError for lists that cannot be read."""
    return Prepared(problem, schedule)


def simulate(
    problem: Problem,
    schedule: Schedule,
    *,
    link_policies: Sequence[LinkPolicy] | None = None,
    op_scale: Sequence[ArrayLike | None] | None = None,
    link_scale: ArrayLike | None = None,
    steps: int = 1,
    record: bool = False,
) -> Simulation:
    """How long a schedule takes, event by event (docs/semantics.md, section 8). Arguments as in `Prepared.run`."""
    return Prepared(problem, schedule).run(
        link_policies=link_policies, op_scale=op_scale, link_scale=link_scale, steps=steps, record=record
    )
