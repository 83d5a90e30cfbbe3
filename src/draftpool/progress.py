"""Progress of long stages: a bar on a terminal, plain lines in a log file."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator
from functools import cache
from typing import TextIO, TypeVar

T = TypeVar("T")

LOG_INTERVAL_SECONDS = 10.0


class _LineFile:
    """Turns tqdm's carriage returns into lines, so that a log file stays readable."""

    def write(self, text: str) -> None:
        text = text.replace("\r", "").strip()
        if text:
            sys.stderr.write(text + "\n")

    def flush(self) -> None:
        sys.stderr.flush()


@cache
def _behind_the_pipe() -> TextIO | None:
    """The terminal, where Snakemake runs on one and only the output of its jobs goes through a pipe."""
    if os.environ.get("DRAFTPOOL_PROGRESS") != "bar":
        return None
    try:
        return open("/dev/tty", "w", encoding="utf-8")  # noqa: SIM115 - lives as long as the process
    except OSError:
        return None


def bar(total: int | None, desc: str, unit: str = "it", initial: int = 0, silent: bool = False):
    """Return a tqdm bar with rate and remaining time; in a log file it prints a line every ten seconds.

    With ``DRAFTPOOL_PROGRESS=bar`` the bar goes to the terminal and one line, when it ends, to the log file. A
    ``silent`` one shows nothing.
    """
    from tqdm import tqdm

    class Bar(tqdm):
        def close(self) -> None:
            if tty is not None and not self.disable:
                _LineFile().write(str(self))
            super().close()

    tty = None if sys.stderr.isatty() else _behind_the_pipe()
    terminal = sys.stderr if sys.stderr.isatty() else tty
    return Bar(
        total=total,
        desc=desc,
        unit=unit,
        initial=initial,
        file=terminal or _LineFile(),
        mininterval=0.2 if terminal else LOG_INTERVAL_SECONDS,
        ncols=None if terminal else 100,
        ascii=not terminal,
        leave=tty is None,
        disable=silent,
    )


def progress(iterable: Iterable[T], total: int | None, desc: str, unit: str = "it") -> Iterator[T]:
    """Iterate with a progress bar (see :func:`bar`)."""
    with bar(total, desc, unit) as shown:
        for item in iterable:
            yield item
            shown.update(1)
