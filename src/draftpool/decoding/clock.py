"""Splits a round's time into named parts, without making a GPU wait for the clock; times parts in turns."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from draftpool.targets.load import synchronise

PARTS = ("t_select", "t_draft", "t_verify", "t_evaluate", "t_switch", "t_commit")


@dataclass(frozen=True)
class Mark:
    """When a part of a round ran, in nanoseconds of the system's clock (for the profiler)."""

    part: str
    start: int
    end: int


class HostClock:
    """Reads the host's clock at the end of every part; right where nothing runs behind the host's back.

    Args:
        marks: Parts of the rounds are added to it, for the profiler.
    """

    def __init__(self, marks: list[Mark] | None = None):
        self.marks = marks
        self.parts: dict[str, float] = {}
        self.last = self.last_ns = 0

    def start(self) -> dict[str, float]:
        """Begin a round; returns its seconds per part, filled in by the laps."""
        self.parts = dict.fromkeys(PARTS, 0.0)
        self.last_ns, self.last = time.time_ns(), time.perf_counter()
        return self.parts

    def lap(self, name: str) -> None:
        """End a part."""
        now = time.perf_counter()
        self.parts[name] += now - self.last
        self.last = now
        self._mark(name)

    def _mark(self, name: str) -> None:
        if self.marks is not None:
            now_ns = time.time_ns()
            self.marks.append(Mark(name.removeprefix("t_"), self.last_ns, now_ns))
            self.last_ns = now_ns

    def finish(self) -> None:
        """Complete the parts of all rounds."""


class EventClock(HostClock):
    """Puts events into the GPU's stream and reads them once, when the answer is complete.

    A part lasts from event to event on the GPU, waiting for the host included, so the parts of a round add up to its
    duration and no part waits for the clock.

    Args:
        marks: As for :class:`HostClock` (the host's times).
        event: Makes an event with `record()` and `elapsed_time(later)` in milliseconds.
        synchronise: Waits for the device.
    """

    def __init__(
        self, marks: list[Mark] | None, event: Callable[[], object], synchronise: Callable[[], None]
    ):
        super().__init__(marks)
        self.event, self.synchronise = event, synchronise
        self.open: list[tuple[dict[str, float], str, object, object]] = []
        self.last_event: object = None

    def _record(self) -> object:
        event = self.event()
        event.record()
        return event

    def start(self) -> dict[str, float]:
        """Begin a round."""
        parts = super().start()
        self.last_event = self._record()
        return parts

    def lap(self, name: str) -> None:
        """End a part; its seconds are known after :meth:`finish`."""
        event = self._record()
        self.open.append((self.parts, name, self.last_event, event))
        self.last_event = event
        self._mark(name)

    def finish(self) -> None:
        """Wait for the device once and fill in the seconds of all rounds."""
        self.synchronise()
        for parts, name, first, last in self.open:
            parts[name] += first.elapsed_time(last) / 1000
        self.open = []


def make_clock(device: torch.device, marks: list[Mark] | None) -> HostClock:
    """The clock that suits a device."""
    if device.type == "cuda":
        return EventClock(
            marks,
            lambda: torch.cuda.Event(enable_timing=True),
            lambda: torch.cuda.synchronize(device),
        )
    return HostClock(marks)


def interleave(
    arms: dict[str, Callable[[], object]],
    repeats: int,
    device: torch.device,
    warmup: int | None = None,
    shown: Callable[[], object] = lambda: None,
) -> dict[str, list[float]]:
    """Seconds of every arm in every repeat; arms take turns, and every other repeat goes backwards.

    Args:
        arms: What is timed, by name.
        repeats: Measured repeats.
        device: Synchronised around every measurement.
        warmup: Repeats that run before and are dropped; a fifth of ``repeats``, at least one, if not given.
        shown: Called after every repeat.
    """
    times: dict[str, list[float]] = {name: [] for name in arms}
    warmup = max(1, repeats // 5) if warmup is None else warmup
    for repeat in range(warmup + repeats):
        order = list(arms) if repeat % 2 else list(reversed(arms))
        for name in order:
            synchronise(device)
            started = time.perf_counter()
            arms[name]()
            synchronise(device)
            if repeat >= warmup:
                times[name].append(time.perf_counter() - started)
        shown()
    return times
