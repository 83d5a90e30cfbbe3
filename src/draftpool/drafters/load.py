"""Load a drafter of any kind from its folder, and draft at all anchors of a text."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from draftpool.drafters.base import Drafter, DraftsEverywhere, Everywhere
from draftpool.drafters.drafter_folder import kind_of
from draftpool.drafters.kinds import DECORATOR, PACKAGE
from draftpool.registry import load_registered
from draftpool.targets.base import TargetModel


def load_drafter(name: str, folder: Path, target: TargetModel) -> Drafter:
    """Load a drafter beside its target.

    Raises:
        DraftpoolError: If the drafter is damaged, belongs to another target, or nobody registered its kind.
    """
    return load_registered(PACKAGE, DECORATOR, kind_of(folder)).load(name, folder, target)


@torch.inference_mode()
def draft_everywhere(drafter: Drafter, prompt: list[int], answer: list[int], taps: Tensor) -> Everywhere:
    """What a drafter proposes at every anchor of a text, one anchor after the other unless it knows a faster way.

    Args:
        drafter: Reset to a length that holds the text.
        prompt: Token ids.
        answer: The target's own ids [n], n >= 2.
        taps: [prompt + n - 1, taps x hidden].
    """
    if isinstance(drafter, DraftsEverywhere):
        return drafter.everywhere(prompt, answer, taps)
    text = torch.tensor(prompt + answer, device=taps.device)
    drafter.prefill(text[: len(prompt)], taps[: len(prompt)])
    drafts = []
    for place, anchor in enumerate(answer[:-1]):
        if place:
            read = len(prompt) + place - 1
            drafter.catch_up(text[read : read + 1], taps[read : read + 1])
        drafts.append(drafter.draft(anchor))
    ids = torch.zeros((len(drafts), drafter.k), dtype=torch.long, device=taps.device)
    for row, draft in zip(ids, drafts, strict=True):
        row[: len(draft.ids)] = draft.ids
    drafted = torch.tensor([len(draft.ids) for draft in drafts], device=taps.device)
    scored = all(draft.log_q is not None and len(draft.ids) == drafter.k for draft in drafts)
    log_q = torch.stack([draft.log_q for draft in drafts]) if scored else None
    return Everywhere(ids, drafted, log_q, drafts[0].vocabulary)
