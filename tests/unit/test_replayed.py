"""Statistics of replay on tables whose numbers are known."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from draftpool.analysis import replayed
from draftpool.analysis.bootstrap import Resampling
from draftpool.errors import DraftpoolError

RESAMPLING = Resampling(n_resamples=200)
POOL = ["a", "b"]
ROUNDS = {"plain": [20, 30], "fixed:a": [10, 20], "fixed:b": [14, 15], "ucb_bd": [11, 17]}
SECONDS = {"plain": [20.0, 30.0], "fixed:a": [12.0, 24.0], "fixed:b": [17.0, 18.0], "ucb_bd": [14.0, 21.0]}


def tables(stream: str = "heldout") -> dict[str, pd.DataFrame]:
    """Two queries, two drafters, one learner."""
    head = [{"stream": stream, "prompt_id": f"p{q}", "domain": "d", "repeat": 0} for q in range(2)]
    answers = [
        head[q]
        | {
            "selector": name,
            "tokens": 20 + 10 * q,
            "rounds": rounds[q],
            "zeros": rounds[q] / 2,
            "switches": 3.0,
        }
        | {"evaluated": 0.0, "seconds": SECONDS[name][q], "evaluation_seconds": 1.0, "catch_up_seconds": 0.7}
        | {"prompt_index": q, "converged": 4.0 + q, "reached": name != "plain"}
        for name, rounds in ROUNDS.items()
        for q in range(2)
    ]
    arms = [
        head[q] | {"selector": "ucb_bd", "arm": arm, "rounds": rounds}
        for q, split in enumerate([{"a": 8, "b": 3}, {"a": 2, "b": 15}])
        for arm, rounds in split.items()
    ]
    curves = [
        head[q] | {"selector": name, "n": n, "rounds": rounds[q] * n / 20}
        for name, rounds in ROUNDS.items()
        for q in range(2)
        for n in (10, 20)
    ]
    oracles = [
        head[q]
        | {"switching_rounds": 9 + q, "switching_seconds": 8.0, "greedy_rounds": 9, "ensemble_seconds": 40.0}
        for q in range(2)
    ]
    rewards = [
        head[q] | {"arm": arm, "be": be, "be_var": 0.1, "bd": be / 2, "bd_var": 0.02}
        for q in range(2)
        for arm, be in (("a", 0.5), ("b", 0.3))
    ]
    frames = {"answers": answers, "arms": arms, "curves": curves, "oracles": oracles, "rewards": rewards}
    return {kind: pd.DataFrame(rows) for kind, rows in frames.items()}


def queries_of(made: dict[str, pd.DataFrame], pool: list[str]) -> pd.DataFrame:
    return replayed.per_query(made["answers"], made["oracles"], pool)


def test_leaderboard_against_its_definitions():
    rows = replayed.leaderboard(tables()["arms"], queries_of(tables(), POOL), "a", RESAMPLING)
    # One domain: no scope of its own.
    assert set(rows.scope) == {"all"}
    board = rows.set_index(["selector", "metric"]).value
    assert board["ucb_bd", "converged"] == 4.5 and board["ucb_bd", "converged_share"] == 1.0
    assert board["plain", "converged_share"] == 0.0 and ("ensemble", "converged") not in board
    assert board["ucb_bd", "mat"] == pytest.approx(50 / 28)
    # i* is a on p0 (10 rounds) and b on p1 (15 rounds).
    assert board["ucb_bd", "regret"] == pytest.approx(np.mean([11 - 10, 17 - 15]))
    assert board["ucb_bd", "regret_switching"] == pytest.approx(np.mean([11 - 9, 17 - 10]))
    assert board["ucb_bd", "speedup"] == pytest.approx(50 / 35)
    assert board["ucb_bd", "speedup_free"] == pytest.approx(50 / 33)
    assert board["ucb_bd", "regret_seconds"] == pytest.approx(np.mean([14 - 12, 21 - 18]))
    assert board["ucb_bd", "best_arm_rate"] == pytest.approx(np.mean([8 / 11, 15 / 17]))
    assert board["ucb_bd", "switches"] == 3.0
    assert board["ensemble", "mat"] == pytest.approx(50 / 18)
    assert board["ensemble", "speedup"] == pytest.approx(50 / 80)
    assert board["plain", "speedup"] == 1.0


def test_domains_of_a_mixed_stream_get_rows_of_their_own_and_tests_are_adjusted():
    made = tables()
    for kind in ("answers", "arms", "oracles"):
        made[kind]["domain"] = made[kind]["prompt_id"].map({"p0": "d", "p1": "e"})
    rows = replayed.leaderboard(made["arms"], queries_of(made, POOL), "a", RESAMPLING)
    board = rows.set_index(["scope", "selector", "metric"]).value
    assert board["d", "ucb_bd", "mat"] == pytest.approx(20 / 11)
    assert board["e", "ucb_bd", "mat"] == pytest.approx(30 / 17)
    assert board["all", "ucb_bd", "mat"] == pytest.approx(50 / 28)
    tested = rows[rows.p.notna()]
    assert (
        set(tested.metric) == {"regret"} and (tested.p_holm >= tested.p).all() and rows.p_holm.notna().any()
    )


def test_every_selector_against_the_generalist():
    named = replayed.named_queries(queries_of(tables(), POOL), POOL, "a")
    rows = replayed.against_generalist(named, RESAMPLING).set_index("selector")
    assert rows.value["ucb_bd"] == pytest.approx(28 / 30 - 1)
    assert rows.value["best_fixed_stream"] == pytest.approx(29 / 30 - 1)
    assert rows.value["best_switching"] == pytest.approx(19 / 30 - 1)
    assert "plain" not in rows.index and rows.n.eq(2).all()


def test_growth_of_regret():
    """Regret of 1 and 2 rounds at a quarter, 2 and 4 in the end: it doubles."""
    made = tables()
    curves = [
        {"stream": "heldout", "prompt_id": f"p{q}", "domain": "d", "repeat": 0, "selector": name, "n": n}
        | {"rounds": 10.0 * n + (0.0 if name != "ucb_bd" else (q + 1) * (1.0 if n == 20 else 2.0))}
        for q in range(2)
        for name in ROUNDS
        for n in (1, 20, 80)
    ]
    rows = replayed.regret_growth(pd.DataFrame(curves), queries_of(made, POOL), RESAMPLING)
    assert rows.set_index("selector").value.to_dict() == {"ucb_bd": pytest.approx(0.5)}
    assert rows.iloc[0][["quarter", "whole"]].tolist() == [20, 80]


def test_curves_are_relative_to_the_query_s_best_arm():
    curves = (
        replayed.regret_over_tokens(tables()["curves"], queries_of(tables(), POOL), RESAMPLING)
        .set_index(["selector", "tokens"])
        .value
    )
    assert curves["ucb_bd", 20] == pytest.approx(np.mean([11 - 10, 17 - 15]))
    assert curves["fixed:a", 10] == pytest.approx(np.mean([0, (20 - 15) / 2]))


def test_names_of_references():
    queries = queries_of(tables(), POOL)
    named = replayed.named_queries(queries, POOL, "b").set_index(["selector", "prompt_id"]).rounds
    assert named["generalist"].tolist() == [14, 15]
    # b needs 29 rounds on the stream, a 30.
    assert named["best_fixed_stream"].tolist() == [14, 15]


def test_feedback_signal_and_shares():
    made = tables()
    queries = queries_of(made, POOL)
    rows = replayed.feedback(made, queries, "ucb_bd", RESAMPLING).set_index("metric").value
    assert rows["signal_be"] == pytest.approx(0.2**2 / 0.1)
    assert rows["signal_bd"] == pytest.approx(0.1**2 / 0.02)
    assert rows["signal_difference"] == pytest.approx(0.5 - 0.4)
    assert rows["zero_be"] == pytest.approx(0.5)
    assert rows["catch_up_share"] == pytest.approx(1.4 / 35)


def test_predictions_are_paired_with_live_decoding():
    live = pd.DataFrame(
        {"stream": "heldout", "selector": "ucb_bd", "prompt_id": ["p0", "p1"], "dtype": "float32"}
    ).assign(n_tokens=[21, 31], wall_time=[13.0, 22.0], rounds=[11, 17])
    row = replayed.prediction(tables(), live, "float32", RESAMPLING).iloc[0]
    assert row.live == pytest.approx(50 / 35) and row.predicted == pytest.approx(50 / 35)
    assert row.value == pytest.approx(1.0) and row.n == 2
    assert (row.rounds_live, row.rounds_predicted) == (28, 28)


def test_a_missing_fixed_drafter_is_told():
    made = tables()
    answers = made["answers"][made["answers"].selector != "fixed:b"]
    with pytest.raises(DraftpoolError, match="fixed:b: not replayed on every prompt"):
        queries_of(made | {"answers": answers}, POOL)


def test_regret_by_size_and_its_slope():
    rows = [
        {"size": size, "pool": pool, "drafters": "x", "selector": "s", "prompt_id": f"p{q}", "domain": "d"}
        | {"rounds": 20 + q + 2 * np.log(size) + pool, "best_fixed": 20.0 + q, "switching_rounds": 15.0}
        for size in (2, 4, 8)
        for pool in (0, 1)
        for q in range(5)
    ]
    frame = pd.DataFrame(rows)
    table = replayed.regret_by_size(frame, RESAMPLING).set_index(["size", "metric"])
    assert table.value[4, "regret"] == pytest.approx(2 * np.log(4) + 0.5)
    assert table.value[4, "relative"] == pytest.approx((2 * np.log(4) + 0.5) / 22)
    assert (table.pools == 2).all() and (table.n == 5).all()
    slope = replayed.size_slopes(frame, RESAMPLING).iloc[0]
    assert slope.value == pytest.approx(2.0) and slope.selector == "s"


def test_regret_by_length_bins_queries_by_the_best_arm_s_rounds():
    queries = pd.DataFrame(
        {
            "stream": "heldout",
            "selector": "s",
            "prompt_id": [f"p{q}" for q in range(9)],
            "best_fixed": np.arange(10.0, 19.0),
            "rounds": np.arange(10.0, 19.0) + np.repeat([3.0, 2.0, 1.0], 3),
        }
    )
    table = replayed.regret_by_length(queries, RESAMPLING)
    assert table["bin"].tolist() == [0, 1, 2] and table.n.sum() == 9
    assert table.value.is_monotonic_decreasing
    first = queries.head(int(table.n[0]))
    assert table.value[0] == pytest.approx((first.rounds - first.best_fixed).sum() / first.best_fixed.sum())


def test_best_fixed_drafters_by_domain_and_by_seconds():
    made = tables()
    queries = queries_of(made, POOL)
    queries = queries.assign(domain=queries["prompt_id"].map({"p0": "d", "p1": "e"}))
    named = replayed.named_queries(queries, POOL, "a").set_index(["selector", "prompt_id"])
    # a needs 10 + 20 rounds, b 14 + 15: b on the stream; a on d, b on e; b is the faster one in seconds.
    assert named.loc[("best_fixed_stream", "p0"), "rounds"] == 14
    assert named.loc[("best_fixed_domain", "p0"), "rounds"] == 10
    assert named.loc[("best_fixed_domain", "p1"), "rounds"] == 15
    assert named.loc[("fastest_fixed_stream", "p0"), "seconds"] == 17.0


def test_the_gap_is_that_between_the_generalist_and_the_best_fixed_arm_of_each_query():
    named = replayed.named_queries(queries_of(tables(), POOL), POOL, "a")
    gap = replayed.gap_closed(named, RESAMPLING).set_index(["selector", "metric"]).value
    # Generalist a: 36 s; the best fixed arm of each query: 12 + 18 = 30 s; ucb_bd: 35 s; the same 50 tokens.
    assert gap["best_fixed_query", "speed"] == pytest.approx(36 / 30 - 1)
    assert gap["ucb_bd", "speed"] == pytest.approx(36 / 35 - 1)
    assert gap["ucb_bd", "closed"] == pytest.approx((1 / 35 - 1 / 36) / (1 / 30 - 1 / 36))
    assert gap["fixed:b", "closed"] == pytest.approx((1 / 35 - 1 / 36) / (1 / 30 - 1 / 36))
