"""The peer of bench_train: a DFlash training step written plainly with transformers' modules, SDPA and autograd.

Queries come from the blocks, keys and values from context and blocks in one long row, a dense mask says who sees whom.
The taps are those of the batch, or come from the target in transformers with `output_hidden_states`.
"""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from transformers.models.llama.modeling_llama import (
    LlamaDecoderLayer,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
    apply_rotary_pos_emb,
)

from draftpool.drafters.block import BlockDrafterModel
from draftpool.training.batches import Batch
from draftpool.training.objectives.base import Objective


class PlainDrafter(nn.Module):
    """The drafter's weights in transformers' layers.

    Args:
        target: Target folder (a Llama).
        ours: Drafter whose weights are copied.
    """

    def __init__(self, target: Path, ours: BlockDrafterModel):
        super().__init__()
        model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
        self.target = model.to(ours.embedding.device).requires_grad_(False)
        config = self.target.config
        self.heads, self.kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.taps, self.block = ours.config.taps, ours.config.block_size
        self.mask_token = ours.config.mask_token_id
        self.fuse = nn.Linear(ours.fuse.in_features, ours.fuse.out_features, bias=False)
        self.fuse_norm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.layers = nn.ModuleList(LlamaDecoderLayer(config, index) for index in range(ours.config.n_layers))
        self.norm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.rotary = LlamaRotaryEmbedding(config)
        self.register_buffer("head", ours.head)
        with torch.no_grad():
            self.fuse.weight.copy_(ours.fuse.weight)
            self.fuse_norm.weight.copy_(ours.fuse_norm.weight)
            self.norm.weight.copy_(ours.norm.weight)
            for mine, layer in zip(ours.layers, self.layers, strict=True):
                layer.input_layernorm.weight.copy_(mine.input_norm.weight)
                layer.post_attention_layernorm.weight.copy_(mine.post_norm.weight)
                for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
                    getattr(layer.self_attn, name).weight.copy_(getattr(mine, name).weight)
                for name in ("gate_proj", "up_proj", "down_proj"):
                    getattr(layer.mlp, name).weight.copy_(getattr(mine, name).weight)
        self.to(ours.embedding.device)
        self.trained = [part for name, part in self.named_parameters() if not name.startswith("target.")]
        self.optimiser = torch.optim.AdamW(self.trained, lr=1e-5)

    @torch.no_grad()
    def online_taps(self, ids: Tensor) -> Tensor:
        """Taps [sequences, length, taps x hidden] of ids [sequences, length], read by transformers."""
        states = self.target(ids, output_hidden_states=True, logits_to_keep=1).hidden_states
        return torch.cat([states[tap + 1] for tap in self.taps], dim=-1)

    def logits(self, taps: Tensor, batch: Batch) -> Tensor:
        """Logits [sequences, anchors, B - 1, draft vocabulary] of a batch of blocks."""
        fused = self.fuse_norm(self.fuse(taps))
        (sequences, anchors), (length, size) = batch.anchors.shape, (taps.shape[1], self.block)
        embedding = self.target.get_input_embeddings()
        x = embedding(torch.full((sequences, anchors, size), self.mask_token, device=taps.device))
        x[:, :, 0] = embedding(batch.anchors)
        x = x.flatten(1, 2)
        places = (batch.positions[..., None] + torch.arange(size, device=taps.device)).flatten(1)
        positions = torch.cat((torch.arange(length, device=taps.device).expand(sequences, -1), places), dim=1)
        # A block sees the context before its anchor, and itself.
        block_of = torch.arange(anchors, device=taps.device).repeat_interleave(size)
        own = (block_of[:, None] == block_of[None]).expand(sequences, -1, -1)
        seen = torch.cat(((batch.bias == 0).repeat_interleave(size, dim=1), own), dim=2)[:, None]
        rotary = self.rotary(x, positions)
        for layer in self.layers:
            x = x + self._attention(layer, fused, layer.input_layernorm(x), seen, rotary)
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        return F.linear(self.norm(x).unflatten(1, (anchors, size))[:, :, 1:], self.head)

    def _attention(self, layer: LlamaDecoderLayer, fused: Tensor, x: Tensor, seen: Tensor, rotary) -> Tensor:
        part, everything = layer.self_attn, torch.cat((fused, x), dim=1)

        def heads(values: Tensor, count: int) -> Tensor:
            return values.unflatten(-1, (count, -1)).transpose(1, 2)

        queries = heads(part.q_proj(x), self.heads)
        keys = heads(part.k_proj(everything), self.kv_heads)
        values = heads(part.v_proj(everything), self.kv_heads)
        cos, sin = rotary
        block = slice(fused.shape[1], None)
        queries = apply_rotary_pos_emb(queries, queries, cos[:, block], sin[:, block])[0]
        keys = apply_rotary_pos_emb(keys, keys, cos, sin)[0]
        mixed = F.scaled_dot_product_attention(queries, keys, values, attn_mask=seen, enable_gqa=True)
        return part.o_proj(mixed.transpose(1, 2).flatten(2))


def plain_step(model: PlainDrafter, taps: Tensor, batch: Batch, objective: Objective) -> float:
    """One optimiser step; returns the loss."""
    log_q = model.logits(taps, batch).log_softmax(dim=-1).gather(-1, batch.labels[..., None])[..., 0]
    valid = batch.mask.any(dim=-1)
    sequence = torch.arange(valid.shape[0], device=taps.device)[:, None].expand(valid.shape)[valid]
    loss = objective.loss(log_q[valid], batch.mask[valid], sequence, valid.shape[0]).loss
    model.optimiser.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.trained, 10.0)
    model.optimiser.step()
    return float(loss.detach())
