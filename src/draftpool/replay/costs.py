"""The price of replayed rounds, from measured costs and never from a clock."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from draftpool.decoding.cost_model import CostModel
from draftpool.replay.answers import Answers
from draftpool.replay.engine import Replayed
from draftpool.selectors.base import Floats, Ints


class Seconds(NamedTuple):
    """Modelled decoding seconds of every episode, and what evaluation and catching up take of them, float[E] each."""

    total: Floats
    evaluation: Floats
    catch_up: Floats


def price(
    costs: CostModel, played: Replayed, answers: Answers, which: Ints, prompt_tokens: Ints, needs: str
) -> Seconds:
    """Price replayed episodes.

    An arm reads what was committed since it was played last, the whole prompt the first time in each turn. The target
    reads as many tokens as were drafted and the anchor. An evaluated round pays for all drafters instead of one draft.
    The target's prefill is left out, as in live decoding.

    Args:
        costs: Of the arms.
        played: Rounds of the episodes.
        answers: What they were played on.
        which: int[E], answers of the episodes.
        prompt_tokens: int[A, turns], prompt lengths.
        needs: What the selector needs, `bandit` or `full`; its selection time is charged.
    """
    episodes = len(which)
    rows = np.arange(episodes)
    position = np.zeros(episodes, dtype=np.int64)
    base, last = which * answers.length, answers.tokens[which] - 1
    # Not always turn 0: an answer of one token has no round.
    turn = answers.turn[base]
    place = prompt_tokens[which, turn].astype(np.float64)
    read = np.zeros((episodes, len(costs.arms)))
    evaluated_to = np.zeros(episodes)
    total, evaluation, catch_up = np.zeros(episodes), np.zeros(episodes), np.zeros(episodes)
    # Tokens behind an arm's last anchor that it read while drafting and that came true.
    before, kept = np.full(episodes, -1), np.zeros(episodes)
    rounds = zip(played.arms, played.drafted, played.committed, played.evaluated, strict=True)
    for arms, drafted, committed, evaluated in rounds:
        active = arms >= 0
        arm = np.where(active, arms, 0)
        unread = place - read[rows, arm] - np.where(arm == before, kept, 0.0)
        alone = np.where(unread > 0, costs.catch_up[arm, 0] + costs.catch_up[arm, 1] * unread, 0.0)
        all_read = costs.evaluate_catch_up[0] + costs.evaluate_catch_up[1] * (place - evaluated_to)
        if costs.alone.any():
            lines = costs.catch_up[costs.alone]
            behind = place[:, None] - read[:, costs.alone]
            all_read = all_read + (lines[:, 0] + lines[:, 1] * behind).sum(axis=1)
        reading = np.where(evaluated, all_read, alone)
        together = costs.evaluate + all_read
        drafting = np.where(evaluated, together, costs.draft[arm] + alone)
        catch_up += np.where(active, reading, 0.0)
        total += np.where(
            active, costs.widths[np.maximum(drafted, 0) + 1] + drafting + costs.select[needs], 0.0
        )
        evaluation += np.where(active & evaluated, together - costs.draft[arm], 0.0)
        evaluated_to = np.where(active & evaluated, place, evaluated_to)
        if costs.alone.any():
            told = active & evaluated
            read[np.ix_(told, costs.alone)] = place[told, None]
        # The anchor and all drafted tokens but the last were read.
        ahead = costs.ahead[arm] & ~evaluated
        before, kept = np.where(ahead, arm, -1), np.minimum(committed, np.maximum(drafted, 0))
        chosen = active & ~evaluated
        read[rows[chosen], arm[chosen]] = place[chosen]
        position = position + np.where(active, committed, 0)
        place = place + np.where(active, committed, 0)
        now = answers.turn[base + np.minimum(position, last)]
        if (now != turn).any():
            # A turn's prompt is read from its beginning, as live decoding does.
            new = now != turn
            place[new] = prompt_tokens[which[new], now[new]]
            read[new], evaluated_to[new], turn = 0.0, 0.0, now
            before[new] = -1
    return Seconds(total, evaluation, catch_up)
