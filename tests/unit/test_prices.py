"""Prices of replayed rounds against a loop over one episode: drafters that read ahead, draft little or do not fit."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from scored import scored

from draftpool.decoding.cost_model import CostModel
from draftpool.decoding.costs import longest_fit, mean_drafted
from draftpool.replay.answers import lay_out
from draftpool.replay.costs import price
from draftpool.replay.engine import EpisodeDraws, replay
from draftpool.replay.oracles import best_switching_cost
from draftpool.replay.scored_rows import rows_without_draft
from draftpool.selectors.base import make_selector

ARMS = ("block", "reader", "lookup", "plain")
K = {"block": 3, "reader": 2, "lookup": 3}
PROMPTS = np.array([[7], [12], [30]])


def table(seed: int = 0) -> pd.DataFrame:
    """Random acceptance; the lookup drafts 0 to 3 tokens."""
    rng, rows = np.random.default_rng(seed), []
    for answer in range(3):
        n = 24 - 4 * answer
        for drafter, k in K.items():
            for position in range(n):
                left = n - position
                drafted = int(rng.integers(0, k + 1)) if drafter == "lookup" else k
                gamma = rng.random(min(drafted, left)).astype(np.float32)
                row = {"prompt_id": f"p{answer}", "domain": "d", "repeat": 0, "drafter": drafter}
                row |= {"position": position, "left": left, "k": k, "gamma": gamma, "reward_bd_full": np.nan}
                accepted = min(int(rng.integers(0, drafted + 1)), left)
                rows.append(row | {"accepted": accepted, "length": drafted})
    made = scored(pd.DataFrame(rows))
    return made.assign(drafted=made["length"], modelled=made["drafter"] != "lookup").drop(columns="length")


def costs(alone: list[bool]) -> CostModel:
    return CostModel(
        arms=ARMS,
        verify=np.array([1.4, 1.3, 1.4, 1.0]),
        widths=np.array([np.nan, 1.0, 1.2, 1.3, 1.4]),
        draft=np.array([0.1, 0.3, 0.01, 0.0]),
        catch_up=np.array([[0.02, 0.001], [0.05, 0.004], [0.001, 0.0], [0.0, 0.0]]),
        evaluate=0.5,
        evaluate_catch_up=np.array([0.03, 0.002]),
        alone=np.array(alone),
        ahead=np.array([False, True, False, False]),
        drafted=np.array([3.0, 2.0, 1.0, 0.0]),
        positions=np.full(4, np.iinfo(np.int64).max),
        select={"bandit": 0.004, "full": 0.006},
    )


def naive(model: CostModel, played, episode: int, prompt: int, needs: str) -> float:
    """Round by round, from what each drafter has read."""
    place, together, total, last = prompt, 0, 0.0, None
    read = dict.fromkeys(range(4), 0)
    for t in range(len(played.arms)):
        arm = int(played.arms[t, episode])
        if arm < 0:
            break
        drafted, committed = int(played.drafted[t, episode]), int(played.committed[t, episode])
        total += model.widths[drafted + 1] + model.select[needs]
        if played.evaluated[t, episode]:
            line = model.evaluate_catch_up
            total += model.evaluate + line[0] + line[1] * (place - together)
            together = place
            for other in np.flatnonzero(model.alone):
                total += model.catch_up[other] @ [1.0, place - read[other]]
                read[other] = place
            last = None
        else:
            unread = place - read[arm]
            if last is not None and last[0] == arm and model.ahead[arm]:
                # The anchor and all drafted tokens but the last are in its cache, as far as they came true.
                unread -= min(last[1], last[2])
            if unread > 0:
                total += model.catch_up[arm] @ [1.0, unread]
            total += model.draft[arm]
            read[arm], last = place, (arm, committed, drafted)
        place += committed
    return total


@pytest.mark.parametrize("alone", [[False, False, False, False], [False, True, True, False]])
@pytest.mark.parametrize(
    "cfg",
    [
        {"kind": "random"},
        {"kind": "fixed", "arm": "reader"},
        {"kind": "fixed", "arm": "lookup"},
        {"kind": "hedgespec"},
        {"kind": "hedgespec", "evaluate": "every", "every": 3},
    ],
)
def test_seconds_equal_a_loop_over_the_rounds(cfg, alone) -> None:
    answers, model = lay_out(table(), ARMS), costs(alone)
    which = np.repeat(np.arange(3), 4)
    keys = [(seed, 0, str(row)) for row, seed in zip(which, np.tile(np.arange(4), 3), strict=True)]
    selector = make_selector(cfg, ARMS)
    played = replay(selector, answers, which, EpisodeDraws(keys, 5))
    seconds = price(model, played, answers, which, PROMPTS, selector.needs)
    for episode, row in enumerate(which):
        expected = naive(model, played, episode, int(PROMPTS[row, 0]), selector.needs)
        assert seconds.total[episode] == pytest.approx(expected)


def test_a_round_of_mean_length_is_what_learners_on_seconds_read() -> None:
    rounds = costs([False] * 4).rounds
    # The reader knows what it committed; the lookup drafts one token on average.
    assert rounds == pytest.approx([1.4 + 0.1 + 0.02 + 2 * 0.001, 1.3 + 0.3, 1.2 + 0.01 + 0.001, 1.0])


def test_the_cheapest_switching_sequence_is_a_bound_for_drafts_of_any_length() -> None:
    answers, model = lay_out(table(), ARMS), costs([False] * 4)
    per_round = answers.by_left(model.widths[answers.drafted + 1] + model.draft, 0.0)
    bound = best_switching_cost(answers.committed_by_left(), per_round)[np.arange(3), answers.tokens]
    for arm in ARMS:
        which = np.arange(3)
        played = replay(
            make_selector({"kind": "fixed", "arm": arm}, ARMS),
            answers,
            which,
            EpisodeDraws([(0, 0, str(row)) for row in which], 5),
        )
        seconds = price(model, played, answers, which, PROMPTS, "bandit")
        assert (bound <= seconds.total).all()
    # With one cost per arm it is what it was.
    flat = np.array([1.0, 2.0, 3.0, 4.0])
    committed = answers.committed_by_left()
    spread = np.broadcast_to(flat[None, :, None], committed.shape)
    np.testing.assert_allclose(best_switching_cost(committed, spread), best_switching_cost(committed, flat))


def test_a_drafter_that_does_not_fit_is_replayed_as_plain_steps() -> None:
    rows = table()
    gone = (rows["drafter"] == "block") & (rows["prompt_id"] == "p1")
    head = rows[gone][["prompt_id", "domain", "repeat", "drafter"]].reset_index(drop=True)
    nothing = pd.DataFrame(rows_without_draft(len(head) + 1, 3))
    answers = lay_out(pd.concat([rows[~gone], pd.concat([head, nothing], axis=1)]), ARMS)
    which, draws = np.arange(3), EpisodeDraws([(0, 0, str(row)) for row in range(3)], 5)
    fixed = replay(make_selector({"kind": "fixed", "arm": "block"}, ARMS), answers, which, draws)
    assert (fixed.drafted[:20, 1] == 0).all() and fixed.rounds[1] == 20
    for cfg in ({"kind": "random"}, {"kind": "hedgespec"}, {"kind": "metasd_ucb"}, {"kind": "round_robin"}):
        played = replay(make_selector(cfg, ARMS), answers, which, draws)
        assert not (played.arms[:, 1] == 0).any() and (played.arms[:, 0] == 0).any()
    # The same by positions, of the answer's arms alone.
    unfit = np.zeros(answers.available.shape, dtype=bool)
    unfit[answers.length : 2 * answers.length, 0] = True
    whole = lay_out(rows, ARMS)
    again = whole.without(unfit & (whole.left > 0)[:, None])
    for name in ("available", "accepted", "committed", "drafted", "need"):
        np.testing.assert_array_equal(getattr(again, name), getattr(answers, name), err_msg=name)


class Bounded:
    """A drafter with so many positions."""

    modelled, k = True, 2

    def __init__(self, positions: int):
        self.positions = positions

    def fits(self, length: int) -> bool:
        return length <= self.positions


def test_positions_are_found_without_asking_the_kind() -> None:
    for positions in (1, 2, 63, 64, 8191):
        assert longest_fit(Bounded(positions)) == positions
    assert longest_fit(Bounded(2**30)) is None
    assert mean_drafted(Bounded(5), [1], [2, 3], None) == 2.0
