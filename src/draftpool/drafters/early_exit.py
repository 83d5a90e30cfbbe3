"""The target's own first layers with its final norm and head as a drafter, without any training.

(Self-speculative drafting by early exit: Elhoushi et al. 2024 train for it; an untrained exit is the cheap baseline.)
"""

from __future__ import annotations

from pathlib import Path

import torch
from pydantic import BaseModel, ConfigDict

from draftpool.artefacts import read_json
from draftpool.drafters.base import register_drafter
from draftpool.drafters.drafter_folder import damaged
from draftpool.drafters.language_model import FastLanguageModelDrafter
from draftpool.errors import DraftpoolError
from draftpool.targets.base import TargetModel
from draftpool.targets.fast import FastTarget


class EarlyExitConfig(BaseModel):
    """How far the target is run."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    kind: str = "early_exit"
    n_layers: int
    draft_tokens: int


@register_drafter("early_exit")
class EarlyExitDrafter:
    """How drafters of kind `early_exit` are made from the target; they have no weights of their own."""

    @classmethod
    def load(cls, name: str, folder: Path, target: TargetModel) -> FastLanguageModelDrafter:
        """The target's first layers as a drafter.

        Raises:
            DraftpoolError: If the target has no more layers than asked for, or is not on the fast path.
        """
        try:
            config = EarlyExitConfig.model_validate(read_json(folder / "config.json"))
        except ValueError as error:
            raise damaged(str(error).splitlines()[0], folder) from error
        where = f"drafter `{name}`"
        if not isinstance(target, FastTarget):
            raise DraftpoolError(
                "only the fast backend leaves a target early", where, "take it out of the pool"
            )
        if config.n_layers >= len(target.layers):
            raise DraftpoolError(
                f"{config.n_layers} layers of a target of {len(target.layers)}", where, "lower n_layers"
            )
        vocabulary = torch.arange(target.head_weight.shape[0], device=target.device)
        return FastLanguageModelDrafter(
            name, target.first_layers(config.n_layers), config.draft_tokens, vocabulary, "everything"
        )
