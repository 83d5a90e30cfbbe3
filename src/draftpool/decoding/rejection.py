"""Verification `rejection` (Leviathan et al. 2023, Chen et al. 2023): drafts that were sampled, kept so that the text's
law is the target's.

A draft token x from q is kept with probability min(1, p(x) / q(x)); at the first rejection the token comes from the
residual max(p - q, 0), normalised. p and q are what is sampled from: after temperature and top-p. A drafter that
proposes what it did not sample has a one-hot q, so that x is kept with probability p(x).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from draftpool import draws
from draftpool.errors import DraftpoolError


def check_sampling(temperature: float, top_p: float, where: str) -> None:
    """Check the options of sampling.

    Raises:
        DraftpoolError: If the temperature is negative or top-p is not in (0, 1].
    """
    if not temperature >= 0.0:
        raise DraftpoolError(f"temperature {temperature}", where, "give 0 (greedy) or more")
    if not 0.0 < top_p <= 1.0:
        raise DraftpoolError(f"top-p {top_p}", where, "give more than 0 and at most 1 (1: everything)")


def distribution(logits: Tensor, temperature: float, top_p: float = 1.0) -> Tensor:
    """What is sampled from: softmax of logits / T, cut to the smallest set of most likely tokens that has top-p.

    Args:
        logits: [..., vocabulary].
        temperature: T >= 0; 0 is the argmax, first index on ties.
        top_p: In (0, 1]; the token that crosses the bound stays in; of equally likely ones the first index goes first.

    Returns:
        float64 [..., vocabulary], rows add up to 1.

    Raises:
        DraftpoolError: As `check_sampling`.
    """
    check_sampling(temperature, top_p, "sampling")
    if temperature == 0.0:
        chosen = logits.argmax(dim=-1, keepdim=True)
        return torch.zeros_like(logits, dtype=torch.float64).scatter_(-1, chosen, 1.0)
    p = (logits.double() / temperature).softmax(dim=-1)
    return p if top_p == 1.0 else _nucleus(p, top_p)


def _nucleus(p: Tensor, top_p: float) -> Tensor:
    """Cut distributions [..., vocabulary] to their top-p sets; see :func:`distribution`."""
    # All tokens of at most this probability have no more than half of 1 - top-p together, so the set is full before
    # them; sorting the others alone is several times faster. They keep their order, and the sort is stable, so that of
    # equally likely tokens the first index goes first.
    candidate = p > 0.5 * (1.0 - top_p) / p.shape[-1]
    place = candidate.cumsum(dim=-1) - 1
    room = int(place.max()) + 1
    place = place.where(candidate, room)
    few = p.new_zeros(*p.shape[:-1], room + 1).scatter_(-1, place, p)
    ordered, order = few[..., :room].sort(dim=-1, descending=True, stable=True)
    before = ordered.cumsum(dim=-1) - ordered
    kept = torch.zeros_like(few).scatter_(-1, order, ordered.where(before < top_p, 0.0))
    cut = kept.gather(-1, place)
    return cut / cut.sum(dim=-1, keepdim=True)


def one_hot(ids: Tensor, vocabulary: int) -> Tensor:
    """The distribution of proposals that were not sampled: float64 [k, vocabulary] of ids [k]."""
    shape = (*ids.shape, vocabulary)
    return torch.zeros(shape, dtype=torch.float64, device=ids.device).scatter_(-1, ids[..., None], 1.0)


def keep_probability(p: Tensor, q: Tensor) -> Tensor:
    """min(1, p / q) of every token [..., vocabulary]; 0 where q is 0 (such a token is never drafted)."""
    return (p / q).clamp(max=1.0).where(q > 0.0, 0.0)


def residual(p: Tensor, q: Tensor) -> Tensor:
    """What is sampled from after a rejection: max(p - q, 0), normalised [..., vocabulary]; p where q equals p."""
    rest = (p - q).clamp(min=0.0)
    total = rest.sum(dim=-1, keepdim=True)
    # Where q is p nothing is ever rejected, but for rounding.
    return (rest / total).where(total > 0.0, p)


def sample_rows(p: Tensor, uniforms: Tensor) -> Tensor:
    """A column of each distribution by inversion, never one of probability 0: ids [n] of p [n, vocabulary].

    Args:
        p: Rows add up to 1, but for rounding.
        uniforms: Numbers in [0, 1) [n].
    """
    total = p.cumsum(dim=-1).where(p > 0.0, 0.0)
    whole = total.amax(dim=-1)
    # Rounding may lift uniform * whole to the whole itself.
    bound = torch.minimum(uniforms * whole, torch.nextafter(whole, torch.zeros_like(whole)))
    return (total > bound[:, None]).int().argmax(dim=-1)


def sample(p: Tensor, uniform: float) -> int:
    """A token of a distribution [vocabulary] by inversion; never one of probability 0."""
    return int(sample_rows(p[None], torch.tensor([uniform], dtype=torch.float64, device=p.device)))


def keeps(probability: float, uniform: float) -> bool:
    """Whether a draft token is kept."""
    return uniform < probability


@dataclass(frozen=True)
class Kept:
    """Tokens that a round writes before any cut at the end: the kept draft and one token more.

    Attributes:
        tokens: Ids.
        accepted: Draft tokens among them.
    """

    tokens: list[int]
    accepted: int


def reject(draft: list[int], q: Tensor, p: Tensor, uniforms: list[float]) -> Kept:
    """Verify one draft.

    Args:
        draft: Proposed ids [k], the j-th sampled from ``q[j]``.
        q: Distributions of the drafter [k, vocabulary].
        p: Distributions of the target [k + 1, vocabulary], the j-th given all draft tokens before j.
        uniforms: k + 1 numbers in [0, 1): one per draft token for keeping it, the last for the token after the kept
            ones.

    Raises:
        DraftpoolError: If a proposal has probability 0 under its q: it cannot have been sampled from it.
    """
    ids = torch.tensor(draft, dtype=torch.long, device=q.device)[:, None]
    own = q.gather(-1, ids)[:, 0]
    for place, (token, chance) in enumerate(zip(draft, own.tolist(), strict=True)):
        if chance == 0.0:
            raise DraftpoolError(
                f"token {token} in slot {place} has probability 0 under q",
                "rejection",
                "pass what was sampled from",
            )
    kept = keep_probability(p[:-1].gather(-1, ids)[:, 0], own).tolist()
    accepted = 0
    while accepted < len(draft) and keeps(kept[accepted], uniforms[accepted]):
        accepted += 1
    rejected = accepted < len(draft)
    last = residual(p[accepted], q[accepted]) if rejected else p[accepted]
    return Kept([*draft[:accepted], sample(last, uniforms[-1])], accepted)


class SampledDraft:
    """Draws the tokens of one draft and keeps what they were drawn from (a `draftpool.drafters.base.Choose`).

    Args:
        temperature: T > 0.
        top_p: In (0, 1].
        uniforms: One number in (0, 1) per slot.
    """

    def __init__(self, temperature: float, top_p: float, uniforms: np.ndarray):
        self.temperature, self.top_p, self.uniforms = temperature, top_p, uniforms
        self.rows: list[Tensor] = []

    def __call__(self, log_q: Tensor, first_slot: int) -> Tensor:
        """Columns [n] drawn from log_q [n, draft vocabulary], rows of the slots from ``first_slot`` on."""
        # softmax(log_q / T) is softmax(logits / T): log_q differs from the logits by a constant.
        rows = distribution(log_q, self.temperature, self.top_p)
        self.rows.append(rows)
        uniforms = torch.from_numpy(self.uniforms[first_slot : first_slot + len(rows)])
        return sample_rows(rows, uniforms.to(rows.device))

    def q(self, ids: Tensor, columns: Tensor | None, vocabulary: int) -> Tensor:
        """What every token was drawn from [k, vocabulary]; one-hot for a drafter that drew nothing.

        Args:
            ids: The draft [k].
            columns: Token id of every column that was drawn from [draft vocabulary], or None if they are token ids.
            vocabulary: The target's.
        """
        if not self.rows:
            return one_hot(ids, vocabulary)
        rows = torch.cat(self.rows)
        if columns is None:
            columns = torch.arange(rows.shape[-1], device=rows.device)
        return rows.new_zeros(len(rows), vocabulary).index_copy_(1, columns, rows)


class Rejection:
    """`rejection` in one answer: draws its drafts and verifies them.

    Every draw has a key of its own (what it is for, sample seed, selector seed, prompt, round, and for drafts the arm),
    so that a resumed run draws the same, and an arm drafts the same in a round whether it is played or evaluated.
    Methods of equal seeds share draws: their texts are the same until they play different arms.

    Args:
        temperature: T > 0.
        top_p: In (0, 1].
        sample_seed: Which of several texts of a prompt.
        selector_seed: Of the selector that plays.
        prompt_id: Prompt, or the turn of a session.
    """

    def __init__(
        self, temperature: float, top_p: float, sample_seed: int, selector_seed: int, prompt_id: str
    ):
        self.temperature, self.top_p = temperature, top_p
        self.key = (sample_seed, selector_seed, prompt_id)
        self.drawn: dict[str, SampledDraft] = {}

    def choose(self, arm: str, k: int, round_: int) -> SampledDraft:
        """Draws the draft of an arm of up to k tokens in a round."""
        uniforms = draws.uniform(k, "rejection_draft", *self.key, arm, round_)
        self.drawn[arm] = SampledDraft(self.temperature, self.top_p, uniforms)
        return self.drawn[arm]

    def verify(self, arm: str, draft: list[int], columns: Tensor | None, logits: Tensor, round_: int) -> Kept:
        """Verify the draft of an arm in the round that it was drawn in.

        Args:
            arm: The arm.
            draft: Its ids [k].
            columns: Token id of every column of its distributions, or None if they are token ids (or there are none).
            logits: Of the target [k + 1, vocabulary], the j-th row given all draft tokens before j.
            round_: Round number.
        """
        p = distribution(logits, self.temperature, self.top_p)
        ids = torch.tensor(draft, device=p.device)
        uniforms = draws.uniform(len(draft) + 1, "rejection_verify", *self.key, round_)
        return reject(draft, self.drawn[arm].q(ids, columns, p.shape[-1]), p, uniforms.tolist())
