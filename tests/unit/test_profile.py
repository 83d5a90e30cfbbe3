"""The profile: parts of a round by brute force, and a real trace of a tiny target."""

from __future__ import annotations

import gzip
import json

import pandas as pd
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny import live_cfg

from draftpool.decoding.clock import Mark
from draftpool.decoding.profile import busy, profile_decode, split_marks
from draftpool.errors import DraftpoolError

INTERVALS = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)).map(sorted).map(tuple), max_size=8)


def _covered(intervals: list[tuple[int, int]], start: int, end: int) -> int:
    return sum(any(low <= tick < high for low, high in intervals) for tick in range(start, end))


@given(intervals=INTERVALS, start=st.integers(0, 15), end=st.integers(15, 30))
def test_busy_time_counts_every_tick_once(intervals, start, end):
    assert busy(intervals, start, end) == _covered(intervals, start, end)


@given(intervals=INTERVALS, cuts=st.lists(st.integers(0, 30), min_size=2, max_size=5, unique=True))
def test_parts_hold_their_operators_and_the_rest_is_python(intervals, cuts):
    cuts = sorted(cuts)
    marks = [Mark("ab"[place % 2], *pair) for place, pair in enumerate(zip(cuts, cuts[1:], strict=False))]
    made = split_marks(marks, intervals).set_index("part")
    for part in made.index:
        own = [mark for mark in marks if mark.part == part]
        wanted = sum(_covered(intervals, mark.start, mark.end) for mark in own)
        assert made.loc[part, "operator_seconds"] == pytest.approx(wanted / 1e9)
        assert made.loc[part, "seconds"] == pytest.approx(sum(mark.end - mark.start for mark in own) / 1e9)
    assert (made.python_seconds >= -1e-15).all()


def test_every_method_gets_a_trace_and_its_parts(llama_world, tmp_path):
    world = llama_world
    cfg = live_cfg(world, max_new_tokens=10, selectors={"hedge": {"kind": "hedgespec"}}) | {
        "methods": ["plain", "hedge", "fixed:small"]
    }
    profile_decode(cfg, world.target, world.prompts, world.drafters, None, None, tmp_path / "out")
    parts = pd.read_csv(tmp_path / "out" / "parts.csv")
    assert set(parts.method) == set(cfg["methods"])
    wide = parts.pivot(index="method", columns="part", values="seconds").fillna(0.0)
    assert (wide.verify > 0).all() and wide.evaluate["hedge"] > 0 == wide.evaluate["plain"]
    assert wide.draft["fixed:small"] > 0
    assert (parts.operator_seconds <= parts.seconds + 1e-9).all()
    # Matrix products happen where they belong: an empty split would put everything into Python.
    verify = parts[parts.part == "verify"]
    assert (verify.operator_seconds > 0.2 * verify.seconds).all()
    for name in ("plain", "hedge", "fixed-small"):
        with gzip.open(tmp_path / "out" / f"trace-{name}.json.gz", "rt") as handle:
            trace = json.load(handle)
        assert "host_name" not in trace
        rounds = [event for event in trace["traceEvents"] if event.get("cat") == "round"]
        assert {"verify", "select"} <= {event["name"] for event in rounds}
    with pytest.raises(DraftpoolError, match=r"profile.methods.*unknown method `nobody`"):
        profile_decode(
            cfg | {"methods": ["nobody"]},
            world.target,
            world.prompts,
            world.drafters,
            None,
            None,
            tmp_path / "no",
        )
    assert not (tmp_path / "no").exists() and torch.get_num_threads() > 0
