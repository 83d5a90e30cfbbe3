"""The protocol of all drafters, and how a kind of drafter is found."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeVar, runtime_checkable

from torch import Tensor

# Picks a column of the draft vocabulary in every row of log_q [n, draft vocabulary]; the slot of the first row follows.
Choose = Callable[[Tensor, int], Tensor]

DrafterClass = TypeVar("DrafterClass", bound=type)


def register_drafter(kind: str) -> Callable[[DrafterClass], DrafterClass]:
    """Class decorator: drafters of `kind` (a literal string, found by scanning the sources) are loaded by this class.

    The class has `load(name, folder, target)`, a class method that returns a drafter.
    """

    def mark(cls: DrafterClass) -> DrafterClass:
        cls.kind = kind
        return cls

    return mark


def most_likely(log_q: Tensor, first_slot: int) -> Tensor:
    """The most likely column of every row [n] of log_q [n, draft vocabulary], the first one on ties."""
    return log_q.argmax(dim=-1)


@dataclass(frozen=True)
class Draft:
    """A draft block.

    Attributes:
        ids: Proposed token ids [k], fewer where the drafter has less to say.
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

    Attributes:
        name: For messages.
        k: Longest draft.
        modelled: Whether drafts come with a distribution; model-free drafters have none.
    """

    name: str
    k: int
    modelled: bool

    def fits(self, max_length: int) -> bool:
        """Whether a sequence of ``max_length`` tokens can be drafted to its end."""

    def reset(self, max_length: int) -> None:
        """Forget the sequence and make room for one of up to ``max_length`` tokens, which must fit."""

    def prefill(self, prompt: Tensor, taps: Tensor) -> None:
        """Start a sequence: prompt ids [n], taps [n, taps x hidden]."""

    def catch_up(self, tokens: Tensor, taps: Tensor) -> None:
        """Read tokens [m] that the target has read since, with their taps [m, taps x hidden]."""

    def draft(self, anchor: int, choose: Choose = most_likely) -> Draft:
        """Propose up to k tokens after ``anchor``, each picked by ``choose`` where there is a distribution."""

    def state_bytes(self) -> int:
        """Memory of this sequence's state in bytes."""

    def weights(self) -> list[Tensor]:
        """The drafter's own weights; what it shares with the target is left out."""


@runtime_checkable
class Remembering(Protocol):
    """A drafter with a memory of finished texts.

    Attributes:
        learns: Whether finished texts are put in: what it drafts then depends on the stream before the prompt.
        memory: What it remembers; every run along a stream has its own.
    """

    learns: bool
    memory: object

    def new_memory(self) -> object:
        """What is remembered when a stream begins."""

    def remember(self, output: list[int]) -> None:
        """Take a finished text in."""


def learns(drafter: object) -> bool:
    """Whether a drafter's drafts depend on the stream before the prompt."""
    return isinstance(drafter, Remembering) and drafter.learns


@dataclass(frozen=True)
class Everywhere:
    """What a drafter would propose at every anchor of one text of n answer tokens (anchors 0 .. n - 2).

    Attributes:
        ids: Proposed ids [n - 1, k], 0 behind a shorter draft.
        drafted: Tokens of each draft [n - 1].
        log_q: Log-probabilities [n - 1, k, draft vocabulary], or None for model-free drafters.
        vocabulary: As in :class:`Draft`.
    """

    ids: Tensor
    drafted: Tensor
    log_q: Tensor | None
    vocabulary: Tensor | None


@runtime_checkable
class DraftsEverywhere(Protocol):
    """A drafter that has a faster way to draft at all anchors than one after the other."""

    def everywhere(self, prompt: list[int], answer: list[int], taps: Tensor) -> Everywhere:
        """Draft at every anchor of an answer; taps [prompt + n - 1, taps x hidden]."""
