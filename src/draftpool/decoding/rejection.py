"""Verification `rejection` (Leviathan et al. 2023, Chen et al. 2023): drafts that were sampled, kept so that the text's
law is the target's.

A draft token x from q is kept with probability min(1, p(x) / q(x)); at the first rejection the token comes from the
residual max(p - q, 0), normalised. p and q are what is sampled from: after temperature and top-p. A drafter that
proposes its argmax has a one-hot q, so that x is kept with probability p(x).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

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
    if top_p < 1.0:
        ordered, order = p.sort(dim=-1, descending=True, stable=True)
        before = ordered.cumsum(dim=-1) - ordered
        p = torch.zeros_like(p).scatter_(-1, order, ordered.where(before < top_p, torch.zeros_like(ordered)))
        p = p / p.sum(dim=-1, keepdim=True)
    return p


def one_hot(ids: Tensor, vocabulary: int) -> Tensor:
    """The distribution of proposals that were not sampled: float64 [k, vocabulary] of ids [k]."""
    shape = (*ids.shape, vocabulary)
    return torch.zeros(shape, dtype=torch.float64, device=ids.device).scatter_(-1, ids[..., None], 1.0)


def keep_probability(p: Tensor, q: Tensor) -> Tensor:
    """min(1, p / q) of every token [..., vocabulary]; 0 where q is 0 (such a token is never drafted)."""
    return torch.where(
        q > 0.0, (p / q.where(q > 0.0, torch.ones_like(q))).clamp(max=1.0), torch.zeros_like(q)
    )


def residual(p: Tensor, q: Tensor) -> Tensor:
    """What is sampled from after a rejection: max(p - q, 0), normalised [..., vocabulary]; p where q equals p."""
    rest = (p - q).clamp(min=0.0)
    total = rest.sum(dim=-1, keepdim=True)
    # Where q is p nothing is ever rejected, but for rounding.
    return torch.where(total > 0.0, rest / total.where(total > 0.0, torch.ones_like(total)), p)


def sample(p: Tensor, uniform: float) -> int:
    """A token of a distribution [vocabulary] by inversion; never one of probability 0."""
    total = p.cumsum(dim=-1)
    place = int(torch.searchsorted(total, uniform * float(total[-1]), right=True))
    last = int(p.nonzero()[-1])
    return min(place, last)


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
    accepted = 0
    for place, token in enumerate(draft):
        if float(q[place, token]) == 0.0:
            raise DraftpoolError(
                f"token {token} in slot {place} has probability 0 under q",
                "rejection",
                "pass what was sampled from",
            )
        if uniforms[place] >= float(keep_probability(p[place], q[place])[token]):
            break
        accepted += 1
    rejected = accepted < len(draft)
    last = residual(p[accepted], q[accepted]) if rejected else p[accepted]
    return Kept([*draft[:accepted], sample(last, uniforms[-1])], accepted)
