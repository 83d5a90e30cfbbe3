"""Block drafter (DFlash, arXiv 2602.06036): fused target taps are extra keys and values of every draft layer.

A block is [anchor, mask x (B - 1)]; its slots see the context before the anchor and each other, and slot j proposes
the token at anchor + j. The embedding and the head are the target's, frozen; the head may be reduced to the most
frequent ids.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from draftpool.drafters.block_config import BlockConfig
from draftpool.targets.fast import rotary_tables, rotate


class RMSNorm(nn.Module):
    """Root-mean-square norm with a weight."""

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """[..., size] -> [..., size]."""
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


class DraftLayer(nn.Module):
    """One draft layer: queries from the block only, keys and values from context and block with the same weights."""

    def __init__(self, config: BlockConfig):
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = config.heads, config.kv_heads, config.head_dim
        hidden, inner = config.hidden_size, config.intermediate_size
        self.input_norm = RMSNorm(hidden, config.eps)
        self.post_norm = RMSNorm(hidden, config.eps)
        self.q_proj = nn.Linear(hidden, self.heads * self.head_dim, bias=config.attention_bias)
        self.k_proj = nn.Linear(hidden, self.kv_heads * self.head_dim, bias=config.attention_bias)
        self.v_proj = nn.Linear(hidden, self.kv_heads * self.head_dim, bias=config.attention_bias)
        self.o_proj = nn.Linear(self.heads * self.head_dim, hidden, bias=False)
        self.gate_proj = nn.Linear(hidden, inner, bias=False)
        self.up_proj = nn.Linear(hidden, inner, bias=False)
        self.down_proj = nn.Linear(inner, hidden, bias=False)
        self.q_norm = RMSNorm(self.head_dim, config.eps) if config.qk_norm else nn.Identity()
        self.k_norm = RMSNorm(self.head_dim, config.eps) if config.qk_norm else nn.Identity()

    def key_values(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Keys (rotated) and values [..., kv heads, head_dim] of x [..., hidden]."""
        shape = (*x.shape[:-1], self.kv_heads, self.head_dim)
        keys = rotate(self.k_norm(self.k_proj(x).view(shape)), cos[..., None, :], sin[..., None, :])
        return keys, self.v_proj(x).view(shape)

    def forward(
        self,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        context: tuple[Tensor, Tensor],
        bias: Tensor | None,
        first: int,
    ) -> Tensor:
        """Run blocks of several sequences.

        Args:
            x: [batch, blocks, B, hidden].
            cos: [batch, blocks, B, head_dim / 2]; sin likewise.
            sin: As ``cos``.
            context: Keys and values [batch, kv heads, length, head_dim].
            bias: [batch, blocks, length], 0 where a block sees the context and -inf elsewhere, or None.
            first: First slot whose output is wanted (earlier ones only serve as keys and values).

        Returns:
            [batch, blocks, B - first, hidden]
        """
        batch, blocks, size, _ = x.shape
        normalised = self.input_norm(x)
        own_keys, own_values = self.key_values(normalised, cos, sin)
        wanted, slots = normalised[:, :, first:], size - first
        queries = self.q_norm(self.q_proj(wanted).view(batch, blocks, slots, self.heads, self.head_dim))
        queries = rotate(queries, cos[:, :, first:, None], sin[:, :, first:, None]) * self.head_dim**-0.5
        groups = self.heads // self.kv_heads
        # [batch, kv heads, groups, blocks, slots, head_dim]: one product with the context serves all blocks.
        queries = queries.view(batch, blocks, slots, self.kv_heads, groups, self.head_dim).permute(
            0, 3, 4, 1, 2, 5
        )
        keys, values = context
        length = keys.shape[2]
        flat = queries.reshape(batch, self.kv_heads, groups * blocks * slots, self.head_dim)
        outer = torch.matmul(flat, keys.transpose(2, 3)).view(
            batch, self.kv_heads, groups, blocks, slots, length
        )
        if bias is not None:
            outer = outer + bias[:, None, None, :, None, :]
        own_keys = own_keys.permute(0, 3, 1, 2, 4)[:, :, None]
        inner = torch.matmul(queries, own_keys.transpose(-1, -2))
        weights = torch.cat((outer, inner), dim=-1).softmax(dim=-1)
        seen = torch.matmul(weights[..., :length].reshape(batch, self.kv_heads, -1, length), values)
        mixed = seen.view(batch, self.kv_heads, groups, blocks, slots, self.head_dim)
        mixed = mixed + torch.matmul(weights[..., length:], own_values.permute(0, 3, 1, 2, 4)[:, :, None])
        mixed = mixed.permute(0, 3, 4, 1, 2, 5).reshape(batch, blocks, slots, self.heads * self.head_dim)
        x = x[:, :, first:] + self.o_proj(mixed)
        normalised = self.post_norm(x)
        return x + self.down_proj(F.silu(self.gate_proj(normalised)) * self.up_proj(normalised))


