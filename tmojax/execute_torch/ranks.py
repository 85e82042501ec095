"""The ranks of a step: one process for each device of the plan, joined by `torch.distributed`."""

# PyTorch is optional, and static checks pass without it.
# pyright: reportMissingImports=false

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from tmojax.errors import InputError, TmojaxError
from tmojax.problem import Problem

WAIT_S = 600


class Ranks:
    """Who this process is in a plan, and what it does with the others: averages, and events that the plan orders.

    Raises InputError if there are not as many ranks as the plan has devices.
    """

    def __init__(self, problem: Problem, group: Any) -> None:
        self._group = group
        joined = dist.is_available() and dist.is_initialized()
        self.count = dist.get_world_size(group) if joined else 1
        self.rank = dist.get_rank(group) if joined else 0
        self._step = -1
        self._signalled: list[list[str]] = []  # keys by step
        self._sender = ThreadPoolExecutor(1, thread_name_prefix="tmojax-signals")
        devices = problem.workload.device_count
        if self.rank < 0 or self.count != devices:
            raise InputError(
                f"ranks: {self.count} take part and the plan is for {devices} device(s); start as many processes as "
                f"the plan has devices, join them with torch.distributed.init_process_group, and import and plan the "
                f"step with gpus={self.count}"
            )

    def average(self, gradients: Sequence[torch.Tensor]) -> None:
        """The mean over ranks replaces every gradient. (The loss is a mean over the rows of a rank's batch.)"""
        under_way = [dist.all_reduce(gradient, group=self._group, async_op=True) for gradient in gradients]
        for gradient, work in zip(gradients, under_way, strict=True):
            if work is not None:
                work.wait()
            gradient.div_(self.count)

    # --- events ------------------------------------------------------------------------------------------------
    # Ranks tell each other through the key-value store that they have met by.

    def begin_step(self) -> None:
        self._step += 1
        self._signalled.append([])
        if len(self._signalled) > 2:  # everybody is past the step before the last one
            for key in self._signalled.pop(0):
                self._store().delete_key(key)

    def signal(self, event: int | str, under_way: Iterable[Any]) -> None:
        """Tell the others that an event has happened, as soon as the work `under_way` (CUDA events) is done."""
        key, work = self._key(event), tuple(under_way)
        self._signalled[-1].append(key)

        def send() -> None:
            for one in work:
                one.synchronize()
            self._store().set(key, b"1")

        if work:
            self._sender.submit(send)
        else:
            send()

    def wait(self, event: int | str) -> None:
        """Block until another rank has signalled an event. Raises TmojaxError if it does not come."""
        try:
            self._store().wait([self._key(event)], timedelta(seconds=WAIT_S))
        except dist.DistStoreError as error:
            raise TmojaxError(
                f"rank {self.rank}: event {event} of step {self._step} has not come in {WAIT_S} s; do all ranks run "
                f"the same plan, and have they all started the step? ({error})"
            ) from None

    def _key(self, event: int | str) -> str:
        return f"tmojax/{self._step}/{event}"

    def _store(self) -> Any:
        group: Any = self._group or dist.group.WORLD
        return dist.distributed_c10d._get_process_group_store(group)  # there is no public way to it
