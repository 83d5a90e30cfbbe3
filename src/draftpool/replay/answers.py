"""The acceptance table laid out for replay: what every arm would bring at every anchor of every answer.

A session is one answer here: its turns' anchors one after the other, and no draft reaches beyond its turn.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import pandas as pd

from draftpool.data.streams import session_of
from draftpool.errors import DraftpoolError
from draftpool.selectors.base import PLAIN, Bools, Floats, Ints

KEYS = ["prompt_id", "domain", "repeat"]


@dataclass(frozen=True)
class Answers:
    """Dense acceptance of A answers, L anchors at most, N arms, K slots.

    Attributes:
        frame: A rows: prompt_id (or session), domain, repeat, tokens (to commit after the prefill tokens).
        arms: Names of the N arms.
        k: int[N], tokens each arm drafts; 0 for plain decoding.
        tokens: int[A].
        turn: int[A * L], turn of the anchor in its session; 0 outside sessions.
        left: int[A * L], tokens from the anchor to the end of its turn; 0 behind the end.
        available: bool[A * L, N], arms with enough positions for the answer (the turn); others draft nothing.
        drafted: int[A * L, N], tokens proposed; fewer than k where a model-free drafter has less to say.
        accepted: int[A * L, N], accepted draft tokens after trimming; 0 behind the end.
        committed: int[A * L, N], min(accepted + 1, left).
        reward_bd: float[A * L, N], NaN for plain decoding.
        reward_bd_full: float[A * L, N], NaN for plain decoding and where the target did not read the drafts.
        need: int[A * L], tokens after the anchor that show what every arm would have had accepted; more than are
            left if the end comes first.
        gamma: float32[A * L, N, K], acceptance probability of every slot, 0 where there is none: 1 - TV, or in a pool
            with model-free drafters the target's probability of the proposed token, one scale for all.
    """

    frame: pd.DataFrame
    arms: tuple[str, ...]
    k: Ints
    tokens: Ints
    turn: Ints
    left: Ints
    available: Bools
    drafted: Ints
    accepted: Ints
    committed: Ints
    reward_bd: Floats
    reward_bd_full: Floats
    need: Ints
    gamma: np.ndarray

    @property
    def length(self) -> int:
        """L."""
        return len(self.accepted) // len(self.tokens)

    @property
    def k_pool(self) -> int:
        """K, the longest draft of the pool."""
        return int(self.gamma.shape[2])

    @cached_property
    def loss(self) -> Floats:
        """Length losses float[A * L, N]: 1 - (accepted + 1) / (K + 1)."""
        return 1.0 - (self.accepted + 1) / (self.k_pool + 1)

    def without(self, unfit: Bools) -> Answers:
        """The same where arms have too few positions at some cells, bool[A * L, N]: there they draft nothing."""
        if not unfit.any():
            return self
        accepted, drafted = np.where(unfit, 0, self.accepted), np.where(unfit, 0, self.drafted)
        return replace(
            self,
            available=self.available & ~unfit,
            drafted=drafted,
            accepted=accepted,
            committed=np.minimum(accepted + 1, self.left[:, None]),
            reward_bd=np.where(unfit, np.nan, self.reward_bd),
            reward_bd_full=np.where(unfit, np.nan, self.reward_bd_full),
            need=np.minimum(accepted + 1, drafted).max(axis=1),
            gamma=np.where(unfit[:, :, None], np.float32(0.0), self.gamma),
        )

    def committed_by_left(self) -> Ints:
        """Tokens committed by every arm, indexed by tokens left, int[A, N, L + 1], as the oracles read them.

        Cells beyond an answer's length hold 1 and are never reached.
        """
        return self.by_left(self.committed, 1)

    def by_left(self, values: np.ndarray, beyond: float) -> np.ndarray:
        """Values [A * L, N] indexed by tokens left, [A, N, L + 1]; ``beyond`` stands where an answer is shorter."""
        shape = (len(self.tokens), len(self.arms), self.length + 1)
        made = np.full(shape, beyond, dtype=values.dtype)
        by_position = values.reshape(len(self.tokens), self.length, len(self.arms))
        for row, tokens in enumerate(self.tokens):
            made[row, :, tokens - np.arange(tokens)] = by_position[row, :tokens]
        return made


def lay_out(table: pd.DataFrame, arms: Sequence[str], limit: int | None = None) -> Answers:
    """Lay an acceptance table out.

    Args:
        table: Columns prompt_id, domain, repeat, drafter, position, left, k, accepted, gamma; reward_bd_full if the
            target read the drafts; drafted, available, modelled and gamma_hard unless all drafters draft k tokens of a
            distribution.
        arms: Drafters in the selectors' order; `plain` is plain decoding and needs no rows.
        limit: Tokens of an answer (of a turn), prefill token included, if shorter than the table's.

    Raises:
        DraftpoolError: If a drafter of the pool or one of its answers is missing, or a value is impossible.
    """
    drafters = [arm for arm in arms if arm != PLAIN]
    own = table[table["drafter"].isin(drafters)]
    if limit is not None:
        # Rows along a stream end where its answers do.
        own = own[own["position"] < limit - 1]
    missing = sorted(set(drafters) - set(own["drafter"].unique()))
    if missing or not drafters:
        raise DraftpoolError(
            f"the acceptance table has no rows of {', '.join(missing) or 'any drafter'}",
            "replay",
            "score this pool (snakemake runs score_pool again when the pool changes)",
        )
    answers = own.groupby(KEYS, observed=True, sort=True)
    frame = answers["left"].max().rename("own").reset_index()
    counts = own.groupby([*KEYS, "drafter"], observed=True)["position"].size().groupby(KEYS, observed=True)
    whole = (counts.nunique() == 1) & (counts.size() == len(drafters))
    if not whole.all():
        raise DraftpoolError(
            f"not every drafter was scored on answer {whole.index[~whole][0]}",
            "replay",
            "score the pool again",
        )
    of_turn = frame["own"].to_numpy(dtype=np.int64)
    if limit is not None:
        of_turn = np.minimum(of_turn, limit - 1)
    frame, row_of_turn, offset, number = _join_turns(frame.drop(columns="own"), of_turn)
    tokens = frame["tokens"].to_numpy(dtype=np.int64)
    turn, length = answers.ngroup().to_numpy(), int(tokens.max())
    arm = pd.Index(arms).get_indexer(own["drafter"].astype(str))
    position = own["position"].to_numpy(dtype=np.int64)
    inside = position < of_turn[turn]
    turn, arm, position, own = turn[inside], arm[inside], position[inside], own[inside]
    cell, left = row_of_turn[turn] * length + offset[turn] + position, of_turn[turn] - position
    k = np.zeros(len(arms), dtype=np.int64)
    k[arm] = own["k"].to_numpy()
    k_pool = int(k.max())
    accepted = np.zeros((len(frame) * length, len(arms)), dtype=np.int64)
    accepted[cell, arm] = np.minimum(own["accepted"].to_numpy(), left)
    place_left, place_turn = (np.zeros(len(accepted), dtype=np.int64) for _ in range(2))
    drafted = np.broadcast_to(k, accepted.shape).copy()
    available = np.ones(accepted.shape, dtype=bool)
    values = own["gamma"]
    if "drafted" in own:
        drafted[cell, arm] = own["drafted"].to_numpy()
        available[cell, arm] = own["available"].to_numpy()
        values = values if own["modelled"].all() else own["gamma_hard"]
    place_left[cell] = left
    place_turn[cell] = number[turn]
    committed = np.minimum(accepted + 1, place_left[:, None])
    gamma = np.zeros((len(frame) * length, len(arms), k_pool), dtype=np.float32)
    _fill_slots(gamma, cell, arm, values.to_numpy(), left)
    slots = np.minimum(accepted + 1, drafted)
    slots[cell, arm] = np.minimum(slots[cell, arm], left)
    # Summed in float32 as live decoding does, slot after slot.
    total = np.zeros(accepted.shape, dtype=np.float32)
    for slot in range(k_pool):
        total += np.where(slot < slots, gamma[:, :, slot], np.float32(0.0))
    with np.errstate(invalid="ignore"):
        reward_bd = np.where(slots > 0, total / slots.astype(np.float32), np.nan).astype(np.float64)
    reward_bd_full = np.full(accepted.shape, np.nan)
    if "reward_bd_full" in own:
        reward_bd_full[cell, arm] = own["reward_bd_full"].to_numpy()
    need = np.minimum(accepted + 1, drafted).max(axis=1)
    return Answers(
        frame,
        tuple(arms),
        k,
        tokens,
        place_turn,
        place_left,
        available,
        drafted,
        accepted,
        committed,
        reward_bd,
        reward_bd_full,
        need,
        gamma,
    )


def _join_turns(frame: pd.DataFrame, tokens: Ints) -> tuple[pd.DataFrame, Ints, Ints, Ints]:
    """Sessions of the turns in `frame`, which have `tokens` each.

    Returns:
        A row per session with its `tokens`; and of every turn the session's row, the tokens before, its number.
    """
    named = [session_of(prompt_id) for prompt_id in frame["prompt_id"].astype(str)]
    turns = frame.assign(
        prompt_id=[session for session, _ in named], turn=[turn for _, turn in named], tokens=tokens
    )
    # More than ten turns are not in order as text.
    turns = turns.sort_values([*KEYS, "turn"], kind="stable")
    sessions = turns.groupby(KEYS, observed=True, sort=True)
    before = (sessions["tokens"].cumsum() - turns["tokens"]).sort_index().to_numpy(dtype=np.int64)
    rows = sessions.ngroup().sort_index().to_numpy(dtype=np.int64)
    number = turns["turn"].sort_index().to_numpy(dtype=np.int64)
    return sessions["tokens"].sum().reset_index(), rows, before, number


def _fill_slots(gamma: np.ndarray, cell: Ints, arm: Ints, rows: np.ndarray, left: Ints) -> None:
    lengths = np.minimum(np.fromiter(map(len, rows), dtype=np.int64, count=len(rows)), left)
    flat = np.concatenate([values[:length] for values, length in zip(rows, lengths, strict=True)])
    if not ((flat >= 0.0) & (flat <= 1.0)).all():
        bad = float(flat[~((flat >= 0.0) & (flat <= 1.0))][0])
        raise DraftpoolError(
            f"acceptance probability {bad!r} is not in [0, 1]", "acceptance table", "score the pool again"
        )
    starts = np.cumsum(lengths) - lengths
    slot = np.arange(len(flat)) - np.repeat(starts, lengths)
    gamma[np.repeat(cell, lengths), np.repeat(arm, lengths), slot] = flat
