"""HedgeSpec: full-information drafter selection (arXiv 2510.20064; notes 2.3 to 2.9)."""

from __future__ import annotations

import math
from typing import ClassVar, Literal

import numpy as np
from pydantic import Field, model_validator

from draftpool.errors import DraftpoolError
from draftpool.selectors.base import (
    Bools,
    Completed,
    Feedback,
    Floats,
    Ints,
    Parameters,
    Selector,
    register_selector,
    sample_arms,
)
from draftpool.selectors.normal_hedge import normal_hedge_weights

# `evaluate: skip` (reference notes H9): rounds that are always evaluated, the weight that counts as converged,
# and the drop of the recent acceptance length that ends the skipping.
_ALWAYS, _CONVERGED, _DROP, _RECENT = 8, 0.9, 0.8, 8

_NEVER = np.iinfo(np.int64).max


class HedgeParams(Parameters):
    """Choices that HedgeSpec names or leaves open; the defaults are its practical learner.

    `learner`: `normal_hedge`, or `hedge` with the anytime rate sqrt(8 ln N / t), t losses received.
    `loss`: `length` (EAL), `token` (TAP: the block's first slot, known at once), or `hybrid`: `token` until the
    first `length` loss is known, then `mix` * length + (1 - mix) * token (own definition, H10). `prefill` is EAL as
    published, for sequential drafters: one loss per committed token, from the chance that each drafter's *first*
    proposal is accepted at K verified prefixes in a row (Theorem 3); replayed only.
    `estimator`: `indicator` (what would have been accepted) or `soft` (1 - TV at temperature 1 in Theorem 3).
    `evaluate`: `always`; `every` m-th round (`every`); `skip`: every round until the largest weight exceeds 0.9
    (at least 8 rounds), then every m-th, and again while the recent acceptance length is 20 % below its mean
    (own definition, H9). A round that is not evaluated brings no loss at all.
    `carry`: weights pass from one query to the next. `share`: fixed share of the weights handed round after every
    loss (Herbster and Warmuth 1998), for `hedge` only.
    """

    learner: Literal["normal_hedge", "hedge"] = "normal_hedge"
    loss: Literal["length", "token", "hybrid", "prefill"] = "length"
    estimator: Literal["indicator", "soft"] = "indicator"
    evaluate: Literal["always", "every", "skip"] = "always"
    every: int = Field(default=4, ge=2)
    mix: float = Field(default=0.5, ge=0.0, le=1.0)
    carry: bool = False
    share: float = Field(default=0.0, ge=0.0, lt=1.0)

    @model_validator(mode="after")
    def _prefill_reads_every_token(self):
        if self.loss == "prefill" and self.evaluate != "always":
            raise ValueError("loss: prefill reads every committed token, so evaluate: always")
        return self

    @model_validator(mode="after")
    def _share_needs_hedge(self):
        if self.share > 0.0 and self.learner != "hedge":
            raise ValueError("share > 0 needs learner: hedge")
        return self


