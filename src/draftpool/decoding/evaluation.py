"""What every arm would propose at an anchor: the full information that HedgeSpec learns from."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from draftpool.drafters.base import Draft, Drafter
from draftpool.drafters.block_live import BlockDrafter
from draftpool.drafters.stacked import StackedDrafters, can_stack


class PoolEvaluation:
    """Drafts of a whole pool at one anchor; block drafters of one shape are evaluated in one stacked call.

    Args:
        arms: Drafters by name; None is plain decoding, which proposes nothing.
        head: The target's head [vocabulary, hidden].
    """

    def __init__(self, arms: dict[str, Drafter | None], head: Tensor):
        blocks = {name: drafter for name, drafter in arms.items() if isinstance(drafter, BlockDrafter)}
        together = len(blocks) > 1 and can_stack(list(blocks.values()))
        self.stacked = StackedDrafters(list(blocks.values()), head) if together else None
        self.stacked_names = list(blocks) if together else []
        self.alone = [
            name for name, drafter in arms.items() if drafter is not None and name not in self.stacked_names
        ]
        self.arms = arms
        self.read = 0
        self.off: set[str] = set()

    def reset(self, max_length: int) -> None:
        """Start a new sequence of up to ``max_length`` tokens."""
        self.read = 0
        # A drafter with too few positions drafts nothing.
        self.off = {
            name
            for name, drafter in self.arms.items()
            if drafter is not None and not drafter.fits(max_length)
        }
        if self.stacked is not None and self.stacked.fits(max_length):
            self.stacked.reset(max_length)

    def evaluate(
        self,
        anchor: int,
        end: int,
        unread: Callable[[int], tuple[Tensor, Tensor]],
        catch_up: Callable[[str], None],
    ) -> dict[str, Draft | None]:
        """Drafts of all arms after ``anchor``.

        Args:
            anchor: The last committed token.
            end: Tokens before the anchor.
            unread: Returns ids and taps of the committed tokens from a place up to the anchor.
            catch_up: Lets one drafter that is not stacked read them.
        """
        drafts: dict[str, Draft | None] = dict.fromkeys(self.arms)
        if self.stacked is not None and self.off.isdisjoint(self.stacked_names):
            if self.read < end:
                self.stacked.catch_up(*unread(self.read))
                self.read = end
            drafts |= zip(self.stacked_names, self.stacked.evaluate(anchor), strict=True)
        for name in self.alone:
            if name in self.off:
                continue
            catch_up(name)
            drafts[name] = self.arms[name].draft(anchor)
        return drafts
