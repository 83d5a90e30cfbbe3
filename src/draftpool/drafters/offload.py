"""Drafters whose weights wait in main memory: at most one of a pool is on the accelerator at a time.

States of sequences stay where they are; only weights move, when another drafter is chosen, and the switch is charged.
"""

from __future__ import annotations

import torch
from torch import Tensor

from draftpool.drafters.base import Choose, Draft, Drafter, most_likely

HOME = torch.device("cpu")


class Residence:
    """Who is on the accelerator.

    Attributes:
        active: The drafter whose weights are there.
        moved: Bytes moved to the accelerator so far.
    """

    def __init__(self, device: torch.device):
        self.device, self.active, self.moved = device, None, 0

    def admit(self, drafter: Drafter) -> None:
        """Bring a drafter's weights, and send the last one's back."""
        if self.active is drafter:
            return
        if self.active is not None:
            self.active.move(HOME)
        drafter.move(self.device)
        self.moved += sum(tensor.numel() * tensor.element_size() for tensor in drafter.weights())
        self.active = drafter


class OffloadedDrafter:
    """A drafter that asks for its place before it works (protocol :class:`draftpool.drafters.base.Drafter`)."""

    def __init__(self, inner: Drafter, residence: Residence):
        self.inner, self.residence = inner, residence
        self.name, self.k, self.modelled = inner.name, inner.k, inner.modelled
        self.fits, self.reset = inner.fits, inner.reset
        self.state_bytes, self.weights = inner.state_bytes, inner.weights
        inner.move(HOME)

    def activate(self) -> None:
        """Bring the weights to the accelerator."""
        self.residence.admit(self.inner)

    def prefill(self, prompt: Tensor, taps: Tensor) -> None:
        """Start a sequence."""
        self.activate()
        self.inner.prefill(prompt, taps)

    def catch_up(self, tokens: Tensor, taps: Tensor) -> None:
        """Read what was committed since."""
        self.activate()
        self.inner.catch_up(tokens, taps)

    def draft(self, anchor: int, choose: Choose = most_likely) -> Draft:
        """Propose the tokens after ``anchor``."""
        self.activate()
        return self.inner.draft(anchor, choose)


def offloaded(drafters: dict[str, Drafter], device: torch.device) -> dict[str, Drafter]:
    """The same drafters, those with weights of their own waiting in main memory."""
    residence = Residence(device)
    return {
        name: OffloadedDrafter(drafter, residence)
        if hasattr(drafter, "move") and drafter.weights()
        else drafter
        for name, drafter in drafters.items()
    }
