"""Batched generation: every sequence has its own length, ended ones leave the batch and others enter."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from draftpool.decoding.verification import target_choices
from draftpool.targets.base import TargetModel

# Rows of ended answers wait until a quarter of the batch is free, so that prompts are read in groups.
REFILL_SHARE = 0.25


@dataclass
class Answer:
    """One answer: ids, why it ended, and taps [prompt + answer - 1, taps x hidden] in bfloat16 (or None)."""

    prompt: list[int]
    ids: list[int]
    finish: str
    taps: Tensor | None


@dataclass(frozen=True)
class Text:
    """Which text of a prompt is written: what keys its noise, live and here."""

    prompt_id: str
    sample: int = 0


class _Row:
    """An answer in the making and the buffer its taps are written to."""

    def __init__(self, index: int, prompt: list[int], max_new_tokens: int):
        self.index, self.prompt = index, prompt
        self.ids: list[int] = []
        self.taps: Tensor | None = None
        self.room, self.filled = len(prompt) + max_new_tokens - 1, 0

    def keep(self, taps: Tensor) -> None:
        """Write taps [n, taps x hidden] behind those that are there."""
        if self.taps is None:
            self.taps = torch.empty(self.room, taps.shape[1], dtype=torch.bfloat16)
        self.taps[self.filled : self.filled + len(taps)] = taps
        self.filled += len(taps)

    def answer(self, finish: str) -> Answer:
        taps = None if self.taps is None else self.taps[: self.filled].clone()
        return Answer(self.prompt, self.ids, finish, taps)


class _Batch:
    def __init__(
        self,
        target: TargetModel,
        size: int,
        ends: list[int],
        max_new_tokens: int,
        with_taps: bool,
        temperature: float,
        texts: list[Text],
        top_p: float,
    ):
        self.target, self.ends = target, ends
        self.max_new_tokens, self.with_taps = max_new_tokens, with_taps
        self.temperature, self.top_p, self.texts = temperature, top_p, texts
        self.rows: list[_Row | None] = [None] * size
        self.cache = None

    @property
    def free(self) -> list[int]:
        return [place for place, row in enumerate(self.rows) if row is None]

    @property
    def taken(self) -> list[int]:
        return [place for place, row in enumerate(self.rows) if row is not None]

    def enter(self, prompts: dict[int, list[int]]) -> Iterator[tuple[int, Answer]]:
        """Read prompts (by index) into free rows; the first group holds the longest prompt."""
        places, counts = self.free[: len(prompts)], [len(prompt) for prompt in prompts.values()]
        whole = len(prompts) == len(self.rows)
        if whole:
            own = self.cache = self.target.new_cache(max(counts) + self.max_new_tokens, len(self.rows))
        else:
            # Beside the batch, so that the rows at work are left alone.
            own = self.target.new_cache(max(counts), len(prompts))
        padded = [prompt + [0] * (max(counts) - len(prompt)) for prompt in prompts.values()]
        output = self.target.forward(torch.tensor(padded, device=self.target.device), own, "last", counts)
        if not whole:
            self.cache.place(places, own)
        for place, (index, prompt) in zip(places, prompts.items(), strict=True):
            self.rows[place] = _Row(index, prompt, self.max_new_tokens)
        yield from self._collect(places, output, counts)

    def step(self) -> Iterator[tuple[int, Answer]]:
        """Write one token of every answer at work."""
        taken = self.taken
        tokens = [0 if row is None else row.ids[-1] for row in self.rows]
        counts = [int(row is not None) for row in self.rows]
        ids = torch.tensor(tokens, device=self.target.device)[:, None]
        output = self.target.forward(ids, self.cache, "last", counts)
        yield from self._collect(taken, output, [1] * len(taken), select=taken)

    def _collect(
        self, places: list[int], output, counts: list[int], select: list[int] | None = None
    ) -> Iterator[tuple[int, Answer]]:
        chosen = self._choices(output.logits[:, -1], places, select)
        taps = output.taps.to("cpu", torch.bfloat16) if self.with_taps else None
        for place, source, count in zip(places, select or range(len(places)), counts, strict=True):
            row = self.rows[place]
            if taps is not None:
                row.keep(taps[source, :count])
            row.ids.append(chosen[source])
            ended = chosen[source] in self.ends
            if ended or len(row.ids) >= self.max_new_tokens:
                self.rows[place] = None
                yield row.index, row.answer("eos" if ended else "limit")

    def _choices(self, logits: Tensor, places: list[int], select: list[int] | None) -> list[int]:
        """The target's next token of every row of a forward pass; rows without an answer hold anything."""
        if self.temperature == 0.0:
            return logits.argmax(dim=-1).tolist()
        chosen = [0] * len(logits)
        for place, source in zip(places, select or range(len(places)), strict=True):
            row = self.rows[place]
            text = self.texts[row.index]
            own = logits[source : source + 1]
            key = (text.sample, text.prompt_id, len(row.ids))
            chosen[source] = int(target_choices(own, self.temperature, *key, self.top_p))
        return chosen

    def shrink(self) -> None:
        """Take free rows out of the batch."""
        taken = self.taken
        self.cache.keep(taken)
        self.rows = [self.rows[place] for place in taken]


def answer_prompts(
    target: TargetModel,
    prompts: list[list[int]],
    ends: list[int],
    max_new_tokens: int,
    batch: int,
    with_taps: bool,
    temperature: float = 0.0,
    texts: list[Text] | None = None,
    top_p: float = 1.0,
) -> Iterator[tuple[int, Answer]]:
    """Decode as the target alone would; yields (index of the prompt, answer) as answers end.

    Prompts enter from the longest to the shortest, so that those read together have near-equal lengths.

    Args:
        target: The model.
        prompts: Token ids of each prompt.
        ends: Ids that end an answer (they are kept as its last token).
        max_new_tokens: Longest answer.
        batch: Sequences at the same time; a target without batches gets one.
        with_taps: Keep taps of every position but the last (which no drafter sees).
        temperature: 0 is greedy (first index on ties); else as `target_choices` samples, live and here alike.
        texts: Above temperature 0, which text is written of each prompt.
        top_p: Above temperature 0, the probability of the set of most likely tokens that is sampled from.
    """
    size = min(batch if target.supports_batches else 1, len(prompts))
    work = _Batch(target, size, ends, max_new_tokens, with_taps, temperature, texts or [], top_p)
    waiting = deque(sorted(range(len(prompts)), key=lambda index: (-len(prompts[index]), index)))
    while waiting or work.taken:
        n_free = len(work.free)
        many_free = n_free >= REFILL_SHARE * len(work.rows)
        if waiting and many_free:
            group = [waiting.popleft() for _ in range(min(n_free, len(waiting)))]
            yield from work.enter({index: prompts[index] for index in group})
        else:
            if many_free:
                work.shrink()
            yield from work.step()
