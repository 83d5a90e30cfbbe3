"""Retrieval from a suffix automaton: propose what followed the longest match in the text or in past outputs.

The automaton is the classic online one (Blumer et al. 1985; for drafting: SAM decoding, Hu et al. 2024); a token costs
amortised constant time.
"""

from __future__ import annotations

from collections import deque
from pathlib import Path
from typing import Literal

import torch
from pydantic import BaseModel, ConfigDict
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from draftpool.artefacts import read_json
from draftpool.drafters.base import Choose, Draft, most_likely, register_drafter
from draftpool.drafters.drafter_folder import damaged
from draftpool.errors import DraftpoolError
from draftpool.targets.base import TargetModel

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


class SuffixStore:
    """Past outputs of a stream, the oldest forgotten where there are too many.

    Args:
        bound: Tokens it may hold.

    Attributes:
        outputs: What it holds, oldest first.
        automaton: Their substrings.
    """

    def __init__(self, bound: int):
        self.bound = bound
        self.outputs: deque[list[int]] = deque()
        self.automaton = SuffixAutomaton()

    def add(self, output: list[int]) -> None:
        """Put an output in; one that is longer than the bound is kept from its end."""
        if self.bound == 0 or not output:
            return
        self.outputs.append(list(output[-self.bound :]))
        evicted = False
        while sum(map(len, self.outputs)) > self.bound:
            self.outputs.popleft()
            evicted = True
        if evicted:
            # An automaton cannot shrink.
            self.automaton = SuffixAutomaton()
        for kept in self.outputs if evicted else [self.outputs[-1]]:
            for token in (*kept, BORDER):
                self.automaton.extend(token)


class SuffixConfig(BaseModel):
    """What a suffix drafter looks in, and how far it drafts."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    kind: str = "suffix"
    draft_tokens: int
    store: Literal["stream", "training", "none"]
    store_tokens: int


@register_drafter("suffix")
class SuffixDrafter:
    """Model-free drafter over the text and a bounded store of past outputs (protocol `drafters.base.Drafter`).

    The longest suffix of the text, anchor included, that occurred before decides; of equally long ones the text's own,
    of several occurrences the latest. Without a match nothing is drafted and the round is a plain step.

    Args:
        name: For messages.
        k: Longest draft.
        store_tokens: Past outputs are forgotten, oldest first, beyond so many tokens; 0: no store.
        device: Where the ids are wanted.
        learns: Whether finished texts are put into the store; a frozen one keeps what it was given.

    Attributes:
        memory: The store; a run that must not see another's outputs gets its own (:meth:`new_memory`).

    Raises:
        DraftpoolError: If a size is impossible.
    """

    modelled = False

    def __init__(
        self,
        name: str,
        k: int = 10,
        store_tokens: int = 4096,
        device: torch.device | str = "cpu",
        learns: bool = True,
    ) -> None:
        if k < 1 or store_tokens < 0:
            raise DraftpoolError(
                f"k = {k} and a store of {store_tokens} tokens",
                f"drafter `{name}`",
                "give k >= 1 and a store >= 0",
            )
        self.name, self.k, self.store_tokens, self.learns = name, k, store_tokens, learns
        self.device = torch.device(device)
        self.memory = self.new_memory()
        self.reset(0)

    @classmethod
    def load(cls, name: str, folder: Path, target: TargetModel) -> SuffixDrafter:
        """Make the drafter that a folder describes; its frozen store is read from `store.safetensors`.

        Raises:
            DraftpoolError: If the folder is damaged.
        """
        try:
            config = SuffixConfig.model_validate(read_json(folder / "config.json"))
            bound = 0 if config.store == "none" else config.store_tokens
            made = cls(name, config.draft_tokens, bound, target.device, learns=config.store == "stream")
            if config.store == "training":
                stored = load_file(folder / "store.safetensors")
                for output in stored["tokens"].split(stored["lengths"].tolist()):
                    made.memory.add(output.tolist())
        except (OSError, ValueError, KeyError, SafetensorError) as error:
            raise damaged(str(error).splitlines()[0], folder) from error
        return made

    def new_memory(self) -> SuffixStore:
        """An empty store, as at the beginning of a stream."""
        return SuffixStore(self.store_tokens)

    def fits(self, max_length: int) -> bool:
        """Texts of any length can be searched."""
        return True

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
            self._match = self.memory.automaton.follow(*self._match, token)

    def draft(self, anchor: int, choose: Choose = most_likely) -> Draft:
        """Propose up to k tokens after ``anchor``; none if it is new. There is nothing to choose from."""
        store = self.memory.automaton
        own, own_length = self.own.follow(*self.own.whole(), anchor)
        stored, stored_length = store.follow(*self._match, anchor)
        ids: list[int] = []
        if own_length and own_length >= stored_length:
            behind = self.own.end[own] + 1
            ids = [*self.own.text, anchor][behind : behind + self.k]
        elif stored_length:
            behind = store.end[stored] + 1
            ids = store.text[behind : behind + self.k]
            if BORDER in ids:
                ids = ids[: ids.index(BORDER)]
        return Draft(torch.tensor(ids, dtype=torch.long, device=self.device), None, None)

    def remember(self, output: list[int]) -> None:
        """Put a finished output into the store, unless it is frozen."""
        if self.learns:
            self.memory.add(output)
            self._match = (0, 0)

    def state_bytes(self) -> int:
        """Memory of text and store, at 8 bytes a number."""
        return 8 * (self.own.numbers() + self.memory.automaton.numbers())

    def weights(self) -> list[Tensor]:
        """None."""
        return []
