"""Shape of an EAGLE head, and how it is fitted to a target."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

from draftpool.drafters.drafter_folder import layer_fields


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
    return EagleConfig(
        draft_tokens=draft_tokens,
        taps=taps,
        attention_bias=False,
        own_head=own_head,
        **layer_fields(hf_config),
    )
