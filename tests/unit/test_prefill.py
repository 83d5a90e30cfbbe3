"""HedgeSpec's losses as published, against a loop over one episode that knows the formulas alone."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
import pytest
from scored import scored

from draftpool.config.stages import check_kinds
from draftpool.errors import DraftpoolError
from draftpool.replay.answers import lay_out
from draftpool.replay.engine import EpisodeDraws, replay
from draftpool.replay.prefill import prefill_losses
from draftpool.selectors.base import make_selector

ARMS, K = ["a", "b", "c", "plain"], {"a": 3, "b": 2, "c": 3}


def table(answers: int = 5, tokens: int = 26, seed: int = 0) -> pd.DataFrame:
    """Random acceptance, sessions of two turns among the answers."""
    rng = np.random.default_rng(seed)
    rows = []
    for answer in range(answers):
        for turn in range(1 + answer % 2):
            n = tokens - 3 * answer - 5 * turn
            prompt = f"p{answer}.{turn}" if answer % 2 else f"p{answer}"
            for drafter, k in K.items():
                for position in range(n):
                    left = n - position
                    gamma = rng.random(min(k, left)).astype(np.float32)
                    row = {"prompt_id": prompt, "domain": "d", "repeat": 0, "drafter": drafter, "left": left}
                    row |= {"position": position, "k": k, "gamma": gamma, "reward_bd_full": np.nan}
                    rows.append(row | {"accepted": min(int(rng.integers(0, k + 1)), left)})
    return scored(pd.DataFrame(rows))


def loss_of(step: list[float], k: int, k_pool: int) -> float:
    """1 - AL / (K + 1) with AL = sum_{m} m (1 - g_m) prod_{j < m} g_j, g_{k + 1} = 0 (notes 2.3 and 2.4)."""
    gamma = [*step[:k], 0.0]
    length = 0.0
    for m in range(1, k + 2):
        length += m * (1 - gamma[m - 1]) * math.prod(gamma[: m - 1])
    return 1 - length / (k_pool + 1)


@pytest.mark.parametrize("soft", [True, False])
def test_losses_are_those_of_the_paper_s_formula(soft):
    answers = lay_out(table(), ARMS)
    losses, complete = prefill_losses(answers, soft)
    checked = 0
    for row, tokens in enumerate(answers.tokens):
        for position in range(tokens):
            cell = row * answers.length + position
            assert complete[cell] == (answers.left[cell] >= 3)
            if not complete[cell]:
                continue
            for arm, name in enumerate(ARMS):
                ahead = range(cell, cell + 3)
                step = [
                    float(answers.gamma[c, arm, 0]) if soft else float(answers.accepted[c, arm] > 0)
                    for c in ahead
                ]
                assert losses[cell, arm] == pytest.approx(loss_of(step, K.get(name, 0), 3), abs=1e-6)
                checked += 1
    assert checked > 200


@pytest.mark.parametrize("soft", [True, False])
def test_hedge_on_published_losses_equals_a_loop_over_one_episode(soft):
    answers = lay_out(table(), ARMS)
    losses, complete = prefill_losses(answers, soft)
    cfg = {"kind": "hedgespec", "loss": "prefill", "learner": "hedge"}
    cfg |= {"estimator": "soft" if soft else "indicator"}
    which = np.repeat(np.arange(len(answers.tokens)), 3)
    keys = [(seed, 0, str(row)) for row, seed in zip(which, np.tile(np.arange(3), 5), strict=True)]
    played = replay(make_selector(cfg, ARMS), answers, which, EpisodeDraws(keys, len(ARMS) + 1))
    delivered = 0
    for episode, row in enumerate(which):
        uniforms, total, received, position, told = EpisodeDraws([keys[episode]], 5), np.zeros(4), 0, 0, 0
        for t in range(1000):
            if position >= answers.tokens[row]:
                break
            eta = math.sqrt(8 * math.log(4) / max(1, received))
            weights = np.exp(-eta * (total - total.min()))
            threshold = uniforms.round(t)[0, 0] * weights.sum()
            arm = int(np.count_nonzero(np.cumsum(weights) <= threshold))
            assert played.arms[t, episode] == arm
            position += int(answers.committed[row * answers.length + position, arm])
            while told + 3 <= position:
                cell = row * answers.length + told
                if complete[cell]:
                    total, received, delivered = total + losses[cell], received + 1, delivered + 1
                told += 1
        assert t == (played.arms[:, episode] >= 0).sum()
    assert delivered > 100


def test_normal_hedge_charges_the_weights_of_the_round_that_wrote_the_token():
    """Every start's loss goes against the weights of its own round, and the learner runs to the end."""
    answers = lay_out(table(), ARMS)
    selector = make_selector({"kind": "hedgespec", "loss": "prefill"}, ARMS)
    rounds: list[np.ndarray] = []
    add = selector._add

    def watched(episode, number, loss):
        rounds.append(number.copy())
        add(episode, number, loss)

    selector._add = watched
    played = replay(selector, answers, np.array([0]), EpisodeDraws([(0, 0, "p")], 5))
    expected = []
    position = 0
    for t, committed in enumerate(played.committed[:, 0]):
        expected += [t] * int(committed)
        position += int(committed)
    # The last K - 1 starts are never complete.
    assert np.concatenate(rounds).tolist() == expected[: position - 2]


def test_where_published_losses_mean_nothing_they_are_refused():
    from test_recipes import plan_of

    with pytest.raises(DraftpoolError, match="prefill reads every committed token"):
        make_selector({"kind": "hedgespec", "loss": "prefill", "evaluate": "skip"}, ARMS)
    prefill = {"kind": "hedgespec", "loss": "prefill"}
    with pytest.raises(DraftpoolError, match="selectors.published.*replayed only"):
        check_kinds(plan_of({"selectors": {"published": prefill}}))
    replayed = {"replay": {"selectors": {"published": prefill}}}
    sequential = {
        "drafters": ["head-s0", "black-s0", "lookup", "plain"], "generalist": "head-s0", "selectors": "all"
    }  # fmt: skip
    plan = plan_of(replayed | {"pools": {"sequential": sequential}})
    replays = [set(replay.cfg["selectors"]) for replay in plan.by_stage()["replay_selectors"].values()]
    # The main pool and `kinds` hold block drafters.
    assert ["published" in names for names in replays] == [False, False, True]
    with pytest.raises(DraftpoolError, match="pools.kinds.selectors.*nothing of the later slots"):
        plan_of(replayed | {"pools": {"kinds": {"selectors": ["published"]}}}).by_stage()
