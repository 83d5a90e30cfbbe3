"""Clocks: parts of a round on the host, and on a device whose events are read late."""

from __future__ import annotations

import time

import pytest
import torch

from draftpool.decoding.clock import PARTS, EventClock, HostClock, make_clock


class _Device:
    """A stream that reaches its events later than the host records them."""

    def __init__(self):
        self.now, self.waited = 0.0, 0

    def event(self):
        device = self

        class Event:
            def record(self):
                self.at = device.now

            def elapsed_time(self, later):
                assert device.waited, "an event was read before the device was waited for"
                return later.at - self.at

        return Event()

    def synchronise(self):
        self.waited += 1


def test_host_parts_add_up_to_the_round():
    marks = []
    clock = HostClock(marks)
    started = time.perf_counter()
    parts = clock.start()
    for name in ("t_select", "t_draft", "t_select"):
        time.sleep(0.002)
        clock.lap(name)
    spent = time.perf_counter() - started
    clock.finish()
    assert set(parts) == set(PARTS) and parts["t_verify"] == 0.0
    assert parts["t_select"] >= 0.004 and parts["t_draft"] >= 0.002 and sum(parts.values()) <= spent
    assert [mark.part for mark in marks] == ["select", "draft", "select"]
    assert all(one.end == two.start for one, two in zip(marks, marks[1:], strict=False))


def test_events_are_read_once_for_all_rounds():
    device = _Device()
    clock = EventClock([], device.event, device.synchronise)
    rounds = []
    for length in (3.0, 5.0):
        rounds.append(clock.start())
        for name in ("t_draft", "t_verify", "t_draft"):
            device.now += length
            clock.lap(name)
        device.now += 100.0  # between rounds: belongs to none
    assert all(value == 0.0 for parts in rounds for value in parts.values()) and device.waited == 0
    clock.finish()
    assert device.waited == 1
    assert [parts["t_draft"] for parts in rounds] == pytest.approx([0.006, 0.010])
    assert [parts["t_verify"] for parts in rounds] == pytest.approx([0.003, 0.005])
    assert len(clock.marks) == 6


def test_a_cpu_gets_the_host_clock():
    assert type(make_clock(torch.device("cpu"), None)) is HostClock
