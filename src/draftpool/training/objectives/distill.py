"""Divergences from the target's distribution: DistillSpec (Zhou et al. 2024, arXiv 2310.08461).

p is the target, q the drafter, both at temperature 1 over the draft vocabulary. Where that one is reduced, p
adds up to less than 1. The KL divergences then compare q with p renormalised over the draft vocabulary, as
EAGLE-3 does (SpecForge, specforge/core/eagle3.py: a softmax over the kept logits); a row with no mass in it
says nothing and gives 0. Total variation takes p as it is, so that 1 - tvd is the probability that a token
drawn from q is accepted.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from draftpool.training.objectives.base import register_objective
from draftpool.training.objectives.cross_entropy import Decayed

if TYPE_CHECKING:
    from torch import Tensor

# About the smallest normal float32. Smaller probabilities count as this in logarithms: KL(q || p) is infinite where
# p underflowed to 0 and q did not, and one such slot would end the training.
_TINY = 1.2e-38
# Its exp is 0 in float32 and float64, so that it can stand for -inf without 0 * inf.
_LOWEST = -1e4


class _Distilled(Decayed):
    """Slot k costs decay^(k - 1) times the divergence of its row."""

    kinds: ClassVar[frozenset[str]] = frozenset({"block", "eagle", "independent"})
    reads_target: ClassVar[bool] = True


@register_objective("forward_kl")
class ForwardKL(_Distilled):
    """KL(p || q) = sum p (log p - log q), in nats; infinite where q is 0 and p is not."""

    def divergence(self, log_q: Tensor, p: Tensor) -> Tensor:
        """Row-wise, p renormalised; its gradient by log q is -p."""
        p = _renormalised(p)
        # Columns without p are left out: 0 * -inf is NaN.
        return (p * (p.clamp(min=_TINY).log() - log_q.masked_fill(p == 0, 0.0))).sum(dim=-1)


@register_objective("reverse_kl")
class ReverseKL(_Distilled):
    """KL(q || p) = sum q (log q - log p), in nats; log p is at least -87.3."""

    def divergence(self, log_q: Tensor, p: Tensor) -> Tensor:
        """Row-wise, p renormalised."""
        log_q = log_q.clamp(min=_LOWEST)
        p = _renormalised(p)
        rows = (log_q.exp() * (log_q - p.clamp(min=_TINY).log())).sum(dim=-1)
        return rows.masked_fill(~p.any(dim=-1), 0.0)


@register_objective("tvd")
class TotalVariation(_Distilled):
    """1 - sum min(p, q), in [0, 1]: the probability of a rejection; half the L1 distance if both add up to 1."""

    whole_target: ClassVar[bool] = True

    def divergence(self, log_q: Tensor, p: Tensor) -> Tensor:
        """Row-wise, p as it is."""
        return 1.0 - p.minimum(log_q.exp()).sum(dim=-1)


def _renormalised(p: Tensor) -> Tensor:
    """p [n, draft vocabulary] with rows that add up to 1, or are 0 where the target's mass lies elsewhere."""
    mass = p.sum(dim=-1, keepdim=True)
    return (p / mass.clamp(min=_TINY)).masked_fill(mass < _TINY, 0.0)
