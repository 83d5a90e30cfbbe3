"""Sums of a selector's replayed episodes: seeds averaged per answer, arms played, curves over tokens, convergence."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from draftpool.decoding.cost_model import CostModel
from draftpool.replay.costs import price
from draftpool.replay.engine import Replayed
from draftpool.selectors.base import Ints

if TYPE_CHECKING:
    from draftpool.replay.run import Stream

# Share of the plays of all seeds in so many rounds that must be of a best arm (HedgeSpec's 90 % of the weight).
CONVERGED, WINDOW = 0.9, 10
# Numbers of tokens at which the curves of rounds are kept.
POINTS = 16


class Tally:
    """Sums of one selector's episodes per answer, over seeds."""

    def __init__(self, stream: Stream, costs: CostModel, selector: str, needs: str):
        self.stream, self.costs, self.selector, self.needs = stream, costs, selector, needs
        answers = stream.answers
        n = len(answers.tokens)
        longest = int(answers.tokens.max())
        self.grid = np.unique(np.linspace(1, longest, min(POINTS, longest)).round().astype(np.int64))
        self.sums = {
            name: np.zeros(n)
            for name in (
                "episodes",
                "rounds",
                "accepted",
                "zeros",
                "switches",
                "evaluated",
                "seconds",
                "evaluation_seconds",
                "catch_up_seconds",
            )
        }
        self.squares = np.zeros(n)
        self.arms = np.zeros((n, len(answers.arms)))
        self.best = stream.best_arms
        self.played = np.zeros((2, n, longest))
        self.curve = np.zeros((n, len(self.grid)))
        self.reached = np.zeros((n, len(self.grid)))

    def add(self, played: Replayed, which: Ints) -> None:
        """Take episodes in."""
        answers = self.stream.answers
        there = played.arms >= 0
        rounds = there.sum(axis=0)
        switched = (played.arms[1:] != played.arms[:-1]) & there[1:]
        seconds = price(self.costs, played, answers, which, self.stream.prompt_tokens, self.needs)
        values = {
            "episodes": np.ones(len(which)),
            "rounds": rounds,
            "accepted": np.where(there, played.accepted, 0).sum(axis=0),
            "switches": switched.sum(axis=0),
            "evaluated": played.evaluated.sum(axis=0),
            "zeros": (played.accepted == 0).sum(axis=0),
            "seconds": seconds.total,
            "evaluation_seconds": seconds.evaluation,
            "catch_up_seconds": seconds.catch_up,
        }
        for name, value in values.items():
            self.sums[name] += np.bincount(which, weights=value, minlength=len(self.squares))
        self.squares += np.bincount(which, weights=rounds.astype(float) ** 2, minlength=len(self.squares))
        rows, cells = np.broadcast_to(which, there.shape)[there], played.arms[there]
        np.add.at(self.arms, (rows, cells), 1.0)
        place = rows * self.played.shape[2] + np.nonzero(there)[0]
        for kept, weights in zip(self.played, (None, self.best[rows, cells]), strict=True):
            kept += np.bincount(place, weights=weights, minlength=kept.size).reshape(kept.shape)
        done = np.where(there, played.committed, 0).cumsum(axis=0)
        for column, n in enumerate(self.grid):
            used = (done < n).sum(axis=0) + 1
            reached = answers.tokens[which] >= n
            self.curve[:, column] += np.bincount(
                which, weights=np.where(reached, used, 0), minlength=len(self.squares)
            )
            self.reached[:, column] += np.bincount(which, weights=reached, minlength=len(self.squares))

    def convergence(self) -> tuple[np.ndarray, np.ndarray]:
        """Rounds until nine of ten plays in the next ten rounds, over all seeds, are of a best fixed arm of the answer,
        and whether that is ever so.

        Where it is not, the rounds are those of the answer: censored at its end.
        """
        # A policy that takes turns plays a best arm in some round with all seeds, but not in ten.
        totals = np.pad(self.played.cumsum(axis=2), ((0, 0), (0, 0), (1, 0)))
        episodes, best = totals[:, :, WINDOW:] - totals[:, :, :-WINDOW]
        alive = self.played[0][:, WINDOW - 1 :] > 0
        there = alive & (best >= CONVERGED * episodes)
        reached = there.any(axis=1)
        rounds = self.sums["rounds"] / np.maximum(self.sums["episodes"], 1.0)
        return np.where(reached, there.argmax(axis=1) if there.shape[1] else 0.0, rounds), reached

    def frames(self) -> dict[str, pd.DataFrame]:
        """Tables `answers`, `arms` and `curves` of this selector on this stream, seeds averaged."""
        answers = self.stream.answers
        n = np.maximum(self.sums["episodes"], 1.0)
        head = answers.frame.assign(
            stream=self.stream.name, selector=self.selector, prompt_index=self.stream.index
        )
        means = {name: total / n for name, total in self.sums.items() if name != "episodes"}
        variance = np.maximum(self.squares / n - means["rounds"] ** 2, 0.0)
        converged, reached = self.convergence()
        table = head.assign(
            **means,
            rounds_sd=np.sqrt(variance),
            converged=converged,
            reached=reached,
            seeds=self.sums["episodes"].astype(int),
        )
        arms = pd.DataFrame(self.arms / n[:, None], columns=list(answers.arms))
        arms = head[["stream", "selector", "prompt_id", "domain", "repeat"]].join(arms)
        arms = arms.melt(
            id_vars=["stream", "selector", "prompt_id", "domain", "repeat"],
            var_name="arm",
            value_name="rounds",
        )
        with np.errstate(invalid="ignore"):
            curve = pd.DataFrame(self.curve / self.reached, columns=self.grid)
        curves = head[["stream", "selector", "prompt_id", "domain", "repeat"]].join(curve)
        curves = curves.melt(
            id_vars=["stream", "selector", "prompt_id", "domain", "repeat"], var_name="n", value_name="rounds"
        ).dropna()
        return {"answers": table, "arms": arms, "curves": curves.astype({"n": int})}
