"""Oracles against enumeration of every sequence of drafters."""

import itertools

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_metrics import naive_rounds, random_table

from draftpool.analysis import headroom
from draftpool.analysis.bootstrap import Resampling
from draftpool.errors import DraftpoolError


def enumerate_best(table: pd.DataFrame, names: str) -> int:
    """Fewest rounds over all sequences of arms, tried one by one."""
    jumps = {
        name: table[table["drafter"] == name].sort_values("position")["committed"].to_list() for name in names
    }
    end = len(jumps[names[0]])
    for rounds in range(1, end + 1):
        for arms in itertools.product(names, repeat=rounds):
            position = 0
            for arm in arms:
                position += jumps[arm][position] if position < end else 0
            if position >= end:
                return rounds
    raise AssertionError("one token a round always reaches the end")


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10_000), st.integers(2, 8), st.integers(1, 3))
def test_best_switching_equals_enumeration(seed, n, arms):
    names = "abc"[:arms]
    table = random_table(np.random.default_rng(seed), n, 2, names)
    assert headroom.switching(table)["rounds"].item() == enumerate_best(table, names)


def test_d36_best_switching_beats_every_fixed_drafter_when_the_best_arm_swaps():
    table = random_table(np.random.default_rng(0), 21, 3)
    good = np.where(table["drafter"] == "a", table["position"] < 10, table["position"] >= 10)
    accepted = np.minimum(np.where(good, 3, 0), table["left"])
    table = table.assign(accepted=accepted, committed=np.minimum(accepted + 1, table["left"]))
    assert headroom.switching(table)["rounds"].item() == 5
    assert [naive_rounds(table, name) for name in "ab"] == [11, 13]


def test_oracles_are_ordered_and_average_repeats():
    rng = np.random.default_rng(3)
    tables = [
        random_table(rng, 20, 3, "abc", prompt).assign(repeat=repeat)
        for prompt in ("p", "q", "r")
        for repeat in (0, 1)
    ]
    prompts, arm = headroom.oracle_rounds(pd.concat(tables, ignore_index=True), "a")
    assert len(prompts) == 3
    assert (prompts["best_switching"] <= prompts["best_fixed_query"]).all()
    assert (prompts["best_fixed_query"] <= prompts["generalist"]).all()
    assert prompts["best_fixed_stream"].sum() <= prompts["generalist"].sum()
    naive = {name: np.mean([naive_rounds(tables[0], name), naive_rounds(tables[1], name)]) for name in "abc"}
    assert prompts.set_index("prompt_id").loc["p", "best_fixed_query"] == min(naive.values())
    assert arm in "abc"


def test_headroom_table_holds_tau_and_gain_of_each_oracle():
    tables = [random_table(np.random.default_rng(seed), 20, 3, "ab", f"p{seed}") for seed in range(8)]
    rows = headroom.headroom(pd.concat(tables, ignore_index=True), "a", "mixed", Resampling(200)).set_index(
        ["oracle", "metric"]
    )
    tau = rows.xs("tau", level="metric")["value"]
    for oracle in headroom.ORACLES:
        assert rows.loc[(oracle, "headroom"), "value"] == pytest.approx(tau[oracle] / tau["generalist"] - 1)
        assert rows.loc[(oracle, "headroom"), "n"] == 8
    assert ("generalist", "headroom") not in rows.index


def test_a_pool_scored_on_different_answers_is_refused():
    table = random_table(np.random.default_rng(0), 9, 3)
    extra = random_table(np.random.default_rng(0), 9, 3, "a", "q")
    with pytest.raises(DraftpoolError, match="not every drafter"):
        headroom.switching(pd.concat([table, extra], ignore_index=True))
    with pytest.raises(DraftpoolError, match="generalist"):
        headroom.oracle_rounds(table, "nobody")
