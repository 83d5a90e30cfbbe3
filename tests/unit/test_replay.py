"""Replay is live decoding: the same arms, accepted and committed tokens, round by round."""

from __future__ import annotations

from functools import cache

import numpy as np
import pandas as pd
import pytest
from scripted import run
from selector_kinds import KINDS, context_of, label
from tiny import TAPS, load

from draftpool.artefacts import read_table
from draftpool.decoding.verification import target_probabilities
from draftpool.drafters.block_live import BlockDrafter, load_model
from draftpool.drafters.load import draft_everywhere
from draftpool.errors import DraftpoolError
from draftpool.replay.answers import lay_out
from draftpool.replay.engine import EpisodeDraws, replay
from draftpool.replay.score import mean_overlap, read_answer, read_drafts
from draftpool.replay.scored_rows import rows_of_draft
from draftpool.selectors.base import make_selector

# The seed of the sampled text that run() uses.
LIMIT, ENDS, SEED, ANSWERS = 16, (2,), 3, 4


class _Hashable:
    """A world as a key of the cache."""

    def __init__(self, world):
        self.target, self.drafters, self.train = world.target, world.drafters, world.train

    def __eq__(self, other):
        return self.target == other.target

    def __hash__(self):
        return hash(self.target)


@cache
def _live_world(world, temperature):
    """Target, arms (plain among them), prompts and the acceptance table of the texts that plain decoding writes."""
    target = load(world.target, TAPS)
    arms = {path.name: BlockDrafter(path.name, load_model(path, target)) for path in world.drafters}
    rows, answers = [], read_table(world.train[0] / "responses.parquet")
    prompts = [[int(token) for token in ids] for ids in answers.prompt_ids[:ANSWERS]]
    for number, prompt in enumerate(prompts):
        text = run(
            target, prompt, {"plain": None}, limit=LIMIT, ends=ENDS, temperature=temperature, room=8
        ).tokens
        taps, logits = read_answer(target, prompt, text)
        for name, drafter in arms.items():
            drafter.reset(len(prompt) + len(text))
            made = draft_everywhere(drafter, prompt, text, taps)
            full = mean_overlap(made, read_drafts(target, prompt, text)(made.ids))
            p = target_probabilities(logits, None)
            head = {"prompt_id": str(number), "domain": "d", "repeat": SEED, "drafter": name}
            rows += [head | row for row in rows_of_draft(made, text, p, p[:, made.vocabulary], full)]
    return target, arms | {"plain": None}, prompts, pd.DataFrame(rows)


@pytest.fixture(params=["llama_world-0.0", "llama_world-1.0", "qwen3_world-0.0"])
def live_world(request):
    name, temperature = request.param.split("-")
    return *_live_world(_Hashable(request.getfixturevalue(name)), float(temperature)), float(temperature)


@pytest.mark.parametrize("cfg", KINDS, ids=label)
def test_replay_equals_live_decoding_round_by_round(live_world, cfg) -> None:
    target, arms, prompts, table, temperature = live_world
    answers = lay_out(table, list(arms), LIMIT)
    k_pool = max(drafter.k for drafter in arms.values() if drafter is not None)
    accepted = 0
    # run() calls every prompt "p" and uses selector seed 0.
    uniforms = EpisodeDraws([(0, SEED, "p")] * len(prompts), len(arms) + 1)
    made = replay(
        make_selector(cfg, list(arms)), answers, np.arange(len(prompts)), uniforms, context_of(4, ANSWERS)
    )
    for number, prompt in enumerate(prompts):
        live = run(
            target, prompt, arms, cfg, limit=LIMIT, ends=ENDS, temperature=temperature, k_pool=k_pool,
            context=context_of(4, 1),
        ).rounds  # fmt: skip
        assert len(live) == made.rounds[number]
        for t, row in enumerate(live):
            where = (number, t)
            assert row["arm"] == list(arms)[made.arms[t, number]], where
            assert row["n_accepted"] == made.accepted[t, number], where
            assert row["n_committed"] == made.committed[t, number], where
            assert row["evaluated"] == made.evaluated[t, number], where
            assert row["propensity"] == pytest.approx(made.propensity[t, number], abs=1e-4), where
            accepted += row["n_accepted"]
    # The router is sent to plain decoding, and few sampled tokens are guessed.
    assert accepted > 0 or temperature > 0.0 or cfg["kind"] == "router"


