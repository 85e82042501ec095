"""What Ctrl-C does during a run: it ends planning, and never leaves a report half written."""

from __future__ import annotations

import signal
import sys
import threading
from types import FrameType, TracebackType

# An exception inside the import of a compiled module can end the process, so an interrupt waits for the import's end.
RETRY_S = 0.05


class Interrupts:
    """A context in which SIGINT is remembered besides raising KeyboardInterrupt, until `writing` is set.

    Libraries may swallow the exception (an interrupt inside a callback from C is printed and dropped), so long
    computations ask `seen` between their steps. While the report is being written the first SIGINT is only noted, and
    the second one raises. A process that ignores SIGINT, as background jobs of a shell do, goes on ignoring it.
    """

    def __init__(self) -> None:
        self.seen = False
        self.writing = False
        self._installed = False

    def __enter__(self) -> Interrupts:
        self._before = signal.getsignal(signal.SIGINT)
        self._hook = sys.unraisablehook
        if self._before is signal.default_int_handler:
            try:
                signal.signal(signal.SIGINT, self._handle)
            except ValueError:  # not the main thread, which alone gets signals
                return self
            sys.unraisablehook = self._dropped
            self._installed = True
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None):
        if self._installed:
            signal.signal(signal.SIGINT, self._before)
            sys.unraisablehook = self._hook

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.writing:
            self.writing = False
            print("the report is being written; once more to stop that too", file=sys.stderr, flush=True)
            return
        self.seen = True
        if _imports(frame):
            again = threading.Timer(RETRY_S, signal.pthread_kill, (threading.get_ident(), signal.SIGINT))
            again.daemon = True
            again.start()
            return
        raise KeyboardInterrupt

    def _dropped(self, unraisable) -> None:
        if not isinstance(unraisable.exc_value, KeyboardInterrupt):
            self._hook(unraisable)


def _imports(frame: FrameType | None) -> bool:
    """Say whether a module is being imported at this moment."""
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
        frame = frame.f_back
    return False
