"""Shape of an EAGLE head, and how it is fitted to a target."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

from draftpool.targets.base import head_size


class EagleConfig(BaseModel):
    """Everything needed to rebuild an EAGLE head beside its target."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    kind: str = "eagle"
    draft_tokens: int
    taps: list[int]
    hidden_size: int
    intermediate_size: int
    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    rope_theta: float
    max_positions: int
    attention_bias: bool
    own_head: bool
    target_layers: int
    target_vocabulary: int


def eagle_config_for(hf_config, taps: list[int], draft_tokens: int, own_head: bool) -> EagleConfig:
    """Shape a head after its target's layers (widths, heads, rotary base)."""
    heads = hf_config.num_attention_heads
    return EagleConfig(
        draft_tokens=draft_tokens,
        taps=taps,
        hidden_size=hf_config.hidden_size,
        intermediate_size=hf_config.intermediate_size,
        heads=heads,
        kv_heads=getattr(hf_config, "num_key_value_heads", heads),
        head_dim=head_size(hf_config),
        eps=getattr(hf_config, "rms_norm_eps", 1e-6),
        rope_theta=(getattr(hf_config, "rope_parameters", None) or {}).get("rope_theta", 10000.0),
        max_positions=hf_config.max_position_embeddings,
        attention_bias=False,
        own_head=own_head,
        target_layers=hf_config.num_hidden_layers,
        target_vocabulary=hf_config.vocab_size,
    )
