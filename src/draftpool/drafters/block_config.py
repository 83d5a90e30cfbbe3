"""Shape of a block drafter, how it is fitted to a target, and the reduced vocabulary of trained drafters."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import torch
from pydantic import BaseModel, ConfigDict
from torch import Tensor

from draftpool.drafters.drafter_folder import layer_fields


class BlockConfig(BaseModel):
    """Everything needed to rebuild a block drafter beside its target."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    kind: str = "block"
    n_layers: int
    block_size: int
    taps: list[int]
    mask_token_id: int
    hidden_size: int
    intermediate_size: int
    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    rope_theta: float
    max_positions: int
    qk_norm: bool
    attention_bias: bool
    target_layers: int
    target_vocabulary: int


def config_for(hf_config, taps: list[int], mask_token_id: int, n_layers: int, block_size: int) -> BlockConfig:
    """Shape a drafter after its target's layers (widths, heads, rotary base, norms)."""
    return BlockConfig(
        n_layers=n_layers,
        block_size=block_size,
        taps=taps,
        mask_token_id=mask_token_id,
        qk_norm=hf_config.model_type == "qwen3",
        attention_bias=hf_config.model_type == "qwen2" or bool(getattr(hf_config, "attention_bias", False)),
        **layer_fields(hf_config),
    )


def mask_token(tokenizer) -> int:
    """Id whose (frozen) embedding fills the masked slots: the mask token, else one that ordinary text never holds."""
    for name in ("mask_token_id", "unk_token_id", "pad_token_id", "bos_token_id", "eos_token_id"):
        value = getattr(tokenizer, name, None)
        if value is not None:
            return value
    return 0


def reduced_vocabulary(answers: Iterable[list[int]], size: int | None, vocabulary: int) -> Tensor:
    """Ids a drafter may propose, rising: the most frequent ones of the answers, filled up with the lowest ids.

    Byte-pair ids are in merge order, so the lowest ids are the most frequent ones of the tokenizer's own corpus.

    Args:
        answers: Token ids of the training answers.
        size: Ids wanted; None for the whole vocabulary.
        vocabulary: Size of the target's vocabulary.
    """
    if size is None or size >= vocabulary:
        return torch.arange(vocabulary)
    counts = Counter(token for answer in answers for token in answer)
    chosen = dict.fromkeys(
        token for token, _ in sorted(counts.items(), key=lambda item: (-item[1], item[0]))[:size]
    )
    for token in range(vocabulary):
        if len(chosen) >= size:
            break
        chosen.setdefault(token)
    return torch.tensor(sorted(chosen))
