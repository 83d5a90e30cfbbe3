"""Stage replay_selectors: tallies and prices against a plain loop over episodes, streams, carry-over, bad input."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from scored import scored

from draftpool.artefacts import read_table, write_json, write_table
from draftpool.decoding.cost_model import load_costs
from draftpool.decoding.costs import selection_seconds
from draftpool.errors import DraftpoolError
from draftpool.replay.answers import lay_out
from draftpool.replay.engine import EpisodeDraws, replay
from draftpool.replay.run import replay_selectors, stream_prompts, with_sessions
from draftpool.selectors.base import arms_of, make_selector

POOL = ["a", "b", "c"]
COSTS = {
    "verify": {"1": 1.0, "4": 1.3},
    "draft": {"a": 0.1, "b": 0.2, "c": 0.15},
    "catch_up": {name: {"fixed": 0.01, "per_token": 0.001} for name in POOL},
    "evaluate": 0.35,
    "evaluate_catch_up": {"fixed": 0.02, "per_token": 0.003},
    "alone": [],
    "ahead": [],
    "positions": dict.fromkeys(POOL),
    "drafted": dict.fromkeys(POOL, 3.0),
    "select": {"bandit": 0.004, "full": 0.005},
    "memory": {name: {"weights": 100, "state": 2.0} for name in POOL},
}


def acceptance(answers: int = 6, tokens: int = 30, seed: int = 0) -> pd.DataFrame:
    """Random acceptance of the pool on answers of two domains."""
    rng = np.random.default_rng(seed)
    rows = []
    for answer in range(answers):
        n = tokens - answer
        for drafter in POOL:
            for position in range(n):
                left = n - position
                rows.append(
                    {
                        "prompt_id": f"p{answer}",
                        "domain": "xy"[answer % 2],
                        "repeat": 0,
                        "drafter": drafter,
                        "position": position,
                        "left": left,
                        "k": 3,
                        "accepted": min(int(rng.integers(0, 4)), left),
                        "gamma": rng.random(min(3, left)).astype(np.float32),
                        "reward_bd_full": rng.random() if answer < 4 else np.nan,
                    }
                )
    return scored(pd.DataFrame(rows))


@pytest.fixture
def world(tmp_path):
    """Folders of table, costs and answers (their prompt lengths)."""
    table = acceptance()
    write_table(tmp_path / "acceptance.parquet", table)
    (tmp_path / "costs").mkdir()
    write_json(tmp_path / "costs" / "costs.json", COSTS)
    prompts = pd.DataFrame(
        {"prompt_id": [f"p{n}" for n in range(6)], "prompt_ids": [[1] * (5 + n) for n in range(6)]}
    )
    write_table(tmp_path / "answers" / "responses.parquet", prompts)
    return tmp_path


def run(world: Path, selectors: dict, **changes) -> dict[str, pd.DataFrame]:
    """Run the stage and read its tables."""
    stream = {
        "domains": ["x", "y"],
        "prompts_per_domain": 2,
        "order": "shuffled",
        "seed": 1,
        "limit": 20,
        "seeds": 5,
    }
    cfg = {
        "pool": POOL,
        "homes": {"b": "x", "c": "y"},
        "pool_sizes": None,
        "generalist": "a",
        "selectors": selectors,
        "few": [],
        "few_seeds": 2,
        "streams": {"mixed": stream},
    }
    out = world / "replay"
    routes = world / "routes" if (world / "routes").exists() else None
    table, costs = world / "acceptance.parquet", world / "costs"
    replay_selectors(cfg | changes, table, costs, [world / "answers"], routes, out)
    return {kind: read_table(out / f"{kind}.parquet") for kind in ("answers", "arms", "curves", "oracles")}


def naive_seconds(arms, committed, evaluated, prompt: int, select: float) -> float:
    """The price list applied round by round to one episode."""
    place, total = prompt, 0.0
    read, evaluated_to = dict.fromkeys(POOL, 0), 0
    for arm, tokens, full in zip(arms, committed, evaluated, strict=True):
        total += COSTS["verify"]["4"] + select
        if full:
            total += COSTS["evaluate"] + 0.02 + 0.003 * (place - evaluated_to)
            evaluated_to = place
        else:
            total += COSTS["draft"][arm] + 0.01 + 0.001 * (place - read[arm])
            read[arm] = place
        place += tokens
    return total


@pytest.mark.parametrize(
    ("name", "cfg"),
    [
        ("ucb", {"kind": "metasd_ucb"}),
        ("hedge", {"kind": "hedgespec"}),
        ("every", {"kind": "hedgespec", "evaluate": "every", "every": 3}),
    ],
)
def test_tables_equal_a_loop_over_episodes(world, name, cfg):
    tables = run(world, {name: cfg})
    answers = lay_out(acceptance(), POOL, 20)
    own = tables["answers"][tables["answers"].selector == name].set_index("prompt_id")
    assert len(own) == 4 and (own.seeds == 5).all()
    arms = tables["arms"][tables["arms"].selector == name]
    curves = tables["curves"][tables["curves"].selector == name]
    for prompt, row in own.iterrows():
        place = answers.frame.index[answers.frame.prompt_id == prompt][0]
        totals, counts, reached = [], dict.fromkeys(POOL, 0), {}
        for seed in range(5):
            keys = [(seed, 0, prompt)]
            made = replay(make_selector(cfg, POOL), answers, np.array([place]), EpisodeDraws(keys, 4))
            played = [POOL[arm] for arm in made.arms[:, 0]]
            length = 5 + int(prompt[1:])
            select = COSTS["select"]["bandit" if name == "ucb" else "full"]
            seconds = naive_seconds(played, made.committed[:, 0], made.evaluated[:, 0], length, select)
            switches = sum(x != y for x, y in zip(played, played[1:], strict=False))
            totals.append([len(played), made.accepted.sum(), switches, made.evaluated.sum(), seconds])
            for arm in played:
                counts[arm] += 1
            done = np.cumsum(made.committed[:, 0])
            for n in curves[curves.prompt_id == prompt].n:
                reached.setdefault(n, []).append(int(np.searchsorted(done, n)) + 1)
        expected = np.mean(totals, axis=0)
        np.testing.assert_allclose(
            row[["rounds", "accepted", "switches", "evaluated", "seconds"]].astype(float), expected
        )
        assert row.rounds_sd == pytest.approx(np.std([t[0] for t in totals]))
        found = arms[arms.prompt_id == prompt].set_index("arm").rounds
        assert {arm: found[arm] * 5 for arm in POOL} == pytest.approx(counts)
        for line in curves[curves.prompt_id == prompt].itertuples():
            assert line.rounds == pytest.approx(np.mean(reached[line.n]))


def test_carried_weights_meet_the_prompts_in_the_stream_s_order(world):
    cfg = {"kind": "hedgespec", "carry": True}
    tables = run(world, {"carried": cfg})
    order = stream_prompts(
        with_sessions(acceptance()),
        {"domains": ["x", "y"], "prompts_per_domain": 2, "order": "shuffled", "seed": 1},
    )
    own = tables["answers"][tables["answers"].selector == "carried"].set_index("prompt_id")
    assert own.prompt_index.sort_values().index.tolist() == order
    answers = lay_out(acceptance(), POOL, 20)
    rounds = {prompt: [] for prompt in order}
    for seed in range(5):
        selector = make_selector(cfg, POOL)
        for place, prompt in enumerate(order):
            which = answers.frame.index[answers.frame.prompt_id == prompt].to_numpy()
            made = replay(selector, answers, which, EpisodeDraws([(seed, 0, prompt)], 4), resumed=place > 0)
            rounds[prompt].append(len(made.arms))
    for prompt in order:
        assert own.loc[prompt, "rounds"] == pytest.approx(np.mean(rounds[prompt]))


def test_plain_decoding_is_an_arm_of_cost_aware_selectors_only(world):
    assert arms_of({"kind": "cost_ucb"}, POOL) == ("a", "b", "c", "plain")
    assert arms_of({"kind": "metasd_ucb"}, POOL) == ("a", "b", "c")
    tables = run(world, {"costly": {"kind": "cost_ucb"}, "few": {"kind": "random"}}, few=["few"])
    arms = tables["arms"].groupby(["selector", "arm"]).rounds.sum().unstack()
    assert arms.loc["costly", "plain"] > 0 and np.isnan(arms.loc["few", "plain"])
    plain = tables["answers"][tables["answers"].selector == "plain"]
    np.testing.assert_allclose(plain.seconds, plain.rounds * (COSTS["verify"]["1"] + 0.004))
    assert (plain.rounds == plain.tokens).all()
    assert set(tables["answers"][tables["answers"].selector == "few"].seeds) == {2}


def test_bd_of_all_slots_is_replayed_where_the_target_read_the_drafts(world):
    """The drafts of p4 and p5 were not read to their ends: a stream that holds one has no such selector."""
    selectors = {"full": {"kind": "metasd_ucb", "reward": "bd_full"}, "ucb": {"kind": "metasd_ucb"}}
    blocks = {"domains": ["x", "y"], "order": "blocks", "seed": 0, "limit": None, "seeds": 5}
    streams = {"some": blocks | {"prompts_per_domain": 2}, "all": blocks | {"prompts_per_domain": None}}
    tables = run(world, selectors, streams=streams)
    played = tables["answers"].groupby("stream", observed=True).selector.unique()
    assert "full" in played["some"] and "full" not in played["all"] and "ucb" in played["all"]
    answers = lay_out(acceptance(), POOL)
    keys = [(0, 0, "p0")]
    made = replay(make_selector(selectors["full"], POOL), answers, np.array([0]), EpisodeDraws(keys, 4))
    # By hand: every arm once, then the largest mean of its own rewards plus bonus.
    place, total, count = 0, np.zeros(3), np.zeros(3)
    for t, arm in enumerate(made.arms[:, 0]):
        if t >= 3:
            index = total / count + 0.25 * np.sqrt(2 * np.log(t) / count)
            assert index[arm] == index.max()
        total[arm] += answers.reward_bd_full[place, arm]
        count[arm] += 1
        place += made.committed[t, 0]


def test_oracles_bound_every_selector(world):
    kinds = {"random": {"kind": "random"}, "ucb": {"kind": "metasd_ucb"}, "hedge": {"kind": "hedgespec"}}
    tables = run(world, kinds)
    both = tables["answers"].merge(tables["oracles"], on=["stream", "prompt_id", "domain", "repeat"])
    both = both[both.selector != "plain"]
    assert (both.rounds >= both.switching_rounds - 1e-9).all()
    assert (both.seconds >= both.switching_seconds).all()
    greedy = both.greedy_rounds * (0.1 + 0.2 + 0.15 + 3 * 1.3)
    np.testing.assert_allclose(both.ensemble_seconds, greedy)


def test_bad_input_is_told(world):
    with pytest.raises(DraftpoolError, match="only 3 scored prompts of x, 9 wanted"):
        stream = {
            "domains": ["x"],
            "prompts_per_domain": 9,
            "order": "blocks",
            "seed": 0,
            "limit": None,
            "seeds": 5,
        }
        run(world, {}, streams={"s": stream})
    with pytest.raises(DraftpoolError, match="no rows of d"):
        run(world, {}, pool=["a", "d"])
    answers = lay_out(acceptance(), POOL)
    write_json(world / "costs" / "costs.json", COSTS | {"draft": {"a": 0.1}})
    with pytest.raises(DraftpoolError, match="'b' was not measured.*profile_costs"):
        load_costs(world / "costs", tuple(POOL), answers.k)


def test_selection_is_timed_for_bandits_and_full_information():
    lengths = np.array([3, 3, 3])
    for cfg in ({"kind": "metasd_ucb"}, {"kind": "hedgespec", "estimator": "soft"}, {"kind": "router"}):
        assert 0.0 < selection_seconds(cfg, POOL, lengths, 5) < 0.1


def test_routers_play_the_specialist_of_the_prompt_s_domain(world):
    (world / "routes").mkdir()
    rows = [
        f"p{n},{'xy'[n % 2]},{kind},{route},0.9"
        for n in range(6)
        for kind, route in (("tfidf", "xy"[n % 2]), ("hidden", "z"))
    ]
    header = "prompt_id,domain,features,route,probability"
    (world / "routes" / "routes.csv").write_text("\n".join([header, *rows]) + "\n")
    kinds = {kind: {"kind": "router", "features": kind} for kind in ("tfidf", "hidden")}
    arms = run(world, kinds)["arms"]
    played = arms[arms.rounds > 0]
    for row in played[played.selector == "tfidf"].itertuples():
        assert row.arm == {"x": "b", "y": "c"}[row.domain]
    # A domain without a specialist goes to the generalist.
    assert set(played[played.selector == "hidden"].arm) == {"a"}
    (world / "routes" / "routes.csv").write_text("\n".join([header, *rows[:2]]) + "\n")
    with pytest.raises(DraftpoolError, match="a prompt has no route"):
        run(world, kinds)


def test_convergence_needs_ten_rounds_of_a_best_arm(world):
    """Against a loop: round-robin plays a best arm with all seeds now and then, which is no convergence."""
    kinds = {"turns": {"kind": "round_robin"}, "ucb": {"kind": "metasd_ucb", "beta": 0.05}}
    tables = run(world, kinds | {"best": {"kind": "fixed", "arm": "b"}})
    answers = lay_out(acceptance(), POOL, 20)
    own = tables["answers"].set_index(["selector", "prompt_id"])
    assert not own.loc["turns"].reached.any()
    for prompt in own.loc["ucb"].index:
        place = answers.frame.index[answers.frame.prompt_id == prompt][0]
        fixed = []
        for arm in POOL:
            made = replay(
                make_selector({"kind": "fixed", "arm": arm}, POOL), answers, np.array([place]),
                EpisodeDraws([(0, 0, prompt)], 4),
            )  # fmt: skip
            fixed.append(len(made.arms))
        best = [arm for arm in range(3) if fixed[arm] == min(fixed)]
        plays = [
            replay(
                make_selector(kinds["ucb"], POOL), answers, np.array([place]), EpisodeDraws([(seed, 0, prompt)], 4)
            ).arms[:, 0]
            for seed in range(5)
        ]  # fmt: skip
        expected = np.mean([len(arms) for arms in plays])
        reached = False
        for t in range(max(map(len, plays)) - 9):
            window = np.concatenate([arms[t : t + 10] for arms in plays])
            if np.isin(window, best).mean() >= 0.9:
                expected, reached = t, True
                break
        row = own.loc[("ucb", prompt)]
        assert row.reached == reached and row.converged == pytest.approx(expected)
        assert own.loc[("best", prompt)].reached == (1 in best and min(fixed) >= 10)


def _session(lengths: tuple[int, ...], seed: int = 0) -> pd.DataFrame:
    """Random acceptance of one session whose turns have so many tokens after the prefill token."""
    rng = np.random.default_rng(seed)
    rows = []
    for turn, n in enumerate(lengths):
        for drafter in POOL:
            for position in range(n):
                left = n - position
                row = {"prompt_id": f"s.{turn}", "domain": "talks", "repeat": 0, "drafter": drafter}
                row |= {"position": position, "left": left, "k": 3}
                row |= {"accepted": min(int(rng.integers(0, 4)), left)}
                rows.append(
                    row | {"gamma": rng.random(min(3, left)).astype(np.float32), "reward_bd_full": np.nan}
                )
    return scored(pd.DataFrame(rows))


@pytest.mark.parametrize("lengths", [(9, 6, 11), (0, 7), (5, 0, 6)])
@pytest.mark.parametrize("cfg", [{"kind": "metasd_ucb"}, {"kind": "hedgespec"}], ids=lambda cfg: cfg["kind"])
def test_every_turn_of_a_session_is_read_anew(world, lengths, cfg):
    """Seconds of a session are those of its turns, each with its own prompt, for one learner that goes on.

    A turn of no anchor (an answer of one token) has no rounds.
    """
    table, prompts = _session(lengths), [7, 30, 55][: len(lengths)]
    write_table(world / "acceptance.parquet", table)
    answers = pd.DataFrame(
        {"prompt_id": [f"s.{t}" for t in range(len(lengths))], "prompt_ids": [[1] * n for n in prompts]}
    )
    write_table(world / "answers" / "responses.parquet", answers)
    stream = {"domains": ["talks"], "prompts_per_domain": None, "order": "blocks", "seed": 0}
    tables = run(world, {"learner": cfg}, streams={"talks": stream | {"limit": None, "seeds": 1}})
    own = tables["answers"][tables["answers"].selector == "learner"]
    assert own.prompt_id.tolist() == ["s"] and own.tokens.tolist() == [sum(lengths)]
    laid_out = lay_out(table, POOL)
    made = replay(make_selector(cfg, POOL), laid_out, np.array([0]), EpisodeDraws([(0, 0, "s")], 4))
    done, first, total = 0, 0, 0.0
    select = COSTS["select"]["bandit" if cfg["kind"] == "metasd_ucb" else "full"]
    ends = np.cumsum(made.committed[:, 0])
    for turn, n in enumerate(lengths):
        done += n
        last = int(np.searchsorted(ends, done)) + 1 if n else first
        assert n == 0 or ends[last - 1] == done, "no draft reaches beyond its turn"
        rounds = slice(first, last)
        arms = [POOL[arm] for arm in made.arms[rounds, 0]]
        total += naive_seconds(
            arms, made.committed[rounds, 0], made.evaluated[rounds, 0], prompts[turn], select
        )
        first = last
    assert own.seconds.iloc[0] == pytest.approx(total)
