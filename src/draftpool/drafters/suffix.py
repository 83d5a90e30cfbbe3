"""Retrieval from a suffix automaton: propose what followed the longest match in the text or in past outputs.

The automaton is the classic online one (Blumer et al. 1985; for drafting: SAM decoding, Hu et al. 2024); a token costs
amortised constant time.
"""

from __future__ import annotations

from collections import deque

import torch
from torch import Tensor

from draftpool.drafters.base import Draft
from draftpool.errors import DraftpoolError

# Stands between past outputs, so that no match crosses their border; token ids are not negative.
BORDER = -1


class SuffixAutomaton:
    """All substrings of a growing text, each with the latest place where it ends.

    Attributes:
        text: The tokens.
        end: Per state, the index of the last token of the latest occurrence of its strings.
    """

    def __init__(self) -> None:
        self.text: list[int] = []
        self.end: list[int] = [-1]
        self._next: list[dict[int, int]] = [{}]
        self._link: list[int] = [-1]
        self._length: list[int] = [0]
        self._last = 0

    @property
    def states(self) -> int:
        """Number of states, at most twice the tokens."""
        return len(self.end)

    def numbers(self) -> int:
        """Numbers held: tokens, three per state, two per transition."""
        return len(self.text) + 3 * self.states + 2 * sum(map(len, self._next))

    def _state(self, length: int, link: int, following: dict[int, int], end: int) -> int:
        self._length.append(length)
        self._link.append(link)
        self._next.append(following)
        self.end.append(end)
        return len(self.end) - 1

    def extend(self, token: int) -> None:
        """Append a token."""
        place = len(self.text)
        self.text.append(token)
        new = self._state(self._length[self._last] + 1, 0, {}, place)
        state = self._last
        while state >= 0 and token not in self._next[state]:
            self._next[state][token] = new
            state = self._link[state]
        if state >= 0:
            other = self._next[state][token]
            if self._length[other] == self._length[state] + 1:
                self._link[new] = other
            else:
                clone = self._state(
                    self._length[state] + 1, self._link[other], dict(self._next[other]), self.end[other]
                )
                while state >= 0 and self._next[state].get(token) == other:
                    self._next[state][token] = clone
                    state = self._link[state]
                self._link[other] = self._link[new] = clone
        self._last = new
        # Every suffix of the text now ends here.
        state = self._link[new]
        while state > 0:
            self.end[state] = place
            state = self._link[state]

    def follow(self, state: int, length: int, token: int) -> tuple[int, int]:
        """State and length of the longest suffix of (matched string + token) that is in the text."""
        while state >= 0 and token not in self._next[state]:
            state = self._link[state]
            length = self._length[state] if state >= 0 else 0
        return (self._next[state][token], length + 1) if state >= 0 else (0, 0)

    def whole(self) -> tuple[int, int]:
        """State and length of the whole text."""
        return self._last, len(self.text)


class SuffixDrafter:
    """Model-free drafter over the text and a bounded store of past outputs (protocol `drafters.base.Drafter`).

    The longest suffix of the text, anchor included, that occurred before decides; of equally long ones the text's own,
    of several occurrences the latest. Without a match nothing is drafted and the round is a plain step.

    Args:
        name: For messages.
        k: Longest draft.
        store_tokens: Past outputs are forgotten, oldest first, beyond so many tokens; 0: no store.
        device: Where the ids are wanted.

    Raises:
        DraftpoolError: If a size is impossible.
    """

    def __init__(
        self, name: str, k: int = 10, store_tokens: int = 4096, device: torch.device | str = "cpu"
    ) -> None:
        if k < 1 or store_tokens < 0:
            raise DraftpoolError(
                f"k = {k} and a store of {store_tokens} tokens",
                f"drafter `{name}`",
                "give k >= 1 and a store >= 0",
            )
        self.name, self.k, self.store_tokens = name, k, store_tokens
        self.device = torch.device(device)
        self.forget()

    def forget(self) -> None:
        """Empty the store: a stream begins, and no arm may be handed another run's answers."""
        self.outputs: deque[list[int]] = deque()
        self.store = SuffixAutomaton()
        self.reset(0)

    def reset(self, max_length: int) -> None:
        """Forget the sequence; it needs no room made for it."""
        self.own = SuffixAutomaton()
        self._match = (0, 0)

    def prefill(self, prompt: Tensor, taps: Tensor) -> None:
        """Start a sequence: prompt ids [n]; the taps are not looked at."""
        self.reset(0)
        self.catch_up(prompt, taps)

    def catch_up(self, tokens: Tensor, taps: Tensor) -> None:
        """Read tokens [m]; the taps are not looked at."""
        for token in tokens.tolist():
            self.own.extend(token)
            self._match = self.store.follow(*self._match, token)

    def draft(self, anchor: int) -> Draft:
        """Propose up to k tokens after ``anchor``; none if it is new."""
        own, own_length = self.own.follow(*self.own.whole(), anchor)
        stored, stored_length = self.store.follow(*self._match, anchor)
        ids: list[int] = []
        if own_length and own_length >= stored_length:
            behind = self.own.end[own] + 1
            ids = [*self.own.text, anchor][behind : behind + self.k]
        elif stored_length:
            behind = self.store.end[stored] + 1
            ids = self.store.text[behind : behind + self.k]
            if BORDER in ids:
                ids = ids[: ids.index(BORDER)]
        return Draft(torch.tensor(ids, dtype=torch.long, device=self.device), None, None)

    def remember(self, output: list[int]) -> None:
        """Put a finished output into the store; the oldest ones go where it would hold more than its bound.

        An output longer than the bound is kept from its end.
        """
        if self.store_tokens == 0 or not output:
            return
        self.outputs.append(list(output[-self.store_tokens :]))
        evicted = False
        while sum(map(len, self.outputs)) > self.store_tokens:
            self.outputs.popleft()
            evicted = True
        if evicted:
            # An automaton cannot shrink.
            self.store = SuffixAutomaton()
        for kept in self.outputs if evicted else [self.outputs[-1]]:
            for token in (*kept, BORDER):
                self.store.extend(token)
        self._match = (0, 0)

    def state_bytes(self) -> int:
        """Memory of text and store, at 8 bytes a number."""
        return 8 * (self.own.numbers() + self.store.numbers())
