"""Drafting one sequence with an EAGLE head: entries made of true taps are kept, the chain's own are overwritten."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from draftpool.drafters.base import Choose, Draft, Everywhere, most_likely, register_drafter
from draftpool.drafters.block import context_bias
from draftpool.drafters.block_live import move_weights, pack
from draftpool.drafters.drafter_folder import check_fits, load_weights, read_drafter, target_shape
from draftpool.drafters.eagle import EagleModel
from draftpool.drafters.eagle_config import EagleConfig
from draftpool.errors import DraftpoolError
from draftpool.targets.base import TargetModel
from draftpool.targets.linear import FrozenLinear


def load_eagle(folder: Path, target: TargetModel) -> EagleModel:
    """Load a head beside its target.

    Raises:
        DraftpoolError: If it is damaged or belongs to another target.
    """
    config, state = read_drafter(folder, EagleConfig)
    check_fits(config, target_shape(target.hf_config, target.taps), str(folder))
    vocabulary = state["vocabulary"].to(target.device)
    model = EagleModel(config, target.embedding, target.head_weight[vocabulary], vocabulary)
    load_weights(model, state, folder)
    return model.to(target.device, target.dtype).eval().requires_grad_(False)


@register_drafter("eagle")
class EagleDrafter:
    """An EAGLE head at work on one sequence (protocol :class:`draftpool.drafters.base.Drafter`)."""

    modelled = True

    def __init__(self, name: str, model: EagleModel):
        pack(model)
        self.name, self.model, self.k = name, model, model.config.draft_tokens
        self.head = FrozenLinear(model.head)
        self.length = self.max_length = 0
        self.keys = self.values = self.feature = None

    @classmethod
    def load(cls, name: str, folder: Path, target: TargetModel) -> EagleDrafter:
        """Load a head beside its target (see :func:`load_eagle`)."""
        return cls(name, load_eagle(folder, target))

    def fits(self, max_length: int) -> bool:
        """Whether a sequence of ``max_length`` tokens and a chain behind it have positions."""
        return max_length + self.k <= self.model.config.max_positions

    def reset(self, max_length: int) -> None:
        """Forget the sequence and make room for one of up to ``max_length`` tokens.

        Raises:
            DraftpoolError: If the head has fewer positions.
        """
        config = self.model.config
        if not self.fits(max_length):
            raise DraftpoolError(
                f"needs {max_length + self.k} positions, has {config.max_positions}",
                f"drafter `{self.name}`",
                "use shorter prompts",
            )
        if max_length > self.max_length:
            shape = (1, config.kv_heads, max_length, config.head_dim)
            self.keys = torch.zeros(
                shape, device=self.model.embedding.device, dtype=self.model.embedding.dtype
            )
            self.values = torch.zeros_like(self.keys)
            self.max_length = max_length
        self.length, self.feature = 0, None

    @torch.inference_mode()
    def catch_up(self, tokens: Tensor, taps: Tensor) -> None:
        """Read tokens [m] with their taps [m, taps x hidden]: entries of all but the last, whose next token is open."""
        if not len(tokens):
            return
        fused_from = taps[:-1] if self.feature is None else torch.cat((self.feature, taps[:-1]))
        following = tokens[1:] if self.feature is None else tokens
        first = max(0, self.length - 1)
        if len(following):
            positions = torch.arange(first, first + len(following), device=taps.device)
            keys, values = self.model.context(fused_from[None], following[None], positions[None])
            self.keys[:, :, first : first + len(following)] = keys
            self.values[:, :, first : first + len(following)] = values
        self.feature = taps[-1:].clone()
        self.length += len(tokens)

    def prefill(self, prompt: Tensor, taps: Tensor) -> None:
        """Start a sequence: prompt ids [n], taps [n, taps x hidden]; room must have been made by :meth:`reset`."""
        self.length, self.feature = 0, None
        self.catch_up(prompt, taps)

    @torch.inference_mode()
    def draft(self, anchor: int, choose: Choose = most_likely) -> Draft:
        """Propose the K tokens after ``anchor``, one after the other."""
        model, device = self.model, self.keys.device
        true = self.length - 1
        context = (self.keys[:, :, :true], self.values[:, :, :true])
        feature, token, own, rows, ids = model.fuse(self.feature)[None], None, [], [], []
        token = torch.tensor([anchor], device=device)
        for slot in range(self.k):
            position = torch.full((1, 1), true + slot, device=device)
            feature = model.step(token[None], feature, position, context, None, own)
            log_q = self.head(model.norm(feature[0])).float().log_softmax(dim=-1)
            token = model.vocabulary[choose(log_q, slot)]
            rows.append(log_q)
            ids.append(token)
        return Draft(torch.cat(ids), torch.cat(rows), model.vocabulary)

    @torch.inference_mode()
    def everywhere(self, prompt: list[int], answer: list[int], taps: Tensor) -> Everywhere:
        """Draft at every anchor of an answer: K unrolled steps on own tokens and features, all anchors together."""
        model, device, n = self.model, taps.device, len(answer) - 1
        tokens = torch.tensor(prompt + answer, device=device)
        places = torch.arange(len(taps), device=device)[None]
        context = model.context(taps[None], tokens[None, 1 : len(taps) + 1], places)
        positions = (len(prompt) + torch.arange(n, device=device))[None]
        bias = context_bias(positions - 1, len(taps)).to(taps.dtype)
        feature = model.fuse(taps[positions[0] - 1])[None]
        token, own, rows, ids = tokens[positions[0]], [], [], []
        for slot in range(self.k):
            feature = model.step(token[None], feature, positions - 1 + slot, context, bias, own)
            log_q = model.logits(model.norm(feature[0])).float().log_softmax(dim=-1)
            token = model.vocabulary[log_q.argmax(dim=-1)]
            rows.append(log_q)
            ids.append(token)
        drafted = torch.full((n,), self.k, device=device)
        return Everywhere(torch.stack(ids, dim=1), drafted, torch.stack(rows, dim=1), model.vocabulary)

    def state_bytes(self) -> int:
        """Memory of the entries' keys and values and of the kept taps, in bytes."""
        config, size = self.model.config, self.model.embedding.element_size()
        kept = 0 if self.feature is None else self.feature.numel() * size
        return 2 * config.kv_heads * config.head_dim * size * self.length + kept

    def move(self, device: torch.device) -> None:
        """Put the weights on another device (:mod:`draftpool.drafters.offload`)."""
        move_weights(self.model, device)
        self.head.move(device)

    def weights(self) -> list[Tensor]:
        """Own weights, and the copied rows of the target's head."""
        model = self.model
        return [*model.parameters(), *([] if model.config.own_head else [model.head])]
