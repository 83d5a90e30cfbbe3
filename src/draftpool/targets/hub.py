"""Any causal language model through transformers itself: slower, one sequence at a time, no family left out."""

from __future__ import annotations

import torch
from torch import Tensor

from draftpool.targets.base import Logits, TargetOutput
from draftpool.targets.cache import TransformersCache


class TransformersTarget:
    """The target on the transformers backend."""

    supports_batches = False

    def __init__(self, model: torch.nn.Module, taps: list[int]):
        self.model = model
        self.hf_config = model.config
        self.taps = taps
        self.device, self.dtype = model.device, model.dtype
        self.embedding = model.get_input_embeddings().weight.detach()
        self.head_weight = model.get_output_embeddings().weight.detach()

    def new_cache(self, max_length: int, batch: int = 1) -> TransformersCache:
        """Return an empty cache of transformers.

        Raises:
            ValueError: If more than one sequence is asked for.
        """
        from transformers import DynamicCache

        if batch != 1:
            raise ValueError("the transformers backend runs one sequence at a time")
        return TransformersCache(DynamicCache(config=self.hf_config), max_length)

    @torch.inference_mode()
    def forward(self, ids: Tensor, cache: TransformersCache, logits: Logits = "all", counts: list[int] | None = None) -> TargetOutput:
        """Append ``ids`` [1, n] to the cache (see :class:`draftpool.targets.base.TargetModel`)."""
        keep = {"all": 0, "last": 1, "none": 1}[logits]
        output = self.model(ids, cache=cache.cache, use_cache=True, output_hidden_states=True, logits_to_keep=keep)
        cache.lengths = [cache.lengths[0] + ids.shape[1]]
        # hidden_states[0] is the embedding, so the output of layer i is entry i + 1.
        taps = torch.cat([output.hidden_states[tap + 1] for tap in self.taps], dim=-1)
        return TargetOutput(None if logits == "none" else output.logits, taps)
