"""Metrics from step and acceptance tables, against naive references."""

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draftpool.analysis import metrics
from draftpool.errors import DraftpoolError

KEY = {
    "run_id": "r",
    "dtype": "float32",
    "stream": "mixed",
    "selector": "fixed:a",
    "selector_seed": 0,
    "repeat": 0,
    "prompt_id": "p0",
}


def worked_example() -> tuple[pd.DataFrame, pd.DataFrame]:
    """The example of docs/metrics.md: 3 rounds, block of 4, 8 tokens and a limit of 8."""
    steps = pd.DataFrame(
        {
            **KEY,
            "round": [0, 1, 2],
            "position": [0, 3, 4],
            "n_drafted": [3, 3, 3],
            "n_accepted": [2, 0, 3],
            "n_committed": [3, 1, 3],
            "hit_eos": False,
            "hit_limit": [False, False, True],
        }
    )
    sequences = pd.DataFrame([{**KEY, "n_tokens": 8, "rounds": 3, "matches_plain": True}])
    return steps, sequences


def test_d20_worked_example_of_the_docs():
    steps, sequences = worked_example()
    metrics.check_decoding(steps, sequences)
    assert metrics.tau_micro(steps) == pytest.approx(7 / 3)
    assert metrics.counts(steps) == {"drafted": 9, "accepted": 5, "rejected": 4, "committed": 7, "rounds": 3}
    assert metrics.marginal_rates(steps["n_accepted"].to_numpy(), 3) == pytest.approx([2 / 3, 2 / 3, 1 / 3])
    assert metrics.conditional_rates(steps["n_accepted"].to_numpy(), 3) == pytest.approx([2 / 3, 1, 1 / 2])
    untrimmed = steps[~steps["hit_limit"]]
    assert untrimmed["n_committed"].mean() == 2.0
    assert 1 + metrics.marginal_rates(untrimmed["n_accepted"].to_numpy(), 3).sum() == 2.0


def test_d20_micro_and_macro_differ_when_answers_do():
    steps, _ = worked_example()
    short = steps.iloc[[0]].assign(prompt_id="p1", n_committed=1, n_accepted=0)
    both = pd.concat([steps, short])
    assert metrics.tau_micro(both) == pytest.approx(8 / 4)
    assert metrics.tau_macro(both) == pytest.approx((7 / 3 + 1) / 2)


@given(st.lists(st.integers(0, 5), min_size=1, max_size=60))
def test_d21_length_is_one_plus_the_sum_of_marginal_rates(accepted):
    accepted = np.array(accepted)
    marginal = metrics.marginal_rates(accepted, 5)
    naive = [np.mean([a >= j for a in accepted]) for j in range(1, 6)]
    assert marginal == pytest.approx(naive)
    metrics.check_length_identity(accepted + 1, marginal)


def test_d21_broken_identities_raise():
    with pytest.raises(DraftpoolError, match="not 1 \\+ sum of marginal rates"):
        metrics.check_length_identity(np.array([2, 1]), np.array([0.5, 0.5]))
    with pytest.raises(DraftpoolError, match="increase with the slot"):
        metrics.check_length_identity(np.array([2, 1]), np.array([0.2, 0.3]))


@pytest.mark.parametrize(
    ("column", "row", "value", "message"),
    [
        ("n_committed", 0, 2, "commit 6 \\+ 1 prefill"),
        ("round", 1, 2, "gap or a repeat"),
        ("position", 1, 2, "does not begin where"),
        ("n_accepted", 2, 4, "impossible counts"),
        ("hit_limit", 2, False, "must commit n_accepted \\+ 1"),
    ],
)
def test_d21_d23_a_damaged_step_table_is_refused(column, row, value, message):
    steps, sequences = worked_example()
    steps.loc[row, column] = value
    with pytest.raises(DraftpoolError, match=message):
        metrics.check_decoding(steps, sequences)


def test_d23_tokens_counted_twice_or_lost_are_refused():
    steps, sequences = worked_example()
    with pytest.raises(DraftpoolError, match="8 tokens in 3 rounds|9 tokens in 3 rounds"):
        metrics.check_decoding(steps, sequences.assign(n_tokens=9))
    with pytest.raises(DraftpoolError, match="sequence is there twice"):
        metrics.check_decoding(steps, pd.concat([sequences, sequences]))
    with pytest.raises(DraftpoolError, match="without a sequence row"):
        metrics.check_decoding(pd.concat([steps, steps.assign(prompt_id="p1")]), sequences)