def context_bias(positions: Tensor, length: int) -> Tensor:
    """Mask of the context: a block sees what lies before its anchor, [..., length] from positions [...]."""
    hidden = torch.arange(length, device=positions.device) >= positions[..., None]
    return torch.zeros(hidden.shape, device=positions.device).masked_fill_(hidden, float("-inf"))


class BlockDrafterModel(nn.Module):
    """Weights of a block drafter.

    Args:
        config: Shape.
        embedding: The target's embedding [vocabulary, hidden]; frozen, not saved.
        head: The target's head rows of ``vocabulary`` [draft vocabulary, hidden]; frozen, not saved.
        vocabulary: Token ids of the reduced vocabulary [draft vocabulary], rising; saved with the weights.
    """

    def __init__(self, config: BlockConfig, embedding: Tensor, head: Tensor, vocabulary: Tensor):
        super().__init__()
        self.config = config
        self.fuse = nn.Linear(len(config.taps) * config.hidden_size, config.hidden_size, bias=False)
        self.fuse_norm = RMSNorm(config.hidden_size, config.eps)
        self.layers = nn.ModuleList(DraftLayer(config) for _ in range(config.n_layers))
        self.norm = RMSNorm(config.hidden_size, config.eps)
        self.register_buffer("vocabulary", vocabulary)
        self.register_buffer("embedding", embedding, persistent=False)
        self.register_buffer("head", head, persistent=False)
        cos, sin = rotary_tables(
            config.head_dim, config.rope_theta, config.max_positions, embedding.device, torch.float32
        )
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def context(self, taps: Tensor, positions: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Keys and values of the context for every layer.

        They depend on the target's taps only, never on a draft layer's output, so catching up is a matrix product.

        Args:
            taps: [batch, length, taps x hidden].
            positions: [batch, length].

        Returns:
            Per layer, keys and values [batch, kv heads, length, head_dim].
        """
        fused = self.fuse_norm(self.fuse(taps))
        cos, sin = self.cos[positions].to(fused.dtype), self.sin[positions].to(fused.dtype)
        return [
            tuple(part.transpose(1, 2) for part in layer.key_values(fused, cos, sin)) for layer in self.layers
        ]

    def blocks(
        self, anchors: Tensor, positions: Tensor, context: list[tuple[Tensor, Tensor]], bias: Tensor | None
    ) -> Tensor:
        """Hidden states of the drafted slots 1 .. B - 1.

        Args:
            anchors: Anchor token ids [batch, blocks].
            positions: Their places [batch, blocks].
            context: From :meth:`context`.
            bias: [batch, blocks, length] or None (see :class:`DraftLayer`).

        Returns:
            [batch, blocks, B - 1, hidden]
        """
        batch, blocks = anchors.shape
        size = self.config.block_size
        x = self.embedding[self.config.mask_token_id].expand(batch, blocks, size, -1).clone()
        x[:, :, 0] = self.embedding[anchors]
        places = positions[..., None] + torch.arange(size, device=positions.device)
        cos, sin = self.cos[places].to(x.dtype), self.sin[places].to(x.dtype)
        for index, layer in enumerate(self.layers):
            last = index == len(self.layers) - 1
            x = layer(x, cos, sin, context[index], bias, first=1 if last else 0)
        return self.norm(x)

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., hidden] -> [..., draft vocabulary]."""
        return F.linear(hidden, self.head)
