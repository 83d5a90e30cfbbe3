"""Prompt lookup (Saxena 2023): propose what followed the last tokens where they stood before."""

from __future__ import annotations

from pathlib import Path

import torch
from pydantic import BaseModel, ConfigDict
from torch import Tensor

from draftpool.artefacts import read_json
from draftpool.drafters.base import Choose, Draft, most_likely, register_drafter
from draftpool.drafters.drafter_folder import damaged
from draftpool.targets.base import TargetModel


class NgramConfig(BaseModel):
    """How far is looked back and drafted."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    kind: str = "ngram"
    draft_tokens: int
    max_ngram: int


@register_drafter("ngram")
class NgramDrafter:
    """Model-free drafter over the text itself (protocol :class:`draftpool.drafters.base.Drafter`).

    The longest n-gram that ends at the anchor and occurred before decides; of several occurrences the latest. Without
    one nothing is drafted and the round is a plain step. Looking up costs one dictionary access per n.

    Args:
        name: For messages.
        k: Longest draft.
        max_ngram: Longest n-gram that is looked up.
        device: Where the ids are wanted.
    """

    modelled = False

    def __init__(self, name: str, k: int = 10, max_ngram: int = 2, device: torch.device | str = "cpu"):
        self.name, self.k, self.max_ngram, self.device = name, k, max_ngram, torch.device(device)
        self.reset(0)

    @classmethod
    def load(cls, name: str, folder: Path, target: TargetModel) -> NgramDrafter:
        """Make the drafter that a folder describes.

        Raises:
            DraftpoolError: If the folder is damaged.
        """
        try:
            config = NgramConfig.model_validate(read_json(folder / "config.json"))
        except ValueError as error:
            raise damaged(str(error).splitlines()[0], folder) from error
        return cls(name, config.draft_tokens, config.max_ngram, target.device)

    def fits(self, max_length: int) -> bool:
        """Texts of any length can be searched."""
        return True

    def reset(self, max_length: int) -> None:
        """Forget the sequence; it needs no room made for it."""
        self.text: list[int] = []
        # Per n: the place behind the latest occurrence of every n-gram of the text.
        self.places: list[dict[tuple[int, ...], int]] = [{} for _ in range(self.max_ngram)]

    def prefill(self, prompt: Tensor, taps: Tensor) -> None:
        """Start a sequence: prompt ids [n]; the taps are not looked at."""
        self.reset(0)
        self.catch_up(prompt, taps)

    def catch_up(self, tokens: Tensor, taps: Tensor) -> None:
        """Read tokens [m]; the taps are not looked at."""
        for token in tokens.tolist():
            self.text.append(token)
            end = len(self.text)
            for n, places in enumerate(self.places, start=1):
                if end >= n:
                    places[tuple(self.text[end - n : end])] = end

    def draft(self, anchor: int, choose: Choose = most_likely) -> Draft:
        """Propose up to k tokens after ``anchor``; none if its n-grams are new. There is nothing to choose from."""
        text = [*self.text, anchor]
        for n in range(min(self.max_ngram, len(text)), 0, -1):
            place = self.places[n - 1].get(tuple(text[-n:]))
            if place is not None:
                return self._draft(text[place : place + self.k])
        return self._draft([])

    def _draft(self, ids: list[int]) -> Draft:
        return Draft(torch.tensor(ids, dtype=torch.long, device=self.device), None, None)

    def state_bytes(self) -> int:
        """Memory of the text and its places, at 8 bytes a number."""
        return 8 * (
            len(self.text) + sum((n + 1) * len(places) for n, places in enumerate(self.places, start=1))
        )

    def weights(self) -> list[Tensor]:
        """None."""
        return []