def test_d8_another_text_is_refused_in_float32_and_kept_in_bfloat16():
    steps, sequences = worked_example()
    sequences["matches_plain"] = False
    with pytest.raises(DraftpoolError, match="differ from plain decoding in float32"):
        metrics.check_decoding(steps, sequences)
    metrics.check_decoding(steps.assign(dtype="bfloat16"), sequences.assign(dtype="bfloat16"))


def random_table(
    rng: np.random.Generator, n: int, k: int, names: str = "ab", prompt: str = "p"
) -> pd.DataFrame:
    frames = []
    for name in names:
        position = np.arange(n - 1)
        left = n - 1 - position
        accepted = np.minimum(rng.integers(0, k + 1, n - 1), left)
        frames.append(
            pd.DataFrame(
                {
                    "prompt_id": prompt,
                    "domain": "d",
                    "repeat": 0,
                    "drafter": name,
                    "position": position,
                    "left": left,
                    "k": k,
                    "accepted": accepted,
                    "committed": np.minimum(accepted + 1, left),
                }
            )
        )
    return pd.concat(frames, ignore_index=True)


def naive_rounds(table: pd.DataFrame, drafter: str) -> int:
    own = table[table["drafter"] == drafter].set_index("position")
    position, rounds = 0, 0
    while position in own.index:
        position += own.at[position, "committed"]
        rounds += 1
    return rounds


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10_000), st.integers(2, 30), st.integers(1, 6))
def test_walk_equals_a_loop_over_positions(seed, n, k):
    rng = np.random.default_rng(seed)
    table = pd.concat([random_table(rng, n, k), random_table(rng, 2 + n // 2, k, prompt="q")])
    metrics.check_acceptance(table)
    walked = metrics.walk(table.sample(frac=1, random_state=seed)).set_index(["drafter", "prompt_id"])
    for (drafter, prompt), row in walked.iterrows():
        own = table[table["prompt_id"] == prompt]
        assert row["rounds"] == naive_rounds(own, drafter)
        assert row["tokens"] == own["position"].max() + 1


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10_000), st.integers(3, 20))
def test_truncate_is_what_a_shorter_limit_would_have_committed(seed, n):
    rng = np.random.default_rng(seed)
    table = random_table(rng, n, 4)
    limit = int(rng.integers(2, n + 1))
    cut = metrics.truncate(table, pd.DataFrame({"prompt_id": ["p"], "repeat": [0], "n_tokens": [limit]}))
    metrics.check_acceptance(cut)
    for drafter in "ab":
        own = table[table["drafter"] == drafter].set_index("position")
        position, rounds = 0, 0
        while position < limit - 1:
            position += min(own.at[position, "accepted"] + 1, limit - 1 - position)
            rounds += 1
        walked = metrics.walk(cut)
        assert walked.loc[walked["drafter"] == drafter, "rounds"].item() == rounds


def test_truncate_leaves_out_answers_that_are_too_short_or_unknown():
    table = random_table(np.random.default_rng(0), 5, 3)
    wanted = pd.DataFrame({"prompt_id": ["p", "other"], "repeat": 0, "n_tokens": [6, 3]})
    assert metrics.truncate(table, wanted).empty


def test_a_damaged_acceptance_table_is_refused():
    table = random_table(np.random.default_rng(0), 8, 3)
    with pytest.raises(DraftpoolError, match="missing or repeated"):
        metrics.check_acceptance(table.drop(index=3))
    with pytest.raises(DraftpoolError, match="missing or repeated"):
        metrics.check_acceptance(pd.concat([table, table]))
    with pytest.raises(DraftpoolError, match="min\\(accepted \\+ 1, left\\)"):
        metrics.check_acceptance(table.assign(committed=table["committed"] + 1))


def test_position_rates_count_each_selector_by_itself():
    steps, _ = worked_example()
    both = pd.concat([steps, steps.assign(selector="plain", n_drafted=0, n_accepted=0)])
    rates = metrics.position_rates(both)
    assert list(rates["selector"].unique()) == ["fixed:a"]
    assert rates["marginal"].tolist() == pytest.approx([2 / 3, 2 / 3, 1 / 3])
    assert (rates["n"] == 3).all()
