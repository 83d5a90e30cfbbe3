"""Direct maximisation of the accepted length's surrogate, a baseline of the D-PACE paper (notes 3.1, 3.4)."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from draftpool.training.objectives.base import Objective, Reduction, register_objective
from draftpool.training.objectives.dpace import PARALLEL_ONLY, suffix_sums

if TYPE_CHECKING:
    from torch import Tensor


@register_objective("direct_surrogate")
class DirectSurrogate(Objective):
    """Loss -S with S = sum_k prod_{i<=k} q_i over the supervised slots; the gradient runs through q.

    Its weights, used for the log only, are dS / dlog q_j: D-PACE's at alpha = 0.
    """

    refusal: ClassVar[str] = PARALLEL_ONLY
    published_reduction: ClassVar[Reduction] = "sequence_sum"
    divisible_by_weights: ClassVar[bool] = False

    def weights(self, log_q: Tensor, mask: Tensor) -> Tensor:
        """Derivative of S by log q."""
        return suffix_sums(log_q, mask, alpha=0.0)

    def terms(self, log_q: Tensor, mask: Tensor, weights: Tensor) -> Tensor:
        """-S of every anchor, [A]; summed as logarithms, whose gradient stays finite when a q vanishes."""
        return -(log_q.cumsum(dim=-1).exp() * mask).sum(dim=-1)
