"""Drafters whose right and wrong guesses are scripted, and naive decoding to compare the engine with."""

from __future__ import annotations

import numpy as np
import torch
from tiny import VOCABULARY

from draftpool import draws
from draftpool.decoding.engine import Result, decode
from draftpool.decoding.sequence import Sampling, prefill
from draftpool.drafters.base import Draft, most_likely
from draftpool.drafters.block_live import BlockDrafter
from draftpool.selectors.base import make_selector


class Scripted:
    """Proposes a known text, right for as many tokens as the script says, and notes what it was fed."""

    modelled = False

    def __init__(self, name: str, k: int, prompt: list[int], text: list[int], script: tuple[int, ...]):
        self.name, self.k, self.prompt, self.text, self.script = name, k, prompt, text, script
        self.calls = 0

    def fits(self, max_length: int) -> bool:
        return True

    def reset(self, max_length: int) -> None:
        self.fed: list[int] = []
        self.taps: list[torch.Tensor] = []
        self.anchors: list[tuple[int, int]] = []

    def prefill(self, prompt: torch.Tensor, taps: torch.Tensor) -> None:
        assert not self.fed
        self.catch_up(prompt, taps)

    def catch_up(self, tokens: torch.Tensor, taps: torch.Tensor) -> None:
        assert len(tokens) == len(taps) > 0
        self.fed += tokens.tolist()
        self.taps.append(taps.clone())

    def draft(self, anchor: int, choose=most_likely) -> Draft:
        place = len(self.fed) - len(self.prompt)
        self.anchors.append((place, anchor))
        right = self.script[self.calls % len(self.script)]
        self.calls += 1
        ids = (self.text + [0] * self.k)[place + 1 : place + 1 + self.k]
        if right < self.k:
            ids[right] = (ids[right] + 1) % VOCABULARY
        return Draft(torch.tensor(ids), None, None)

    def state_bytes(self) -> int:
        return 0


class Watched:
    """A block drafter that keeps every draft with the length of what it had read and its anchor."""

    def __init__(self, inner: BlockDrafter):
        self.inner, self.name, self.k = inner, inner.name, inner.k
        self.reset, self.prefill, self.catch_up = inner.reset, inner.prefill, inner.catch_up
        self.fits, self.modelled = inner.fits, inner.modelled
        self.seen: list[tuple[int, int, Draft]] = []

    def draft(self, anchor: int, choose=most_likely) -> Draft:
        made = self.inner.draft(anchor, choose)
        self.seen.append((self.inner.length, anchor, made))
        return made

    def state_bytes(self) -> int:
        return self.inner.state_bytes()


def fresh_draft(drafter: BlockDrafter, target, sequence: list[int]) -> Draft:
    """What a drafter proposes after ``sequence`` (anchor last), everything read once and from the start."""
    ids = torch.tensor(sequence[:-1])
    taps = target.forward(ids[None], target.new_cache(len(ids)), "none").taps[0]
    fresh = BlockDrafter("fresh", drafter.model)
    fresh.reset(len(ids))
    fresh.prefill(ids, taps)
    return fresh.draft(sequence[-1])


def naive_text(model, prompt: list[int], n: int, temperature: float, seed: int, prompt_id: str) -> list[int]:
    """Decode with transformers, one whole forward pass a token, from the formula argmax(logits / T + g)."""
    ids = list(prompt)
    for position in range(n):
        with torch.no_grad():
            logits = model(torch.tensor([ids])).logits[0, -1].numpy().astype(np.float64)
        if temperature:
            uniform = draws.uniform(len(logits), "gumbel", seed, prompt_id, position)
            logits = logits / temperature - np.log(-np.log(uniform))
        ids.append(int(logits.argmax()))
    return ids[len(prompt) :]


def run(
    target,
    prompt: list[int],
    arms: dict,
    selector: dict | None = None,
    limit: int = 12,
    ends=(),
    temperature: float = 0.0,
    k_pool: int | None = None,
    room: int | None = None,
    **options,
) -> Result:
    """Prefill and decode one prompt called `p` (first arm throughout by default)."""
    k_pool = k_pool or max(1, *(arm.k for arm in arms.values() if arm is not None), 1)
    start = prefill(target, prompt, limit, room or k_pool)
    chooser = make_selector(selector or {"kind": "fixed", "arm": next(iter(arms))}, list(arms))
    return decode(target, start, arms, chooser, Sampling(limit, ends, temperature, 3), k_pool, "p", **options)
