"""One text in the making: its prompt read by the target, what was committed, and how far each drafter has read."""

from __future__ import annotations

import time
from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from draftpool.drafters.base import Choose, Draft, Drafter, most_likely
from draftpool.drafters.offload import OffloadedDrafter
from draftpool.targets.base import TargetModel
from draftpool.targets.load import synchronise


@dataclass
class Prefilled:
    """A prompt that the target has read; every selector starts from it by rolling the cache back.

    Attributes:
        prompt: Token ids.
        cache: The target's cache, holding the prompt (and leftovers of the last run behind it).
        taps: Raw taps [room, taps x hidden]; rows of the prompt are filled.
        first_logits: Logits [1, vocabulary] of the answer's first token.
        seconds: Time of the target's prefill.
    """

    prompt: list[int]
    cache: object
    taps: Tensor
    first_logits: Tensor
    seconds: float

    @property
    def length(self) -> int:
        """Prompt tokens."""
        return len(self.prompt)


@dataclass(frozen=True)
class Sampling:
    """How the target's text is drawn and where it ends.

    Attributes:
        max_new_tokens: Longest answer.
        ends: Ids that end it.
        temperature: T >= 0; 0 is greedy.
        sample_seed: Which of several texts of a prompt.
        top_p: In (0, 1]; the text is drawn from the smallest set of most likely tokens that has it.
        verification: Which draft tokens are kept (`draftpool.decoding.verification`, `draftpool.decoding.rejection`).
    """

    max_new_tokens: int
    ends: Collection[int]
    temperature: float = 0.0
    sample_seed: int = 0
    top_p: float = 1.0
    verification: Literal["match", "rejection"] = "match"

    @property
    def rejects(self) -> bool:
        """Whether drafts are sampled and rejected; greedily both rules are the same one."""
        return self.verification == "rejection" and self.temperature > 0.0


def prefill(target: TargetModel, prompt: list[int], max_new_tokens: int, k_pool: int) -> Prefilled:
    """Let the target read a prompt."""
    synchronise(target.device)
    started = time.perf_counter()
    # A last round may overshoot the limit by a whole block before it is cut.
    room = len(prompt) + max_new_tokens + k_pool + 1
    cache = target.new_cache(room)
    output = target.forward(torch.tensor([prompt], device=target.device), cache, "last")
    taps = torch.zeros(room, output.taps.shape[-1], device=target.device, dtype=target.dtype)
    taps[: len(prompt)] = output.taps[0]
    synchronise(target.device)
    return Prefilled(prompt, cache, taps, output.logits[0], time.perf_counter() - started)


class Sequence:
    """The committed text of one run and the drafters' progress in reading it.

    Attributes:
        answer: What was committed.
        fits: Whether each arm can draft to the end of this text; one with too few positions drafts nothing.
    """

    def __init__(
        self, start: Prefilled, target: TargetModel, arms: dict[str, Drafter | None], sampling: Sampling
    ):
        self.start, self.target, self.arms = start, target, arms
        start.cache.rollback(start.cache.lengths[0] - start.length)
        self.answer: list[int] = []
        self.read = dict.fromkeys(arms, 0)
        length = start.length + sampling.max_new_tokens
        self.fits = {name: drafter is None or drafter.fits(length) for name, drafter in arms.items()}
        for name, drafter in arms.items():
            if drafter is not None and self.fits[name]:
                drafter.reset(length)

    @property
    def anchor_place(self) -> int:
        """Place of the anchor in the whole sequence: all before it was read by the target."""
        return self.start.length + len(self.answer) - 1

    def catch_up(self, arm: str) -> None:
        """Let a drafter read what was committed while it sat idle."""
        drafter, read, end = self.arms[arm], self.read[arm], self.anchor_place
        if isinstance(drafter, OffloadedDrafter) and self.fits[arm]:
            drafter.activate()
        if drafter is None or not self.fits[arm] or read == end:
            return
        unread = self.unread(read)
        drafter.prefill(*unread) if read == 0 else drafter.catch_up(*unread)
        self.read[arm] = end

    def unread(self, read: int) -> tuple[Tensor, Tensor]:
        """Ids and taps of the committed tokens from place ``read`` up to the anchor."""
        tokens = (self.start.prompt + self.answer)[read : self.anchor_place]
        return torch.tensor(tokens, device=self.target.device), self.start.taps[read : self.anchor_place]

    def draft(self, arm: str, choose: Choose = most_likely) -> Draft | None:
        """What an arm proposes after the anchor; None for plain decoding and an arm with too few positions."""
        drafter = self.arms[arm]
        return None if drafter is None or not self.fits[arm] else drafter.draft(self.answer[-1], choose)

    def verify(self, draft_ids: Tensor | None) -> Tensor:
        """Target logits [k + 1, vocabulary] after the anchor and every draft token [k]; taps are kept."""
        block = torch.tensor([self.answer[-1]], device=self.target.device)
        if draft_ids is not None:
            block = torch.cat((block, draft_ids))
        output = self.target.forward(block[None], self.start.cache)
        place = self.anchor_place
        self.start.taps[place : place + len(block)] = output.taps[0]
        return output.logits[0]

    def commit(self, tokens: list[int], drafted: int) -> None:
        """Append tokens and take what was rejected out of the cache."""
        self.start.cache.rollback(drafted + 1 - len(tokens))
        self.answer.extend(tokens)
