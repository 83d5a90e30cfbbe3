"""Exact replay: the decoding loop on the acceptance table, many episodes in lockstep, without a model.

Under `match` verification a caught-up drafter's proposal depends on the prefix alone and the text on neither drafter
nor selector, so each round of the live loop (`decoding/engine.py`) is a look-up. The selectors are the same objects,
fed the same numbers and the same draws.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from draftpool import draws
from draftpool.replay.answers import Answers
from draftpool.replay.prefill import PrefillLosses
from draftpool.selectors.base import Bools, Completed, Context, Feedback, FirstSlots, Floats, Ints, Selector

_NEVER = np.iinfo(np.int64).max


@dataclass(frozen=True)
class Replayed:
    """Rounds of E episodes, T at most; -1 behind an episode's end.

    Attributes:
        arms: int[T, E], arm played.
        drafted: int[T, E], tokens proposed.
        accepted: int[T, E].
        committed: int[T, E].
        evaluated: bool[T, E], all arms were evaluated.
        propensity: float[T, E].
    """

    arms: Ints
    drafted: Ints
    accepted: Ints
    committed: Ints
    evaluated: Bools
    propensity: Floats

    @property
    def rounds(self) -> Ints:
        """Rounds of every episode, int[E]."""
        return (self.arms >= 0).sum(axis=0)


class EpisodeDraws:
    """The selector's uniforms of E episodes, block by block of rounds; made once for all selectors of a width.

    Args:
        keys: (selector seed, repeat, prompt id) of every episode.
        width: N + 1.
    """

    def __init__(self, keys: Sequence[tuple[int, int, str]], width: int):
        self._rows = [draws.RoundDraws(width, *draws.selector_key(*key)) for key in keys]
        self._blocks: list[Floats] = []

    def round(self, t: int) -> Floats:
        """Uniforms of round t [E, N + 1]."""
        number, place = divmod(t, draws.RoundDraws.BLOCK)
        while len(self._blocks) <= number:
            made = [rows.block(len(self._blocks)) for rows in self._rows]
            self._blocks.append(np.ascontiguousarray(np.stack(made, axis=1)))
        return self._blocks[number][place]


class _Pending:
    """Evaluated rounds whose losses are not known yet; a round waits for K rounds at most (one token each)."""

    def __init__(self, answers: Answers, episodes: int, whole: bool, gamma: bool):
        self.answers, self.whole, self.gamma = answers, whole, gamma
        self.size = max(1, answers.k_pool)
        self.due = np.full((self.size, episodes), _NEVER)
        self.cell = np.zeros((self.size, episodes), dtype=np.int64)

    def add(self, t: int, position: Ints, cell: Ints, evaluated: Bools) -> None:
        """Remember round t, to be known with `need` more tokens than were there at its anchor."""
        need = self.answers.k_pool if self.whole else self.answers.need[cell]
        place = t % self.size
        # What the end of a turn cuts off stays unknown.
        told = evaluated & (need <= self.answers.left[cell])
        self.due[place] = np.where(told, position + need, _NEVER)
        self.cell[place] = cell

    def deliver(self, t: int, position: Ints) -> Completed | None:
        """Rounds known with `position` tokens committed, oldest first, every one once."""
        oldest_first = (t + 1 + np.arange(self.size)) % self.size
        place, episode = np.nonzero(self.due[oldest_first] <= position)
        if not len(place):
            return None
        place = oldest_first[place]
        self.due[place, episode] = _NEVER
        cell = self.cell[place, episode]
        gamma = self.answers.gamma[cell].astype(np.float64) if self.gamma else None
        return Completed(episode, t - (t - place) % self.size, self.answers.loss[cell], gamma)


def replay(
    selector: Selector,
    answers: Answers,
    which: Ints,
    uniforms: EpisodeDraws,
    context: Context | None = None,
    resumed: bool = False,
) -> Replayed:
    """Play episodes to their end.

    Args:
        selector: A selector over `answers.arms`; it is reset, unless `resumed`.
        answers: What every arm brings.
        which: int[E], the answer of every episode.
        uniforms: Draws of the same episodes.
        context: What some selectors need besides feedback.
        resumed: The selector goes on from the query before.

    Returns:
        The rounds of every episode.
    """
    episodes, n_arms, length = len(which), len(answers.arms), answers.length
    if resumed:
        selector.resume()
    else:
        selector.reset(n_arms, answers.k, episodes, context)
    full = selector.needs == "full"
    pending = _Pending(answers, episodes, selector.reads_gamma, selector.reads_gamma) if full else None
    prefill = PrefillLosses(answers, which, selector.soft) if selector.reads_prefill else None
    available, masked = np.ones((episodes, n_arms), dtype=np.bool_), not answers.available.all()
    nothing = np.zeros(episodes, dtype=np.bool_)
    tokens, base = answers.tokens[which], which * length
    accepted_flat, bd_flat = answers.accepted.ravel(), answers.reward_bd.ravel()
    committed_flat, drafted_flat = answers.committed.ravel(), answers.drafted.ravel()
    bd_full_flat = answers.reward_bd_full.ravel() if selector.reads_bd_full else None
    position = np.zeros(episodes, dtype=np.int64)
    active = position < tokens
    kept: list[tuple[Ints, Ints, Ints, Ints, Bools, Floats, Bools]] = []
    t = 0
    while active.any():
        cell = base + np.minimum(position, tokens - 1)
        if masked:
            available = answers.available[cell]
            # Where no arm has enough positions all are offered, and the text is written plainly.
            available = available | ~available.any(axis=1, keepdims=True)
        arms, propensity = selector.select(t, available, uniforms.round(t))
        evaluated = selector.evaluates(t) & active if full else nothing
        flat = cell * n_arms + arms
        accepted = accepted_flat[flat]
        # A finished episode has nothing left, so it commits nothing.
        committed = np.where(active, committed_flat[flat], 0)
        first = completed = None
        if full and prefill is None:
            pending.add(t, position, cell, evaluated)
        if selector.reads_first:
            gamma = answers.gamma[cell, :, 0].astype(np.float64) if selector.reads_gamma else None
            first = FirstSlots(evaluated, answers.accepted[cell] > 0, gamma)
        before, position = position, position + committed
        if prefill is not None:
            completed = prefill.deliver(t, before, position)
        elif full:
            completed = pending.deliver(t, position)
        feedback = Feedback(
            accepted=accepted,
            drafted=drafted_flat[flat],
            committed=committed,
            reward_be=accepted / answers.k_pool,
            reward_bd=bd_flat[flat],
            reward_bd_full=None if bd_full_flat is None else bd_full_flat[flat],
            active=active,
            completed=completed,
            first=first,
        )
        selector.update(arms, feedback)
        kept.append((arms, feedback.drafted, accepted, committed, evaluated, propensity, active))
        active = position < tokens
        t += 1
    if kept:
        stacked = [np.stack(part) for part in zip(*kept, strict=True)]
    else:
        stacked = [np.zeros((0, episodes), dtype) for dtype in (int, int, int, int, bool, float, bool)]
    *counts, evaluated, propensity, played = stacked
    arms, drafted, accepted, committed = (np.where(played, part, -1) for part in counts)
    return Replayed(arms, drafted, accepted, committed, evaluated, np.where(played, propensity, np.nan))
