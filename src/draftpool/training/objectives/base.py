"""The protocol of all training objectives of drafters, and the reductions.

A drafter predicts K slots after every anchor: a block drafter all at once, a sequential one step by step. An
objective sees, for A anchors of the sequences in a batch, the log-probability of the training token at every
slot, log q [A, K], and which slots are supervised, mask [A, K]. It gives each slot a weight without gradient;
the loss of an anchor is sum_k w_k * (-log q_k). An objective that reads the target puts its divergence from
the target's distribution in the place of -log q_k. Everything is float32.

Torch is imported by callers only: configurations are checked against these classes where it is not wanted.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, Field, model_validator

from draftpool.errors import DraftpoolError
from draftpool.registry import list_registered, load_registered, validate_parameters

if TYPE_CHECKING:
    from torch import Tensor

PACKAGE = "draftpool.training.objectives"
DECORATOR = "register_objective"

Reduction = Literal["anchor_mean", "weight_mean", "sequence_sum"]


# Smallest divisor: where nothing is supervised the sum is 0 and so is the loss.
SMALLEST_DIVISOR = 1e-30


@dataclass(frozen=True)
class LossReport:
    """Loss of one batch and what its log needs.

    Attributes:
        loss: scalar with gradient.
        weight_share: [K], mean weight of each slot over its supervised anchors, divided by the sum over
            slots.
        confidence: [K], mean q of each slot over its supervised anchors; 0 where there are none.
    """

    loss: Tensor
    weight_share: Tensor
    confidence: Tensor


@dataclass(frozen=True)
class LossSums:
    """What adds up over the parts of a batch: its loss is the sum of all `total` divided by the sum of all `divisor`.

    Only `total` has a gradient, so that the gradient of the whole batch's loss is the sum of the parts' gradients of
    `total`, divided once by the batch's divisor.

    Attributes:
        total: scalar, what the reduction sums up.
        divisor: scalar, what the reduction divides by.
        weights: [K], sum of the weights of each slot.
        confidence: [K], sum of q over the supervised anchors of each slot.
        supervised: [K], supervised anchors of each slot.
    """

    total: Tensor
    divisor: Tensor
    weights: Tensor
    confidence: Tensor
    supervised: Tensor

    def __add__(self, other: LossSums) -> LossSums:
        """Sums of both parts."""
        return LossSums(*(getattr(self, name) + getattr(other, name) for name in self.__dataclass_fields__))

    def detached(self) -> LossSums:
        """The same sums without the gradient."""
        return replace(self, total=self.total.detach())

    def numbers(self) -> Tensor:
        """All sums side by side, float64[2 + 3 K], without gradient."""
        slots = len(self.weights)
        numbers = self.weights.new_zeros(2 + 3 * slots).double()
        numbers[0], numbers[1] = self.total.detach(), self.divisor
        for place, sums in enumerate((self.weights, self.confidence, self.supervised)):
            numbers[2 + place * slots : 2 + (place + 1) * slots] = sums
        return numbers

    @classmethod
    def nothing(cls, like: Tensor, slots: int) -> LossSums:
        """The sums of no sequence at all, on the device of ``like``."""
        zeros = like.new_zeros(slots)
        return cls(like.new_zeros(()), like.new_zeros(()), zeros, zeros, zeros)

    @classmethod
    def of_numbers(cls, numbers: Tensor) -> LossSums:
        """The sums of :meth:`numbers`."""
        return cls(numbers[0], numbers[1], *numbers[2:].chunk(3))

    def report(self) -> LossReport:
        """Loss and log of a batch that these are all sums of."""
        supervised = self.supervised.clamp(min=1)
        mean_weight = self.weights / supervised
        return LossReport(
            loss=self.total / self.divisor.clamp(min=SMALLEST_DIVISOR),
            weight_share=mean_weight / mean_weight.sum().clamp(min=SMALLEST_DIVISOR),
            confidence=self.confidence / supervised,
        )


class Objective(BaseModel, ABC):
    """An objective and its parameters; a family implements `weights`.

    `reduction` says how anchors become one number (`sum_and_divisor`); ``published`` is the one of the objective's own
    paper, `published_reduction`.

    Attributes:
        kinds: kinds of drafter that it trains.
        refusal: why it trains no others, for the message; a clause that can follow a colon.
        reads_target: whether a slot's loss is `divergence` instead of -log q.
    """

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    kind: ClassVar[str] = ""
    kinds: ClassVar[frozenset[str]] = frozenset({"block"})
    refusal: ClassVar[str] = ""
    reads_target: ClassVar[bool] = False
    #: Whether p counts what lies outside the drafter's vocabulary; else p is renormalised within it.
    whole_target: ClassVar[bool] = False
    published_reduction: ClassVar[Reduction]
    divisible_by_weights: ClassVar[bool] = True

    block_size: int = Field(ge=2)
    reduction: Literal["anchor_mean", "weight_mean", "sequence_sum", "published"] = "anchor_mean"

    @model_validator(mode="after")
    def _check_reduction(self) -> Objective:
        if self.reduction == "weight_mean" and not self.divisible_by_weights:
            raise DraftpoolError(
                "weight_mean divides by the sum of the weights, which cancels the credit that confident "
                "blocks earn and leaves only the shape of the weights",
                f"objective {self.kind}, reduction",
                "use anchor_mean, sequence_sum or published",
            )
        return self

    @abstractmethod
    def weights(self, log_q: Tensor, mask: Tensor) -> Tensor:
        """Weight of every slot.

        Args:
            log_q: float32[A, K] without gradient, 0 where masked.
            mask: bool[A, K], supervised slots.

        Returns:
            float32[A, K]; what stands at masked slots is dropped.
        """

    def terms(self, log_q: Tensor, mask: Tensor, weights: Tensor) -> Tensor:
        """Loss of every anchor, [A]: sum_k w_k * (-log q_k).

        Args:
            log_q: float32[A, K] with gradient, 0 where masked; minus the divergence if the target is read.
            mask: bool[A, K].
            weights: what `weights` returned, 0 where masked, without gradient.
        """
        return -(weights * log_q).sum(dim=-1)

    def divergence(self, log_q: Tensor, p: Tensor) -> Tensor:
        """How far the drafter is from the target at n slots; for objectives with `reads_target` only.

        Args:
            log_q: float32[n, draft vocabulary], the drafter's log-probabilities, with gradient.
            p: float32[n, draft vocabulary], the target's probabilities of the same columns at temperature 1,
                without gradient. A row adds up to less than 1 where the draft vocabulary is reduced.

        Returns:
            float32[n], in nats where it is a KL divergence, with gradient.
        """
        raise NotImplementedError(f"objective {self.kind} does not read the target")

    def loss(
        self,
        log_q: Tensor,
        mask: Tensor,
        sequence_index: Tensor,
        n_sequences: int,
        divergence: Tensor | None = None,
    ) -> LossReport:
        """Loss of a whole batch of anchors (arguments and errors: :meth:`sums`)."""
        return self.sums(log_q, mask, sequence_index, n_sequences, divergence).report()

    def sums(
        self,
        log_q: Tensor,
        mask: Tensor,
        sequence_index: Tensor,
        n_sequences: int,
        divergence: Tensor | None = None,
    ) -> LossSums:
        """Sums over a batch of anchors, or over a part of one; log q must be finite at supervised slots.

        Args:
            log_q: [A, K], any float type; computed with in float32. Masked slots may hold anything.
            mask: bool[A, K], supervised slots.
            sequence_index: int64[A], the sequence of each anchor, in [0, n_sequences). A sequence's anchors are all
                in the same part of a batch.
            n_sequences: sequences in the batch or part.
            divergence: [A, K], what `divergence` gave for every slot, if the objective reads the target. Masked
                slots may hold anything. log q then serves the report only.

        Raises:
            DraftpoolError: shapes that do not fit together or to the block size; a divergence that is missing
                or not wanted.
        """
        slots = self.block_size - 1
        if log_q.shape != mask.shape or log_q.shape != (len(sequence_index), slots):
            raise DraftpoolError(
                f"log q {tuple(log_q.shape)}, mask {tuple(mask.shape)}, {len(sequence_index)} sequences",
                f"objective {self.kind}",
                f"pass one row per anchor with {slots} slots (block size {self.block_size} less the anchor)",
            )
        self._check_divergence(divergence, mask)
        log_q = log_q.float().masked_fill(~mask, 0.0)
        constant = log_q.detach()
        weights = self.weights(constant, mask).masked_fill(~mask, 0.0)
        gain = log_q if divergence is None else -divergence.float().masked_fill(~mask, 0.0)
        terms = self.terms(gain, mask, weights)
        reduction = self.published_reduction if self.reduction == "published" else self.reduction
        total, divisor = sum_and_divisor(terms, sequence_index, n_sequences, weights, mask, reduction)
        return LossSums(
            total=total,
            divisor=divisor,
            weights=weights.sum(dim=0),
            confidence=(constant.exp() * mask).sum(dim=0),
            supervised=mask.sum(dim=0),
        )

    def _check_divergence(self, divergence: Tensor | None, mask: Tensor) -> None:
        where = f"objective {self.kind}"
        if divergence is None and self.reads_target:
            raise DraftpoolError(
                "it reads the target, but no divergence was given",
                where,
                "pass loss(..., divergence=...), what its `divergence` gives for every slot",
            )
        if divergence is not None and not self.reads_target:
            raise DraftpoolError(
                "a divergence was given, but it does not read the target",
                where,
                "leave the divergence out, or use an objective that reads the target",
            )
        if divergence is not None and divergence.shape != mask.shape:
            raise DraftpoolError(
                f"divergence {tuple(divergence.shape)}, mask {tuple(mask.shape)}",
                where,
                "pass one value per anchor and slot",
            )


def sum_and_divisor(
    terms: Tensor,
    sequence_index: Tensor,
    n_sequences: int,
    weights: Tensor,
    mask: Tensor,
    reduction: Reduction,
) -> tuple[Tensor, Tensor]:
    """What a reduction sums up and what it divides by; both add up over the parts of a batch, and only the first has
    a gradient. An anchor is valid if it has at least one supervised slot.

    ``anchor_mean``: each sequence's sum divided by its valid anchors, averaged over the sequences that have
    any (SpecForge PR 848). ``weight_mean``: total divided by the sum of all weights (DFlash).
    ``sequence_sum``: total divided by the number of sequences (D-PACE). Nothing supervised sums up to 0.

    Args:
        terms: float32[A], loss of every anchor, 0 where nothing is supervised.
        sequence_index: int64[A].
        n_sequences: sequences in the batch or part.
        weights: float32[A, K], 0 where masked, without gradient.
        mask: bool[A, K].
        reduction: one of the three.
    """
    if reduction == "sequence_sum":
        return terms.sum(), weights.new_full((), n_sequences)
    if reduction == "weight_mean":
        return terms.sum(), weights.sum()
    if reduction != "anchor_mean":
        raise DraftpoolError(
            f"unknown reduction {reduction!r}", "objective", f"use one of: {', '.join(get_args(Reduction))}"
        )
    valid = terms.new_zeros(n_sequences).index_add(0, sequence_index, mask.any(dim=-1).to(terms.dtype))
    sums = terms.new_zeros(n_sequences).index_add(0, sequence_index, terms)
    return (sums / valid.clamp(min=1)).sum(), (valid > 0).sum()


ObjectiveClass = TypeVar("ObjectiveClass", bound=type[Objective])


def register_objective(kind: str) -> Callable[[ObjectiveClass], ObjectiveClass]:
    """Class decorator: make the class known as `kind` (a literal string; found by scanning the sources)."""

    def mark(cls: ObjectiveClass) -> ObjectiveClass:
        cls.kind = kind
        return cls

    return mark


def objectives_for(drafter_kind: str) -> list[str]:
    """Names of the objectives that train drafters of a kind, sorted."""
    names = list_registered(PACKAGE, DECORATOR)
    return [name for name in names if drafter_kind in load_registered(PACKAGE, DECORATOR, name).kinds]


def make_objective(cfg: Mapping[str, Any], block_size: int, drafter_kind: str = "block") -> Objective:
    """Build an objective.

    Args:
        cfg: ``{"kind": "dpace", "alpha": 0.5, "reduction": "anchor_mean"}``: the kind, its parameters, the
            reduction.
        block_size: tokens of a block, its anchor included; K = block_size - 1. A sequential drafter's draft
            length plus one.
        drafter_kind: kind of the drafter that is trained.

    Raises:
        DraftpoolError: unknown kind or parameter (the message lists what exists), value out of range, a
            reduction that the objective does not allow, a kind of drafter that it does not train.
    """
    kind = cfg.get("kind")
    if not isinstance(kind, str):
        raise DraftpoolError(f"no kind in {dict(cfg)}", "objective", "write e.g. kind: dpace")
    where = f"objective {kind}"
    if "block_size" in cfg:
        raise DraftpoolError(
            "unknown parameter 'block_size'", where, "set the block size in the drafter's model block"
        )
    parameters = {key: value for key, value in cfg.items() if key != "kind"}
    model = load_registered(PACKAGE, DECORATOR, kind)
    if drafter_kind not in model.kinds:
        fitting = ", ".join(objectives_for(drafter_kind))
        raise DraftpoolError(
            f"not for drafters of kind {drafter_kind!r}" + (f": {model.refusal}" if model.refusal else ""),
            where,
            f"use one of: {fitting}" if fitting else f"no objective trains kind {drafter_kind!r}",
        )
    return validate_parameters(model, {**parameters, "block_size": block_size}, where, hidden=("block_size",))
