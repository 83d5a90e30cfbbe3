"""Drafting one sequence with a block drafter: preallocated context, only new taps are projected."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from draftpool.drafters.base import Choose, Draft, Everywhere, most_likely, register_drafter
from draftpool.drafters.block import BlockDrafterModel, context_bias
from draftpool.drafters.block_config import BlockConfig
from draftpool.drafters.drafter_folder import check_fits, load_weights, read_drafter, target_shape
from draftpool.errors import DraftpoolError
from draftpool.targets.base import TargetModel
from draftpool.targets.linear import FrozenLinear


def load_model(folder: Path, target: TargetModel) -> BlockDrafterModel:
    """Load a drafter beside its target.

    Args:
        folder: Drafter folder.
        target: The target (embedding, head, device, dtype, taps).

    Raises:
        DraftpoolError: If the drafter is damaged or belongs to another target.
    """
    config, state = read_drafter(folder, BlockConfig)
    check_fits(config, target_shape(target.hf_config, target.taps), str(folder))
    vocabulary = state["vocabulary"].to(target.device)
    model = BlockDrafterModel(config, target.embedding, target.head_weight[vocabulary], vocabulary)
    load_weights(model, state, folder)
    return model.to(target.device, target.dtype).eval().requires_grad_(False)


def pack(module: torch.nn.Module) -> None:
    """Replace every linear layer's product by one with weights packed for few rows."""
    for child in module.modules():
        if isinstance(child, torch.nn.Linear):
            child.forward = FrozenLinear(child.weight, child.bias)


def move_weights(module: torch.nn.Module, device: torch.device) -> None:
    """Move a drafter's own parameters; buffers, which the target shares, stay. Linear layers are packed anew."""
    for parameter in module.parameters():
        parameter.data = parameter.data.to(device)
    pack(module)


class LiveBlocks:
    """Context and blocks of one sequence: preallocated keys and values, rolled forward by length.

    Args:
        name: For messages.
        model: The weights; its batch dimension has ``rows`` entries.
        rows: Drafters that the model stands for (more than one if stacked).
    """

    modelled = True

    def __init__(self, name: str, model: BlockDrafterModel, rows: int = 1):
        self.name = name
        self.model = model
        self.rows = rows
        self.k = model.config.block_size - 1
        self.length = 0
        self.max_length = 0
        self.keys: Tensor | None = None
        self.values: Tensor | None = None
        self.head = FrozenLinear(model.head)

    def fits(self, max_length: int) -> bool:
        """Whether a sequence of ``max_length`` tokens and a block behind it have positions."""
        return max_length + self.model.config.block_size <= self.model.config.max_positions

    def reset(self, max_length: int) -> None:
        """Forget the sequence and make room for one of up to ``max_length`` tokens.

        Raises:
            DraftpoolError: If the drafter has fewer positions.
        """
        config = self.model.config
        if not self.fits(max_length):
            raise DraftpoolError(
                f"needs {max_length + config.block_size} positions, has {config.max_positions}",
                f"drafter `{self.name}`",
                "use shorter prompts",
            )
        if max_length > self.max_length:
            shape = (config.n_layers, self.rows, config.kv_heads, max_length, config.head_dim)
            self.keys = torch.zeros(
                shape, device=self.model.embedding.device, dtype=self.model.embedding.dtype
            )
            self.values = torch.zeros_like(self.keys)
            self.max_length = max_length
        self.length = 0

    @torch.inference_mode()
    def catch_up(self, tokens: Tensor, taps: Tensor) -> None:
        """Project the taps [m, taps x hidden] of tokens that the target has read since (the ids do not matter)."""
        count = taps.shape[0]
        if count == 0:
            return
        end = self.length + count
        positions = torch.arange(self.length, end, device=taps.device)
        for index, (keys, values) in enumerate(self.model.context(taps[None], positions[None])):
            self.keys[index, :, :, self.length : end] = keys
            self.values[index, :, :, self.length : end] = values
        self.length = end

    def prefill(self, prompt: Tensor, taps: Tensor) -> None:
        """Start a sequence: prompt ids [n], taps [n, taps x hidden]; room must have been made by :meth:`reset`."""
        self.length = 0
        self.catch_up(prompt, taps)

    def hidden(self, anchor: int) -> Tensor:
        """Hidden states of the block's slots after ``anchor`` [rows, B - 1, hidden]."""
        device = self.model.embedding.device
        context = [
            (self.keys[i, :, :, : self.length], self.values[i, :, :, : self.length])
            for i in range(self.model.config.n_layers)
        ]
        anchors = torch.full((self.rows, 1), anchor, device=device)
        positions = torch.full((self.rows, 1), self.length, device=device)
        return self.model.blocks(anchors, positions, context, None)[:, 0]

    def state_bytes(self) -> int:
        """Memory of the context's keys and values in bytes."""
        config = self.model.config
        per_token = (
            2 * config.n_layers * config.kv_heads * config.head_dim * self.model.embedding.element_size()
        )
        return self.rows * per_token * self.length


@register_drafter("block")
class BlockDrafter(LiveBlocks):
    """A block drafter at work on one sequence (protocol :class:`draftpool.drafters.base.Drafter`)."""

    def __init__(self, name: str, model: BlockDrafterModel):
        pack(model)
        super().__init__(name, model)

    @classmethod
    def load(cls, name: str, folder: Path, target: TargetModel) -> BlockDrafter:
        """Load a drafter beside its target (see :func:`load_model`)."""
        return cls(name, load_model(folder, target))

    @torch.inference_mode()
    def draft(self, anchor: int, choose: Choose = most_likely) -> Draft:
        """Propose the B - 1 tokens after ``anchor``, the full trained block, each slot on its own."""
        log_q = self.head(self.hidden(anchor)[0]).float().log_softmax(dim=-1)
        return Draft(self.model.vocabulary[choose(log_q, 0)], log_q, self.model.vocabulary)

    @torch.inference_mode()
    def everywhere(self, prompt: list[int], answer: list[int], taps: Tensor) -> Everywhere:
        """Draft at every anchor of an answer in one pass, with the mask of training."""
        device, model = taps.device, self.model
        positions = (len(prompt) + torch.arange(len(answer) - 1, device=device))[None]
        context = model.context(taps[None], torch.arange(len(taps), device=device)[None])
        anchors = torch.tensor(answer[:-1], device=device)[None]
        hidden = model.blocks(anchors, positions, context, context_bias(positions, len(taps)).to(taps.dtype))
        log_q = model.logits(hidden[0]).float().log_softmax(dim=-1)
        ids = model.vocabulary[log_q.argmax(dim=-1)]
        return Everywhere(ids, torch.full((len(ids),), self.k, device=device), log_q, model.vocabulary)

    def move(self, device: torch.device) -> None:
        """Put the weights on another device (:mod:`draftpool.drafters.offload`)."""
        move_weights(self.model, device)
        self.head.move(device)

    def weights(self) -> list[Tensor]:
        """Own weights, and the copied rows of the target's head."""
        return [*self.model.parameters(), self.model.head]
