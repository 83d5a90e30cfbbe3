"""What the rest of the project knows of a target model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from draftpool.errors import DraftpoolError
from draftpool.targets.cache import KeyValueCache, TransformersCache

Cache = KeyValueCache | TransformersCache
Logits = Literal["all", "last", "none"]


@dataclass(frozen=True)
class TargetOutput:
    """Logits ([batch, n, vocabulary], [batch, 1, vocabulary] or None) and taps [batch, n, taps x hidden]."""

    logits: Tensor | None
    taps: Tensor


class TargetModel(Protocol):
    """A causal language model with rollback and taps.

    `embedding` and `head_weight` are [vocabulary, hidden]; drafters share them.
    """

    hf_config: object
    taps: list[int]
    device: torch.device
    dtype: torch.dtype
    supports_batches: bool
    embedding: Tensor
    head_weight: Tensor

    def new_cache(self, max_length: int, batch: int = 1) -> Cache:
        """Return an empty cache for ``batch`` sequences of up to ``max_length`` tokens."""

    def cache_bytes(self, n_tokens: int) -> int:
        """Memory of the keys and values of a sequence of ``n_tokens`` in bytes."""

    def weights(self) -> list[Tensor]:
        """All its weights."""

    def forward(
        self, ids: Tensor, cache: Cache, logits: Logits = "all", counts: list[int] | None = None
    ) -> TargetOutput:
        """Append ``ids`` [batch, n] to the cache.

        Args:
            ids: New tokens; rows shorter than n are padded at the right.
            cache: Changed in place.
            logits: Which positions to compute logits for.
            counts: Valid tokens of each row (default n).
        """


def head_size(hf_config) -> int:
    """Size of an attention head; configurations that do not name it divide the hidden size evenly."""
    return getattr(hf_config, "head_dim", None) or hf_config.hidden_size // hf_config.num_attention_heads


def join_taps(tapped: list[Tensor], like: Tensor) -> Tensor:
    """Taps side by side [batch, n, taps x hidden]; none at all for a model that nothing reads."""
    return torch.cat(tapped, dim=-1) if tapped else like.new_zeros((*like.shape[:-1], 0))


def default_taps(n_layers: int, n: int = 5) -> list[int]:
    """Layers spread from the 2nd to the 3rd-to-last (DFlash, arXiv 2602.06036, section 4)."""
    if n_layers < n + 3:
        return list(range(min(n, max(1, n_layers - 1))))
    return [round(1 + i * (n_layers - 4) / (n - 1)) for i in range(n)]


def check_taps(taps: list[int] | None, n_layers: int, where: str = "config key `target.taps`") -> list[int]:
    """Return the taps to use.

    Raises:
        DraftpoolError: If a tap is no layer of the target, or is its last layer (whose output passes the final norm).
    """
    if taps is None:
        return default_taps(n_layers)
    wrong = [tap for tap in taps if not 0 <= tap < n_layers - 1]
    if wrong or not taps or sorted(set(taps)) != list(taps):
        raise DraftpoolError(
            f"taps {taps} do not fit a target of {n_layers} layers",
            where,
            f"give rising layer numbers from 0 to {n_layers - 2}",
        )
    return list(taps)