def _table(accepted: dict[str, list[int]], k: int = 3) -> pd.DataFrame:
    rows = []
    for drafter, lengths in accepted.items():
        n = len(lengths)
        for position, length in enumerate(lengths):
            left = n - position
            row = {"prompt_id": "a", "domain": "d", "repeat": 0, "drafter": drafter, "position": position}
            rows.append(
                row | {"left": left, "k": k, "accepted": min(length, left), "gamma": [0.5] * min(k, left)}
            )
    return pd.DataFrame(rows)


def test_losses_come_when_the_text_shows_them() -> None:
    """Arm `b` accepts 2: known after 3 tokens of text; the end leaves later rounds unknown for ever."""
    answers = lay_out(_table({"a": [0, 0, 0, 0, 0, 0], "b": [2, 2, 3, 3, 2, 1]}), ["a", "b"])
    assert answers.need.tolist() == [3, 3, 3, 3, 3, 2]
    seen = []

    class Watch(type(make_selector({"kind": "hedgespec"}, ["a", "b"]))):
        def choose(self, t, available, draws):
            super().choose(t, available, draws)
            return np.zeros(1, dtype=np.int64), np.ones(1)

        def learn(self, arms, feedback):
            done = feedback.completed
            seen.append([] if done is None else list(zip(done.round, done.loss[:, 1], strict=True)))
            super().learn(arms, feedback)

    made = replay(Watch(["a", "b"]), answers, np.array([0]), EpisodeDraws([(0, 0, "a")], 3))
    assert made.rounds.tolist() == [6]
    assert seen == [[], [], [(0, 0.25)], [(1, 0.25)], [(2, 0.0)], [(3, 0.0)]]


def test_a_shorter_limit_cuts_answers() -> None:
    answers = lay_out(_table({"a": [3, 3, 3, 3, 3, 3]}), ["a"], limit=6)
    assert answers.tokens.tolist() == [5]
    made = replay(
        make_selector({"kind": "random"}, ["a"]), answers, np.array([0]), EpisodeDraws([(0, 0, "a")], 2)
    )
    assert made.committed[:, 0].tolist() == [4, 1]
    assert made.accepted[:, 0].tolist() == [3, 1]


def test_bad_tables_are_refused() -> None:
    table = _table({"a": [1, 1, 1], "b": [0, 0, 0]})
    with pytest.raises(DraftpoolError, match="no rows of c"):
        lay_out(table, ["a", "c"])
    with pytest.raises(DraftpoolError, match="not every drafter was scored"):
        lay_out(table[~((table.drafter == "b") & (table.position == 1))], ["a", "b"])
    wrong = table.assign(gamma=[[float("nan")] * len(g) for g in table.gamma])
    with pytest.raises(DraftpoolError, match=r"acceptance probability nan is not in \[0, 1\]"):
        lay_out(wrong, ["a", "b"])


def test_episodes_do_not_depend_on_their_neighbours() -> None:
    rng = np.random.default_rng(0)
    table = _table({name: rng.integers(0, 4, 50).tolist() for name in "abc"})
    answers = lay_out(table, list("abc"))
    keys = [(seed, 0, "a") for seed in range(9)]
    for cfg in ({"kind": "hedgespec"}, {"kind": "metasd_ucb"}):
        together = replay(make_selector(cfg, "abc"), answers, np.zeros(9, int), EpisodeDraws(keys, 4))
        for s in (0, 5):
            alone = replay(make_selector(cfg, "abc"), answers, np.zeros(1, int), EpisodeDraws([keys[s]], 4))
            np.testing.assert_array_equal(alone.arms[:, 0], together.arms[: len(alone.arms), s])
    assert len({tuple(column) for column in together.arms.T}) > 1
