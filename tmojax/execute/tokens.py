"""Completion of instructions, waited for by other threads; and the end of all waiting when one of them fails."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

_POLL_S = 0.1


class Stopped(Exception):
    """Another worker has failed; this one ends without a message of its own."""


class Abort:
    """Ends every wait of a step once something has failed; keeps the first failure."""

    def __init__(self) -> None:
        self.failure: BaseException | None = None
        self._lock = threading.Lock()

    def fail(self, failure: BaseException) -> None:
        with self._lock:
            self.failure = self.failure or failure

    def check(self) -> None:
        """Raises Stopped after a failure."""
        if self.failure is not None:
            raise Stopped

    def wait(self, event: threading.Event) -> None:
        """Wait for an event. Raises Stopped after a failure."""
        while not event.wait(_POLL_S):
            self.check()


class Token:
    """One instruction of a running step: started once its arrays exist, complete once they are computed."""

    __slots__ = ("_abort", "_array", "_lock", "_started")

    def __init__(self, abort: Abort) -> None:
        self._abort = abort
        self._lock = threading.Lock()
        self._started = threading.Event()
        self._array: Any = None

    def start(self, array: Any = None) -> None:
        """The work is under way; complete when `array` is (at once without one)."""
        self._array = array
        self._started.set()

    def wait_started(self) -> None:
        self._abort.wait(self._started)

    def wait_complete(self) -> None:
        """Block until the work is done. The array must still exist: what deletes or donates it waits first."""
        self._abort.wait(self._started)
        with self._lock:  # once one thread knows, it may delete the array while others still ask
            if self._array is not None:
                self._array.block_until_ready()
                self._array = None


def run_workers(abort: Abort, works: list[Callable[[], None]]) -> None:
    """Run every work in a thread of its own. Raises the first failure after all of them have ended."""

    def guarded(work: Callable[[], None]) -> None:
        try:
            work()
        except Stopped:
            pass
        except BaseException as failure:
            abort.fail(failure)

    threads = [threading.Thread(target=guarded, args=(work,), daemon=True) for work in works]
    for thread in threads:
        thread.start()
    try:
        for thread in threads:
            thread.join()
    except BaseException as interrupt:
        abort.fail(interrupt)
        for thread in threads:
            thread.join()
    if abort.failure is not None:
        raise abort.failure
