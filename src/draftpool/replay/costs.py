"""The price of replayed rounds, from the frozen `profile_costs` artefact and never from a clock."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from draftpool.artefacts import read_json
from draftpool.errors import DraftpoolError
from draftpool.replay.answers import Answers
from draftpool.replay.engine import Replayed
from draftpool.selectors.base import PLAIN, Floats, Ints


class Seconds(NamedTuple):
    """Modelled decoding seconds of every episode, and what evaluation and catching up take of them, float[E] each."""

    total: Floats
    evaluation: Floats
    catch_up: Floats


@dataclass(frozen=True)
class CostModel:
    """Seconds of the parts of a round for the arms of a pool (see :func:`draftpool.decoding.costs.profile_costs`).

    Attributes:
        arms: Names, `plain` for plain decoding.
        verify: float[N], the target reads the arm's block.
        draft: float[N], 0 for plain decoding.
        catch_up: float[N, 2], seconds of a catch-up and of each token in it.
        evaluate: All drafters at one anchor.
        evaluate_catch_up: float[2], the same for the evaluation.
        select: Seconds of selection per round, by what a selector needs (`bandit`, `full`).
    """

    arms: tuple[str, ...]
    verify: Floats
    draft: Floats
    catch_up: Floats
    evaluate: float
    evaluate_catch_up: Floats
    select: Mapping[str, float]

    @property
    def rounds(self) -> Floats:
        """Seconds of a plain round with each arm [N]: draft and verify, with a catch-up of one mean commitment."""
        return self.verify + self.draft + self.catch_up @ np.array([1.0, 2.0])

    def seconds(
        self, played: Replayed, answers: Answers, which: Ints, prompt_tokens: Ints, needs: str
    ) -> Seconds:
        """Price replayed episodes.

        An arm reads what was committed since it was played last, the whole prompt the first time in each turn. An
        evaluated round pays for all drafters instead of one draft. The target's prefill is left out, as in live
        decoding.

        Args:
            played: Rounds of the episodes.
            answers: What they were played on.
            which: int[E], answers of the episodes.
            prompt_tokens: int[A, turns], prompt lengths.
            needs: What the selector needs, `bandit` or `full`; its selection time is charged.
        """
        episodes = len(which)
        rows = np.arange(episodes)
        position, turn = np.zeros(episodes, dtype=np.int64), np.zeros(episodes, dtype=np.int64)
        base, last = which * answers.length, answers.tokens[which] - 1
        place = prompt_tokens[which, 0].astype(np.float64)
        read = np.zeros((episodes, len(self.arms)))
        evaluated_to = np.zeros(episodes)
        total, evaluation, catch_up = np.zeros(episodes), np.zeros(episodes), np.zeros(episodes)
        for arms, committed, evaluated in zip(played.arms, played.committed, played.evaluated, strict=True):
            active = arms >= 0
            arm = np.where(active, arms, 0)
            unread = place - read[rows, arm]
            alone = self.catch_up[arm, 0] + self.catch_up[arm, 1] * unread
            all_read = self.evaluate_catch_up[0] + self.evaluate_catch_up[1] * (place - evaluated_to)
            reading = np.where(evaluated, all_read, alone)
            together = self.evaluate + all_read
            drafting = np.where(evaluated, together, self.draft[arm] + alone)
            catch_up += np.where(active, reading, 0.0)
            total += np.where(active, self.verify[arm] + drafting + self.select[needs], 0.0)
            evaluation += np.where(active & evaluated, together - self.draft[arm], 0.0)
            evaluated_to = np.where(active & evaluated, place, evaluated_to)
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
        return Seconds(total, evaluation, catch_up)


def load_costs(folder: Path, arms: tuple[str, ...], k: Ints) -> CostModel:
    """Read `costs.json` for the arms of a pool.

    Raises:
        DraftpoolError: If a drafter or a block width was not measured.
    """
    raw: dict[str, Any] = read_json(folder / "costs.json")
    try:
        verify = np.array([raw["verify"][str(int(length) + 1)] for length in k])
        draft = np.array([0.0 if arm == PLAIN else raw["draft"][arm] for arm in arms])
        lines = [{"fixed": 0.0, "per_token": 0.0} if arm == PLAIN else raw["catch_up"][arm] for arm in arms]
    except KeyError as error:
        raise DraftpoolError(
            f"{error} was not measured", str(folder), "run profile_costs for this pool again"
        ) from None
    both = raw["evaluate_catch_up"] or {"fixed": 0.0, "per_token": 0.0}
    return CostModel(
        tuple(arms),
        verify,
        draft,
        np.array([[line["fixed"], line["per_token"]] for line in lines]),
        float(raw["evaluate"]),
        np.array([both["fixed"], both["per_token"]]),
        raw["select"],
    )
