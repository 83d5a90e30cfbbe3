"""A short forward pass for the Llama, Qwen2 and Qwen3 families: fused projections, preallocated cache, taps."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import Tensor

from draftpool.targets.base import Logits, TargetOutput, head_size, join_taps
from draftpool.targets.cache import KeyValueCache
from draftpool.targets.linear import FrozenLinear
from draftpool.targets.weights import TargetWeights

FAMILIES = ("llama", "qwen2", "qwen3")


def unsupported_reason(config) -> str | None:
    """Why this model needs the transformers backend, or None if the fast one runs it."""
    if config.model_type not in FAMILIES:
        return f"model family `{config.model_type}`"
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type", "default") != "default":
        return f"rotary embedding of type `{rope['rope_type']}`"
    if config.hidden_act != "silu":
        return f"activation `{config.hidden_act}`"
    if any(kind != "full_attention" for kind in getattr(config, "layer_types", None) or []):
        return "sliding-window attention"
    return None


def rotary_tables(head_dim: int, theta: float, max_length: int, device, dtype) -> tuple[Tensor, Tensor]:
    """Cosines and sines [max_length, head_dim / 2]."""
    frequencies = 1.0 / theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32, device=device) / head_dim)
    angles = torch.arange(max_length, dtype=torch.float32, device=device)[:, None] * frequencies
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply rotary position embedding to x [..., head_dim]; cos, sin broadcast over [..., head_dim / 2]."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


class _Layer:
    def __init__(self, state: TargetWeights, prefix: str):
        def fused(*names: str) -> FrozenLinear:
            weights = [state[f"{prefix}{name}.weight"] for name in names]
            biases = [state.get(f"{prefix}{name}.bias") for name in names]
            return FrozenLinear(torch.cat(weights), None if biases[0] is None else torch.cat(biases))

        self.qkv = fused("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
        self.output = fused("self_attn.o_proj")
        self.gate_up = fused("mlp.gate_proj", "mlp.up_proj")
        self.down = fused("mlp.down_proj")
        self.input_norm = state[f"{prefix}input_layernorm.weight"]
        self.post_norm = state[f"{prefix}post_attention_layernorm.weight"]
        self.q_norm = state.get(f"{prefix}self_attn.q_norm.weight")
        self.k_norm = state.get(f"{prefix}self_attn.k_norm.weight")


class FastTarget:
    """The target on the fast path.

    Args:
        config: The model's transformers configuration.
        state: Its weights; they decide device and dtype.
        taps: Layers whose output drafters read.
        first: Layers before this one are left out (see :meth:`hidden_behind`).
    """

    supports_batches = True

    def __init__(self, config, state: TargetWeights, taps: list[int], first: int = 0):
        self.hf_config = config
        self.taps = taps
        self.embedding = state.embedding()
        self.device, self.dtype = self.embedding.device, self.embedding.dtype
        self.heads, self.kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.head_dim = head_size(config)
        self.eps = config.rms_norm_eps
        self.layers = [
            _Layer(state, f"model.layers.{index}.") for index in range(first, config.num_hidden_layers)
        ]
        self.norm = state["model.norm.weight"]
        self.head_weight = state.head(self.embedding)
        self.head = FrozenLinear(self.head_weight)
        theta = config.rope_parameters["rope_theta"]
        self.cos, self.sin = rotary_tables(
            self.head_dim, theta, config.max_position_embeddings, self.device, self.dtype
        )

    def new_cache(self, max_length: int, batch: int = 1) -> KeyValueCache:
        """Return an empty cache for ``batch`` sequences of up to ``max_length`` tokens."""
        max_length = min(max_length, self.hf_config.max_position_embeddings)
        return KeyValueCache(
            len(self.layers), batch, self.kv_heads, max_length, self.head_dim, self.device, self.dtype
        )

    def first_layers(self, n_layers: int) -> FastTarget:
        """The same model without its later layers; weights are shared."""
        short = copy.copy(self)
        short.layers, short.taps = self.layers[:n_layers], []
        return short

    def cache_bytes(self, n_tokens: int) -> int:
        """Memory of the keys and values of a sequence in bytes."""
        return 2 * len(self.layers) * self.kv_heads * self.head_dim * self.embedding.element_size() * n_tokens

    def move(self, device: torch.device, embedding: bool) -> None:
        """Put layers and head on another device, and the embedding if nobody else reads it."""
        if embedding:
            self.embedding = self.embedding.to(device)
        self.head_weight = self.head_weight.to(device)
        for layer in self.layers:
            for part in (layer.qkv, layer.output, layer.gate_up, layer.down):
                part.move(device)
            for name in ("input_norm", "post_norm", "q_norm", "k_norm"):
                value = getattr(layer, name)
                setattr(layer, name, None if value is None else value.to(device))
        self.head.move(device)
        self.norm = self.norm.to(device)

    def weights(self) -> list[Tensor]:
        """All its weights, the embedding first, those of the linear layers as they are multiplied."""
        linear = [
            part for layer in self.layers for part in (layer.qkv, layer.output, layer.gate_up, layer.down)
        ]
        return [self.embedding, self.head_weight, self.norm, *(part.weight for part in linear)]

    def _normalise(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, weight.shape, weight, self.eps)

    def _attention_bias(self, cache: KeyValueCache, positions: Tensor, n: int) -> Tensor | None:
        if n == 1 and cache.batch == 1:
            return None
        places = torch.arange(max(cache.lengths) + n, device=self.device)
        hidden = places[None, None, :] > positions[:, :, None]
        bias = torch.zeros(hidden.shape, device=self.device, dtype=self.dtype)
        return bias.masked_fill_(hidden, float("-inf"))[:, None]

    @torch.inference_mode()
    def forward(
        self, ids: Tensor, cache: KeyValueCache, logits: Logits = "all", counts: list[int] | None = None
    ) -> TargetOutput:
        """Append ``ids`` [batch, n] to the cache (see :class:`draftpool.targets.base.TargetModel`)."""
        x, tapped = self._through(F.embedding(ids, self.embedding), cache)
        counts = counts or [ids.shape[1]] * len(ids)
        cache.advance(counts)
        return TargetOutput(self._logits(x, logits, counts), join_taps(tapped, x))

    @torch.no_grad()
    def hidden_behind(self, x: Tensor) -> Tensor:
        """Run the layers on whole sequences of hidden states [batch, n, hidden], before the final norm."""
        return self._through(x, self.new_cache(x.shape[1], len(x)))[0]

    def _through(self, x: Tensor, cache: KeyValueCache) -> tuple[Tensor, list[Tensor]]:
        """Run the layers on x [batch, n, hidden] behind what the cache holds; the output and the tapped ones."""
        batch, n, _ = x.shape
        cache.reserve(n)
        starts = torch.tensor(cache.lengths, device=self.device)
        positions = starts[:, None] + torch.arange(n, device=self.device)
        cos, sin = self.cos[positions][:, :, None], self.sin[positions][:, :, None]
        fresh = max(cache.lengths) == 0 and n > 1
        bias = None if fresh else self._attention_bias(cache, positions, n)
        rotated = self.heads + self.kv_heads
        tapped = []
        for index, layer in enumerate(self.layers):
            qkv = layer.qkv(self._normalise(x, layer.input_norm)).view(
                batch, n, rotated + self.kv_heads, self.head_dim
            )
            if layer.q_norm is None:
                turned = rotate(qkv[:, :, :rotated], cos, sin)
            else:
                queries = self._normalise(qkv[:, :, : self.heads], layer.q_norm)
                keys = self._normalise(qkv[:, :, self.heads : rotated], layer.k_norm)
                turned = rotate(torch.cat((queries, keys), dim=2), cos, sin)
            queries, keys = (
                turned[:, :, : self.heads].transpose(1, 2),
                turned[:, :, self.heads :].transpose(1, 2),
            )
            values = qkv[:, :, rotated:].transpose(1, 2)
            all_keys, all_values = cache.write(index, keys, values, positions)
            # Grouped queries share keys and values inside the kernel; nothing is copied.
            if fresh:
                mixed = F.scaled_dot_product_attention(queries, keys, values, is_causal=True, enable_gqa=True)
            else:
                mixed = F.scaled_dot_product_attention(
                    queries, all_keys, all_values, attn_mask=bias, enable_gqa=True
                )
            x = x + layer.output(mixed.transpose(1, 2).reshape(batch, n, -1))
            gate, up = layer.gate_up(self._normalise(x, layer.post_norm)).chunk(2, dim=-1)
            x = x + layer.down(F.silu(gate) * up)
            if index in self.taps:
                tapped.append(x)
        return x, tapped

    def _logits(self, x: Tensor, logits: Logits, counts: list[int]) -> Tensor | None:
        if logits == "none":
            return None
        if logits == "last":
            x = x[torch.arange(x.shape[0]), torch.tensor(counts) - 1][:, None]
        return self.head(self._normalise(x, self.norm))
