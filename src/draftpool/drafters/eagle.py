"""Autoregressive head on target features (EAGLE-3, arXiv 2503.01840), drafting a chain.

Entry i of a sequence pairs the target's fused taps of token i with the embedding of token i + 1 and proposes token
i + 2. The first drafted token after an anchor at place p comes from entry p - 1, whose feature is the target's; every
later one stands on the head's own output instead of a feature the target has not made yet. One decoder layer whose
queries, keys and values are read from [embedding, feature]: keys and values of true entries depend on taps and tokens
only, so catching up is a matrix product.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from draftpool.drafters.block import RMSNorm, context_bias
from draftpool.drafters.eagle_config import EagleConfig
from draftpool.targets.fast import rotary_tables, rotate

# Keys and values [batch, kv heads, length, head_dim].
KeyValues = tuple[Tensor, Tensor]


class EagleLayer(nn.Module):
    """The decoder layer; projections read embedding and feature side by side."""

    def __init__(self, config: EagleConfig):
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = config.heads, config.kv_heads, config.head_dim
        hidden, inner = config.hidden_size, config.intermediate_size
        self.input_norm = RMSNorm(hidden, config.eps)
        self.hidden_norm = RMSNorm(hidden, config.eps)
        self.post_norm = RMSNorm(hidden, config.eps)
        bias = config.attention_bias
        self.q_proj = nn.Linear(2 * hidden, self.heads * self.head_dim, bias=bias)
        self.k_proj = nn.Linear(2 * hidden, self.kv_heads * self.head_dim, bias=bias)
        self.v_proj = nn.Linear(2 * hidden, self.kv_heads * self.head_dim, bias=bias)
        self.o_proj = nn.Linear(self.heads * self.head_dim, hidden, bias=False)
        self.gate_proj = nn.Linear(hidden, inner, bias=False)
        self.up_proj = nn.Linear(hidden, inner, bias=False)
        self.down_proj = nn.Linear(inner, hidden, bias=False)

    def inputs(self, embedded: Tensor, feature: Tensor) -> Tensor:
        """[..., hidden] twice -> [..., 2 hidden]."""
        return torch.cat((self.input_norm(embedded), self.hidden_norm(feature)), dim=-1)

    def key_values(self, x: Tensor, cos: Tensor, sin: Tensor) -> KeyValues:
        """Keys (rotated) and values [..., kv heads, head_dim] of x [..., 2 hidden]."""
        shape = (*x.shape[:-1], self.kv_heads, self.head_dim)
        keys = rotate(self.k_proj(x).view(shape), cos[..., None, :], sin[..., None, :])
        return keys, self.v_proj(x).view(shape)

    def forward(
        self,
        x: Tensor,
        feature: Tensor,
        cos: Tensor,
        sin: Tensor,
        context: KeyValues,
        bias: Tensor | None,
        own: list[KeyValues],
    ) -> Tensor:
        """One entry of several chains.

        Args:
            x: From :meth:`inputs` [batch, chains, 2 hidden].
            feature: What the layer's output is added to [batch, chains, hidden].
            cos: [batch, chains, head_dim / 2]; sin likewise.
            sin: As ``cos``.
            context: Keys and values of true entries [batch, kv heads, length, head_dim].
            bias: [batch, chains, length], 0 where a chain sees the context and -inf elsewhere, or None.
            own: Keys and values [batch, chains, kv heads, head_dim] of the chain's own entries, this one last.

        Returns:
            [batch, chains, hidden]
        """
        batch, chains, _ = x.shape
        groups = self.heads // self.kv_heads
        queries = rotate(
            self.q_proj(x).view(batch, chains, self.heads, self.head_dim),
            cos[..., None, :],
            sin[..., None, :],
        )
        queries = (queries * self.head_dim**-0.5).view(batch, chains, self.kv_heads, groups, self.head_dim)
        keys, values = context
        # [batch, kv heads, groups x chains, head_dim]: one product with the context serves all chains.
        flat = queries.permute(0, 2, 3, 1, 4).reshape(batch, self.kv_heads, groups * chains, self.head_dim)
        outer = torch.matmul(flat, keys.transpose(2, 3)).view(batch, self.kv_heads, groups, chains, -1)
        if bias is not None:
            outer = outer + bias[:, None, None]
        if own:
            own_keys = torch.stack([part[0] for part in own], dim=3)
            own_values = torch.stack([part[1] for part in own], dim=3)
            inner = torch.einsum("bckgd,bcksd->bkgcs", queries, own_keys)
            weights = torch.cat((outer, inner), dim=-1).softmax(dim=-1)
        else:
            weights = outer.softmax(dim=-1)
        length = keys.shape[2]
        seen = torch.matmul(
            weights[..., :length].reshape(batch, self.kv_heads, groups * chains, length), values
        )
        mixed = seen.view(batch, self.kv_heads, groups, chains, self.head_dim).permute(0, 3, 1, 2, 4)
        if own:
            mixed = mixed + torch.einsum("bkgcs,bcksd->bckgd", weights[..., length:], own_values)
        x = feature + self.o_proj(mixed.reshape(batch, chains, self.heads * self.head_dim))
        normalised = self.post_norm(x)
        return x + self.down_proj(F.silu(self.gate_proj(normalised)) * self.up_proj(normalised))


class EagleModel(nn.Module):
    """Weights of an EAGLE head.

    Args:
        config: Shape.
        embedding: The target's embedding [vocabulary, hidden]; frozen, not saved.
        head: Rows of the target's head [draft vocabulary, hidden]; frozen and not saved, unless the drafter has a head
            of its own (`config.own_head`), which starts from them.
        vocabulary: Token ids of the reduced vocabulary [draft vocabulary], rising; saved with the weights.
    """

    def __init__(self, config: EagleConfig, embedding: Tensor, head: Tensor, vocabulary: Tensor):
        super().__init__()
        self.config = config
        self.fuse = nn.Linear(len(config.taps) * config.hidden_size, config.hidden_size, bias=False)
        self.layer = EagleLayer(config)
        self.norm = RMSNorm(config.hidden_size, config.eps)
        self.register_buffer("vocabulary", vocabulary)
        self.register_buffer("embedding", embedding, persistent=False)
        if config.own_head:
            self.head = nn.Parameter(head.clone())
        else:
            self.register_buffer("head", head, persistent=False)
        cos, sin = rotary_tables(
            config.head_dim, config.rope_theta, config.max_positions, embedding.device, torch.float32
        )
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def _turn(self, positions: Tensor, like: Tensor) -> tuple[Tensor, Tensor]:
        return self.cos[positions].to(like.dtype), self.sin[positions].to(like.dtype)

    def context(self, taps: Tensor, following: Tensor, positions: Tensor) -> KeyValues:
        """Keys and values of true entries [batch, kv heads, length, head_dim].

        Args:
            taps: [batch, length, taps x hidden].
            following: Ids of the tokens after them [batch, length].
            positions: [batch, length].
        """
        x = self.layer.inputs(self.embedding[following], self.fuse(taps))
        keys, values = self.layer.key_values(x, *self._turn(positions, x))
        return keys.transpose(1, 2), values.transpose(1, 2)

    def step(
        self,
        tokens: Tensor,
        feature: Tensor,
        positions: Tensor,
        context: KeyValues,
        bias: Tensor | None,
        own: list[KeyValues],
    ) -> Tensor:
        """Outputs [batch, chains, hidden] of one more entry of each chain, before the final norm.

        Args:
            tokens: Ids [batch, chains].
            feature: Fused taps, or the chain's last output [batch, chains, hidden].
            positions: Of the entries [batch, chains].
            context: From :meth:`context`.
            bias: [batch, chains, length] or None.
            own: Keys and values of the chain's entries so far; this entry's are appended.
        """
        x = self.layer.inputs(self.embedding[tokens], feature)
        cos, sin = self._turn(positions, x)
        own.append(self.layer.key_values(x, cos, sin))
        return self.layer(x, feature, cos, sin, context, bias, own)

    def unroll(self, taps: Tensor, tokens: Tensor, positions: Tensor, n_steps: int) -> Tensor:
        """Training-time test: K steps at every anchor on the head's own outputs, given the true tokens.

        Args:
            taps: Of all tokens but the last [batch, length, taps x hidden].
            tokens: The whole sequences [batch, length + 1].
            positions: Places of the anchors [batch, anchors], at least 1.
            n_steps: K.

        Returns:
            Hidden states behind the final norm [batch, anchors, K, hidden].
        """
        length = taps.shape[1]
        places = torch.arange(length, device=taps.device).expand(taps.shape[:2])
        context = self.context(taps, tokens[:, 1:], places)
        # Entries before the anchor's own, which is the chain's first.
        bias = context_bias(positions - 1, length).to(context[0].dtype)
        rows = torch.arange(len(taps), device=taps.device)[:, None]
        feature = self.fuse(taps[rows, positions - 1])
        own: list[KeyValues] = []
        made = []
        for step in range(n_steps):
            seen = tokens[rows, (positions + step).clamp(max=length)]
            feature = self.step(seen, feature, positions - 1 + step, context, bias, own)
            made.append(self.norm(feature))
        return torch.stack(made, dim=2)

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., hidden] -> [..., draft vocabulary]."""
        return F.linear(hidden, self.head)
