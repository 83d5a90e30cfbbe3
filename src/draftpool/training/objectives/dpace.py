"""D-PACE: weights from the drafter's own confidence (arXiv 2605.18810; reference notes section 3.1).

With smoothed confidence qt_i = (1 - alpha) q_i + alpha and prefix products P_j = prod_{i<=j} qt_i, the
expected accepted length is about S = sum_m P_m, and dS / dlog q_j = sum_{m>=j} P_m at alpha = 0: what a slot
earns for itself and for all that stand behind it. Unsupervised slots are neutral in the products and left out
of the sums.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from draftpool.training.objectives.base import Objective, Reduction, register_objective

if TYPE_CHECKING:
    from torch import Tensor


# Of everything that is weighed by, or is, the surrogate S.
PARALLEL_ONLY = (
    "its weights are the derivative of the expected accepted length of a block whose slots are all drafted at once "
    "from the same prefix (parallel drafting, arXiv 2605.18810); a sequential drafter's later slots are conditioned "
    "on the earlier drafted tokens, so each step's cross-entropy already stands for itself"
)


class _Confidence(Objective):
    """`alpha` in [0, 1] smooths the confidence: 0 is the raw one (training may collapse), 1 ignores it."""

    refusal: ClassVar[str] = PARALLEL_ONLY
    published_reduction: ClassVar[Reduction] = "sequence_sum"
    divisible_by_weights: ClassVar[bool] = False

    alpha: float = Field(default=0.5, ge=0.0, le=1.0)


@register_objective("dpace")
class DPace(_Confidence):
    """D-PACE: w_j = sum_{m>=j} P_m."""

    def weights(self, log_q: Tensor, mask: Tensor) -> Tensor:
        """Suffix sums of the prefix products."""
        return suffix_sums(log_q, mask, self.alpha)


@register_objective("dpace_cumulative")
class DPaceCumulative(_Confidence):
    """Ablation "cumulative confidence only": w_j = P_j, the chance of acceptance up to slot j."""

    def weights(self, log_q: Tensor, mask: Tensor) -> Tensor:
        """Prefix products."""
        return smoothed(log_q, mask, self.alpha).cumprod(dim=-1)


@register_objective("dpace_continuation")
class DPaceContinuation(_Confidence):
    """Ablation "continuation value only": w_j = f_j = 1 + sum_{m>j} prod_{i=j+1..m} qt_i (D-PACE: P f)."""

    def weights(self, log_q: Tensor, mask: Tensor) -> Tensor:
        """Continuation values."""
        confidence = smoothed(log_q, mask, self.alpha)
        values = mask.float()
        # A recursion from the last slot: suffix sums divided by P_j would fail at P_j = 0.
        for slot in range(log_q.shape[-1] - 2, -1, -1):
            values[:, slot] += confidence[:, slot + 1] * values[:, slot + 1]
        return values


def smoothed(log_q: Tensor, mask: Tensor, alpha: float) -> Tensor:
    """Smoothed confidence (1 - alpha) q + alpha, [A, K], 1 at unsupervised slots."""
    return ((1.0 - alpha) * log_q.exp() + alpha).masked_fill(~mask, 1.0)


def suffix_sums(log_q: Tensor, mask: Tensor, alpha: float) -> Tensor:
    """Credit of every slot, [A, K]: sum of the prefix products P_m over the supervised slots m >= j."""
    products = smoothed(log_q, mask, alpha).cumprod(dim=-1) * mask
    return products.flip(-1).cumsum(dim=-1).flip(-1)
