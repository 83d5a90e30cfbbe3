"""Ending a training between two steps when it is told to stop."""

from __future__ import annotations

import signal
import sys
import threading
from types import TracebackType

SIGNALS = (signal.SIGTERM, signal.SIGINT)


class StopRequests:
    """While entered, SIGTERM and SIGINT are noted instead of ending the program at once; the loop asks for them.

    Args:
        silent: Do not say so.

    Attributes:
        noted: Whether one came.
    """

    def __init__(self, silent: bool = False) -> None:
        self.silent, self.noted = silent, False
        self._before: dict[int, object] = {}

    def _note(self, signum: int, frame: object) -> None:
        if not self.noted and not self.silent:
            print("stopping when this step has ended", file=sys.stderr, flush=True)
        self.noted = True

    def __enter__(self) -> StopRequests:
        # Python lets the main thread alone listen; elsewhere signals stay what they were.
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._note) for number in SIGNALS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
