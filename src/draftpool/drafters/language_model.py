"""Drafting with a causal language model of its own cache: what `independent` and `early_exit` drafters share."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from draftpool.drafters.base import Choose, Draft, Everywhere, most_likely
from draftpool.errors import DraftpoolError
from draftpool.targets.base import TargetModel

# Anchors that are drafted from at the same time when all of a text are.
TOGETHER = 32


class LanguageModelDrafter:
    """Writes a few tokens with a small causal language model (protocol :class:`draftpool.drafters.base.Drafter`).

    Args:
        name: For messages.
        lm: The model; column c of its logits stands for token ``vocabulary[c]``.
        k: Tokens of a draft.
        vocabulary: Token ids it may propose [draft vocabulary]; further columns of its logits are not used.
        shares: What it shares with the target: `nothing`, its `embedding`, or `everything`.
    """

    modelled = True
    #: What it read while drafting and came true need not be read again (`profile_costs` tells the price of rounds).
    reads_ahead = True

    def __init__(
        self,
        name: str,
        lm: TargetModel,
        k: int,
        vocabulary: Tensor,
        shares: Literal["nothing", "embedding", "everything"] = "nothing",
    ):
        self.name, self.lm, self.k, self.vocabulary, self.shares = name, lm, k, vocabulary, shares
        self.cache, self.room, self.length = None, 0, 0
        # Tokens in the cache behind `length`: the last anchor and what was drafted from it.
        self.ahead: list[int] = []

    @property
    def positions(self) -> int:
        """Tokens that the model can read."""
        return self.lm.hf_config.max_position_embeddings

    def fits(self, max_length: int) -> bool:
        """Whether a sequence of ``max_length`` tokens and a draft behind it have positions."""
        return max_length + self.k <= self.positions

    def reset(self, max_length: int) -> None:
        """Forget the sequence and make room for one of up to ``max_length`` tokens.

        Raises:
            DraftpoolError: If the model has fewer positions.
        """
        if not self.fits(max_length):
            raise DraftpoolError(
                f"needs {max_length + self.k} positions, has {self.positions}",
                f"drafter `{self.name}`",
                "use shorter prompts",
            )
        if max_length + self.k > self.room:
            self.room = max_length + self.k
            self.cache = self.lm.new_cache(self.room)
        self.cache.rollback(self.cache.lengths[0])
        self.length, self.ahead = 0, []

    def prefill(self, prompt: Tensor, taps: Tensor) -> None:
        """Start a sequence: prompt ids [n]; the taps are not looked at."""
        self.cache.rollback(self.cache.lengths[0])
        self.length, self.ahead = 0, []
        self.catch_up(prompt, taps)

    @torch.inference_mode()
    def catch_up(self, tokens: Tensor, taps: Tensor) -> None:
        """Read tokens [m]; the taps are not looked at. What was read while drafting and came true stays."""
        read = tokens.tolist() if self.ahead else []
        same = 0
        while same < min(len(read), len(self.ahead)) and read[same] == self.ahead[same]:
            same += 1
        self.cache.rollback(len(self.ahead) - same)
        self.ahead = []
        if same < len(tokens):
            self.lm.forward(tokens[None, same:], self.cache, "none")
        self.length += len(tokens)

    @torch.inference_mode()
    def draft(self, anchor: int, choose: Choose = most_likely) -> Draft:
        """Propose the k tokens after ``anchor``, one after the other."""
        self.cache.rollback(len(self.ahead))
        token = torch.tensor([anchor], device=self.vocabulary.device)
        rows, ids = [], []
        for slot in range(self.k):
            logits = self.lm.forward(token[None], self.cache, "last").logits[0]
            log_q = logits[:, : len(self.vocabulary)].float().log_softmax(dim=-1)
            token = self.vocabulary[choose(log_q, slot)]
            rows.append(log_q)
            ids.append(token)
        drafted = torch.cat(ids)
        # The last drafted token was not read.
        self.ahead = [anchor, *drafted[:-1].tolist()]
        return Draft(drafted, torch.cat(rows), self.vocabulary)

    def state_bytes(self) -> int:
        """Memory of the sequence's keys and values in bytes."""
        return self.lm.cache_bytes(self.length)

    def weights(self) -> list[Tensor]:
        """Own weights."""
        shared = {"nothing": 0, "embedding": 1}.get(self.shares)
        return [] if shared is None else self.lm.weights()[shared:]


class FastLanguageModelDrafter(LanguageModelDrafter):
    """The same on the fast path, which drafts at many anchors of a text together."""

    def move(self, device: torch.device) -> None:
        """Put the weights on another device (:mod:`draftpool.drafters.offload`)."""
        self.lm.move(device, embedding=self.shares == "nothing")

    @torch.inference_mode()
    def everywhere(self, prompt: list[int], answer: list[int], taps: Tensor) -> Everywhere:
        """Draft at every anchor of an answer: the text is read once, then anchors continue it side by side."""
        device, n = taps.device, len(answer) - 1
        text = torch.tensor(prompt + answer[:-1], device=device)
        whole = self.lm.new_cache(len(text) + self.k)
        first = self.lm.forward(text[None], whole).logits[0, len(prompt) :]
        together, cache = min(TOGETHER, n), None
        if self.k > 1:
            cache = self.lm.new_cache(len(text) + self.k, together)
            for row in range(together):
                cache.place([row], whole)
        ids, rows = [], []
        # From the back: a draft overwrites what lies behind its anchor, which earlier anchors never read.
        for last in range(n, 0, -together):
            start = max(0, last - together)
            if cache is not None:
                if last - start < together:
                    cache.keep(list(range(last - start)))
                cache.lengths = [len(prompt) + place + 1 for place in range(start, last)]
            logits = first[start:last]
            own_rows, own_ids = [], []
            for slot in range(self.k):
                log_q = logits[:, : len(self.vocabulary)].float().log_softmax(dim=-1)
                own_rows.append(log_q)
                own_ids.append(self.vocabulary[log_q.argmax(dim=-1)])
                if slot < self.k - 1:
                    logits = self.lm.forward(own_ids[-1][:, None], cache, "last").logits[:, 0]
            rows.append(torch.stack(own_rows, dim=1))
            ids.append(torch.stack(own_ids, dim=1))
        drafted = torch.full((n,), self.k, device=device)
        return Everywhere(torch.cat(ids[::-1]), drafted, torch.cat(rows[::-1]), self.vocabulary)
