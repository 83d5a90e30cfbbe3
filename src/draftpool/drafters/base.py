"""The protocol of all drafters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


@dataclass(frozen=True)
class Draft:
    """A draft block.

    Attributes:
        ids: Proposed token ids [k].
        log_q: Log-probabilities [k, draft vocabulary] at temperature 1, float32, or None for model-free drafters.
        vocabulary: Token id of every column of ``log_q`` [draft vocabulary], or None if the columns are token ids.
    """

    ids: Tensor
    log_q: Tensor | None
    vocabulary: Tensor | None


class Drafter(Protocol):
    """Something that proposes the next tokens of one sequence.

    A drafter sees the committed tokens and the target's taps of all of them but the last (the anchor, which the
    target has not read yet). `catch_up` may be called with many tokens at once after the drafter sat idle.
    """

    name: str
    k: int

    def prefill(self, prompt: Tensor, taps: Tensor) -> None:
        """Start a sequence: prompt ids [n], taps [n, taps x hidden]."""

    def catch_up(self, tokens: Tensor, taps: Tensor) -> None:
        """Read tokens [m] that the target has read since, with their taps [m, taps x hidden]."""

    def draft(self, anchor: int) -> Draft:
        """Propose the k tokens after ``anchor``."""

    def state_bytes(self) -> int:
        """Memory of this sequence's state in bytes."""