@register_selector("hedgespec")
class HedgeSpec(Selector):
    """Hedge-type learner on the losses of all arms; an arm is sampled from the weights in every round.

    The loss of a round is 1 - (a_i + 1) / (K + 1) for every arm i, a_i being what it would have had accepted
    at that round's anchor. It arrives, possibly late, in `Feedback.completed`; a skipped round brings none.
    NormalHedge's regret to an arm grows by <w, loss> - loss_i with w the weights *played in the loss's own
    round*, which are kept until the query ends (8 S N bytes a round). Unavailable arms get weight 0 and the rest
    is renormalised, uniformly if all of the weight was theirs.
    """

    needs: ClassVar[Literal["bandit", "full"]] = "full"
    Params = HedgeParams

    @property
    def reads_gamma(self) -> bool:
        """Soft estimators do, but prefill losses are computed where the tokens are."""
        return self.params.estimator == "soft" and not self.reads_prefill

    @property
    def soft(self) -> bool:
        """Whether acceptance is a probability and no indicator."""
        return self.params.estimator == "soft"

    @property
    def reads_first(self) -> bool:
        """Token losses do."""
        return self.params.loss in ("token", "hybrid")

    @property
    def reads_prefill(self) -> bool:
        """If configured."""
        return self.params.loss == "prefill"

    @property
    def carries(self) -> bool:
        """If configured."""
        return self.params.carry

    def start(self) -> None:
        """No loss has been seen. NormalHedge keeps `regret` [S, N]; Hedge the losses, or with `share` weights."""
        self.regret, self._losses = self.table(), self.table()
        self._log_weights = self.table(-math.log(self.n_arms))
        self._received = np.zeros(self.episodes)
        self._begin_query()

    def resume(self) -> None:
        """Begin a query: with `carry`, what was learnt stays."""
        if self.carries:
            self._begin_query()
        else:
            self.start()

    def _begin_query(self) -> None:
        # [T, N, S]: a round's weights lie as they were computed, arm after arm.
        self._played = np.zeros((16, self.n_arms, self.episodes))
        self._rounds = 0
        # Hybrid losses: the first round whose token loss was not used, since a length loss was known by then.
        self._since = np.full(self.episodes, _NEVER)
        self._length = np.zeros((self.episodes, 2))
        self._recent = np.zeros(self.episodes)

    def weights(self) -> Floats:
        """Weights of all arms [S, N], rows summing to 1."""
        raw = self._raw_weights()
        return raw / raw.sum(axis=1, keepdims=True)

    def _raw_weights(self) -> Floats:
        """Weights up to a factor per episode."""
        if self.params.learner == "normal_hedge":
            return normal_hedge_weights(self.regret)
        if self.params.share > 0.0:
            return np.exp(self._log_weights)
        eta = np.sqrt(8.0 * math.log(self.n_arms) / np.maximum(self._received, 1.0))[:, None]
        return np.exp(eta * (self._losses.min(axis=1, keepdims=True) - self._losses))

    def choose(self, t: int, available: Bools, draws: Floats) -> tuple[Ints, Floats]:
        """Sample from the weights; NormalHedge keeps them for the round's loss."""
        weights = self._raw_weights()
        if not available.all():
            weights = np.where(available, weights, 0.0)
            weights = np.where(weights.sum(axis=1, keepdims=True) > 0.0, weights, available)
        self._rounds = t + 1
        if self.params.learner == "normal_hedge" or self.params.evaluate == "skip":
            weights = weights / weights.sum(axis=1, keepdims=True)
            if t >= len(self._played):
                self._played = np.concatenate([self._played, np.zeros((t + 1, *weights.T.shape))])
            self._played[t] = weights.T
        return sample_arms(weights, draws[:, 0])

    def evaluates(self, t: int) -> Bools:
        """As `evaluate` says."""
        everywhere = np.ones(self.episodes, dtype=np.bool_)
        if self.params.evaluate == "always" or t % self.params.every == 0:
            return everywhere
        if self.params.evaluate == "every":
            return ~everywhere
        mean = self._length[:, 1] / np.maximum(self._length[:, 0], 1.0)
        unsettled = (self._played[t].max(axis=0) <= _CONVERGED) | (self._recent < _DROP * mean)
        return everywhere if t < _ALWAYS else unsettled

    def learn(self, arms: Ints, feedback: Feedback) -> None:
        """Add the losses that became known, whichever arm was played."""
        if self.params.evaluate == "skip":
            self._watch(feedback)
        completed, first = feedback.completed, feedback.first
        if self.reads_first and first is not None:
            # Of a hybrid, only until the first length loss is known.
            used = feedback.active & first.evaluated & (self._since == _NEVER)
            rows = np.flatnonzero(used)
            self._add(rows, np.full(len(rows), self._rounds - 1), self._token_loss(first, rows))
        if self.params.loss == "token" or completed is None or len(completed.round) == 0:
            return
        used = feedback.active[completed.episode]
        if not used.all():
            gamma = None if completed.gamma is None else completed.gamma[used]
            completed = Completed(completed.episode[used], completed.round[used], completed.loss[used], gamma)
        self._check_rounds(completed.round)
        loss = self._length_loss(completed)
        if self.params.loss == "hybrid":
            loss, completed = self._mixed(loss, completed)
        self._add(completed.episode, completed.round, loss)

    def _watch(self, feedback: Feedback) -> None:
        """Keep the mean acceptance length of the query and a recent one."""
        committed = feedback.accepted + 1.0
        rate = np.where(self._length[:, 0] < _RECENT, 1.0 / (self._length[:, 0] + 1.0), 1.0 / _RECENT)
        recent = self._recent + rate * (committed - self._recent)
        self._recent = np.where(feedback.active, recent, self._recent)
        self._length[feedback.active, 0] += 1.0
        self._length[feedback.active, 1] += committed[feedback.active]

    def _length_loss(self, completed: Completed) -> Floats:
        """Length losses [m, N]: as delivered, or by Theorem 3 from acceptance probabilities."""
        if self.params.estimator == "indicator" or self.reads_prefill:
            return completed.loss
        survival = np.cumprod(self._needed(completed.gamma), axis=2)
        return 1.0 - (1.0 + survival.sum(axis=2)) / (survival.shape[2] + 1)

    def _token_loss(self, first, rows: Ints) -> Floats:
        if self.params.estimator == "indicator":
            return 1.0 - first.hit[rows]
        return 1.0 - self._needed(first.gamma)[rows]

    def _mixed(self, loss: Floats, completed: Completed) -> tuple[Floats, Completed]:
        """Hybrid losses; a round whose token loss was used already does not count twice."""
        longest = max(1, int(self.k.max()))
        if self.params.estimator == "soft":
            token = 1.0 - completed.gamma[:, :, 0]
        else:
            # accepted >= 1, that is (1 - loss) * (K + 1) >= 2.
            token = 1.0 - ((1.0 - completed.loss) * (longest + 1) > 1.5)
        fresh = completed.round >= self._since[completed.episode]
        self._since[completed.episode] = np.minimum(self._since[completed.episode], self._rounds)
        mixed = self.params.mix * loss + (1.0 - self.params.mix) * token
        return mixed[fresh], Completed(
            completed.episode[fresh], completed.round[fresh], completed.loss[fresh]
        )

    def _needed(self, gamma: Floats | None) -> Floats:
        if gamma is None:
            raise DraftpoolError(
                "no acceptance probabilities came with the losses", self.where, "use estimator: indicator"
            )
        return gamma

    def _check_rounds(self, rounds: Ints) -> None:
        if len(rounds) and (rounds.min() < 0 or rounds.max() >= self._rounds):
            raise DraftpoolError(
                f"loss of round {int(rounds.max())} after {self._rounds} rounds",
                self.where,
                "deliver losses of played rounds",
            )

    def _add(self, episode: Ints, rounds: Ints, loss: Floats) -> None:
        """Take in losses [m, N] of rounds [m] of episodes [m]."""
        if len(episode) == 0:
            return
        self.check_unit("full-information loss", loss, np.ones(loss.shape, dtype=np.bool_))
        if self.params.share > 0.0:
            self._share(episode, loss)
        elif self.params.learner == "hedge":
            add_rows(self._losses, episode, loss)
        else:
            weights = self._played[rounds, :, episode]
            add_rows(self.regret, episode, (weights * loss).sum(axis=1, keepdims=True) - loss)
        self._received += np.bincount(episode, minlength=self.episodes)

    def _share(self, episode: Ints, loss: Floats) -> None:
        """Multiplicative updates one after the other, `share` of the weight spread evenly after each."""
        share, done = self.params.share, np.zeros(len(episode), dtype=np.bool_)
        received = self._received.copy()
        while not done.all():
            left = np.flatnonzero(~done)
            _, firsts = np.unique(episode[left], return_index=True)
            now = left[firsts]
            rows = episode[now]
            received[rows] += 1.0
            eta = np.sqrt(8.0 * math.log(self.n_arms) / received[rows])[:, None]
            raw = np.exp(self._log_weights[rows] - eta * loss[now])
            mixed = (1.0 - share) * raw / raw.sum(axis=1, keepdims=True) + share / self.n_arms
            self._log_weights[rows] = np.log(mixed)
            done[now] = True


def add_rows(total: Floats, rows: Ints, values: Floats) -> None:
    """total[rows] += values, rows repeated or not, in the order given: [S, N], [m], [m, N]."""
    episodes, n_arms = total.shape
    place = (rows + episodes * np.arange(n_arms)[:, None]).ravel()
    total += np.bincount(place, values.T.ravel(), episodes * n_arms).reshape(n_arms, episodes).T
