"""What training asks of each kind of drafter: its first weights, and hidden states of the supervised slots."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor, nn

from draftpool.drafters.block import BlockDrafterModel
from draftpool.drafters.block_config import config_for, mask_token, reduced_vocabulary
from draftpool.drafters.drafter_folder import save_drafter
from draftpool.drafters.eagle import EagleModel
from draftpool.drafters.eagle_config import eagle_config_for
from draftpool.targets.base import check_taps
from draftpool.targets.load import load_tokenizer, load_weights
from draftpool.targets.weights import described_mask_token, read_config
from draftpool.training.batches import Batch, ResponseSet
from draftpool.training.initialise import (
    start_block_from_target,
    start_eagle_from_target,
    start_from_drafter,
    start_random,
)


class Trainee(Protocol):
    """A drafter in training.

    Attributes:
        module: Its weights (parameters are trained).
        vocabulary: Ids it may propose [draft vocabulary].
        head: What turns hidden states into logits [draft vocabulary, hidden].
        slots: Supervised slots after an anchor, K.
    """

    module: nn.Module
    vocabulary: Tensor
    head: Tensor
    slots: int

    def hidden(self, batch: Batch) -> Tensor:
        """Hidden states of the slots of every anchor [sequences, anchors, K, hidden]."""

    def start_from_target(self, target: Path, seed: int) -> None:
        """Begin with layers of the target."""

    def save(self, folder: Path) -> None:
        """Write the drafter's folder."""


class _ModuleTrainee:
    """What trainees share whose module keeps its vocabulary and head as buffers and its shape as `config`."""

    module: BlockDrafterModel | EagleModel

    @property
    def vocabulary(self) -> Tensor:
        """Ids it may propose."""
        return self.module.vocabulary

    @property
    def head(self) -> Tensor:
        """The target's head, or its own."""
        return self.module.head

    def save(self, folder: Path) -> None:
        """Write the drafter's folder."""
        save_drafter(folder, self.module.config, self.module.state_dict())


class BlockTrainee(_ModuleTrainee):
    """A block drafter: every slot from the context before the anchor."""

    def __init__(self, module: BlockDrafterModel):
        self.module, self.slots = module, module.config.block_size - 1

    @classmethod
    def new(cls, cfg: dict, target: Path, vocabulary: Tensor) -> BlockTrainee:
        """A drafter of the configured shape, its weights not set yet."""
        weights, hf_config = load_weights(target, torch.float32), read_config(target)
        taps, shape = check_taps(cfg["taps"], hf_config.num_hidden_layers), cfg["model"]
        mask = described_mask_token(target)
        if mask is None:
            mask = mask_token(load_tokenizer(target))
        config = config_for(hf_config, taps, mask, shape["n_layers"], shape["block_size"])
        embedding = weights.embedding()
        return cls(BlockDrafterModel(config, embedding, weights.head(embedding)[vocabulary], vocabulary))

    def start_from_target(self, target: Path, seed: int) -> None:
        """Copy the target's deepest layers."""
        start_block_from_target(self.module, load_weights(target, torch.float32), seed)

    def hidden(self, batch: Batch) -> Tensor:
        """Hidden states of the slots of every anchor [sequences, anchors, K, hidden]."""
        device = self.module.embedding.device
        positions = torch.arange(batch.taps.shape[1], device=device).expand(batch.taps.shape[:2])
        context = self.module.context(batch.taps.to(device), positions)
        return self.module.blocks(
            batch.anchors.to(device), batch.positions.to(device), context, batch.bias.to(device)
        )


class EagleTrainee(_ModuleTrainee):
    """An EAGLE head: K steps at every anchor on its own outputs (training-time test)."""

    def __init__(self, module: EagleModel):
        self.module, self.slots = module, module.config.draft_tokens

    @classmethod
    def new(cls, cfg: dict, target: Path, vocabulary: Tensor) -> EagleTrainee:
        """A head of the configured shape, its weights not set yet."""
        weights, hf_config = load_weights(target, torch.float32), read_config(target)
        taps, shape = check_taps(cfg["taps"], hf_config.num_hidden_layers), cfg["model"]
        config = eagle_config_for(hf_config, taps, shape["draft_tokens"], shape["own_head"])
        embedding = weights.embedding()
        return cls(EagleModel(config, embedding, weights.head(embedding)[vocabulary], vocabulary))

    def start_from_target(self, target: Path, seed: int) -> None:
        """Copy the target's last layer."""
        start_eagle_from_target(self.module, load_weights(target, torch.float32), seed)

    def hidden(self, batch: Batch) -> Tensor:
        """Hidden states of the steps of every anchor [sequences, anchors, K, hidden]."""
        device = self.module.embedding.device
        return self.module.unroll(
            batch.taps.to(device), batch.tokens.to(device), batch.positions.to(device), self.slots
        )


def new_trainee(
    cfg: dict, target: Path, responses: ResponseSet, init: Path | None, device: torch.device
) -> Trainee:
    """Build a drafter of the configured kind beside its target and give it its first weights.

    Raises:
        DraftpoolError: If it cannot start as `init` says.
    """
    vocabulary = reduced_vocabulary(
        responses.answers(), cfg["model"]["draft_vocab"], read_config(target).vocab_size
    )
    if cfg["kind"] == "independent":
        # transformers is imported for this kind only.
        from draftpool.training.independent_trainee import IndependentTrainee

        made: Trainee = IndependentTrainee(cfg, target, vocabulary)
    else:
        made = {"block": BlockTrainee, "eagle": EagleTrainee}[cfg["kind"]].new(cfg, target, vocabulary)
    if cfg["init"] == "drafter":
        start_from_drafter(made.module, init, cfg["kind"])
    elif cfg["init"] == "random":
        start_random(made.module, cfg["seed"])
    else:
        made.start_from_target(target, cfg["seed"])
    made.module.to(device)
    return made
