"""Regret against naive references, on tables small enough to count by hand."""

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from synthetic import acceptance_table, decode, study

from draftpool.analysis import regret
from draftpool.analysis.bootstrap import Resampling
from draftpool.analysis.metrics import SEQUENCE_KEY
from draftpool.errors import DraftpoolError

NONE = pd.DataFrame(columns=["stream", "prompt_id", "rounds"])


def sequences(rounds: dict[str, list[int]], prompts: list[str] | None = None) -> pd.DataFrame:
    """Sequence rows: rounds[selector][repeat] for prompt p, or one prompt per entry."""
    rows = []
    for selector, values in rounds.items():
        for number, value in enumerate(values):
            prompt = prompts[number] if prompts else "p"
            rows.append(
                {
                    "stream": "mixed",
                    "selector": selector,
                    "selector_seed": 0,
                    "repeat": 0 if prompts else number,
                    "prompt_id": prompt,
                    "domain": "d",
                    "prompt_index": number if prompts else 0,
                    "rounds": value,
                    "n_tokens": 10,
                }
            )
    return pd.DataFrame(rows)


def test_the_best_arm_minimises_mean_rounds_and_the_pathwise_minimum_stands_beside():
    # Means 6 and 5.5: b is i*; the pathwise minimum takes a in the first repeat and b in the second.
    frame = sequences({"fixed:a": [4, 8], "fixed:b": [6, 5], "ucb": [7, 7]})
    row = regret.query_regret(frame, ["a", "b"], NONE).set_index("selector").loc["ucb"]
    assert row["best_fixed"] == 7 - 5.5
    assert row["pathwise"] == 7 - (4 + 5) / 2
    assert np.isnan(row["switching"])


def test_regret_against_switching_and_seeds_averaged_within_a_prompt():
    frame = sequences({"fixed:a": [6], "fixed:b": [9], "ucb": [8]})
    frame = pd.concat([frame, frame[frame["selector"] == "ucb"].assign(selector_seed=1, rounds=6)])
    best = pd.DataFrame({"stream": ["mixed"], "prompt_id": ["p"], "rounds": [4.0]})
    row = regret.query_regret(frame, ["a", "b"], best).set_index("selector").loc["ucb"]
    assert (row["cost"], row["best_fixed"], row["switching"]) == (7, 1, 3)


def test_only_the_pool_counts_as_reference():
    frame = sequences({"fixed:a": [6], "fixed:outside": [2], "ucb": [8]})
    assert regret.query_regret(frame, ["a"], NONE).set_index("selector").loc["ucb", "best_fixed"] == 2
    with pytest.raises(DraftpoolError, match="fixed:b"):
        regret.query_regret(frame, ["a", "b"], NONE)


def test_cumulative_regret_adds_queries_in_the_order_of_the_stream():
    frame = sequences({"fixed:a": [5, 5, 5], "ucb": [6, 9, 5]}, ["p", "q", "r"])
    frame.loc[frame["prompt_id"] == "q", "prompt_index"] = 9  # q comes last
    curve = regret.cumulative_regret(regret.query_regret(frame, ["a"], NONE), Resampling(200))
    own = curve[curve["selector"] == "ucb"]
    assert own["rounds"].tolist() == [6, 11, 20]
    assert own["value"].tolist() == pytest.approx([1, 1, 5])
    assert own["n"].tolist() == [1, 2, 3]


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(1, 5), min_size=1, max_size=20))
def test_rounds_to_commit_equals_counting(committed):
    steps = pd.DataFrame({"n_committed": committed}).assign(**dict.fromkeys(SEQUENCE_KEY, 0))
    steps["round"] = np.arange(len(steps))
    grid = np.arange(1, sum(committed) + 4)
    found = regret.rounds_to_commit(steps, grid).set_index("n")["rounds"]
    assert list(found.index) == list(range(1, sum(committed) + 1))
    for n, rounds in found.items():
        assert sum(committed[:rounds]) >= n > sum(committed[: rounds - 1])


def test_curves_end_at_the_query_regret_and_are_zero_for_the_oracle():
    cfg = study(domains=["code", "maths"])
    steps, frame = decode(cfg, acceptance_table(cfg, prompts=4, length=24), seeds=(0,))
    frame["n_tokens"] = frame["n_tokens"].astype(int)
    curves = regret.regret_curves(steps, frame, cfg["pool"], Resampling(100))
    oracle = curves[curves["selector"] == "best_fixed_query"]
    assert len(oracle) > 3
    assert np.allclose(oracle["value"], 0)
    # Naive: for one n, count rounds of every query by hand.
    n = int(curves["tokens"].iloc[len(oracle) // 2])
    used = {
        key: int((group.sort_values("round")["n_committed"].cumsum() < n).sum()) + 1
        for key, group in steps.groupby(["prompt_id", "selector"])
        if group["n_committed"].sum() >= n
    }
    total = frame.set_index(["prompt_id", "selector"])["rounds"]
    arms = [f"fixed:{name}" for name in cfg["pool"]]
    naive = [
        used[prompt, "random"] - used[prompt, min(arms, key=lambda arm, p=prompt: total[p, arm])]
        for prompt in frame["prompt_id"].unique()
        if (prompt, "random") in used
    ]
    row = curves[(curves["selector"] == "random") & (curves["tokens"] == n)]
    assert row["value"].item() == pytest.approx(np.mean(naive))
