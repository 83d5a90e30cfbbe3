"""Any causal language model through transformers itself: slower, one sequence at a time, no family left out."""

from __future__ import annotations

import torch
from torch import Tensor

from draftpool.errors import DraftpoolError
from draftpool.targets.base import Logits, TargetOutput, head_size, join_taps
from draftpool.targets.cache import TransformersCache

# Layers whose state is one entry per token, so that a rejected token can be taken out again.
ATTENTION = {"full_attention", "sliding_attention", "chunked_attention"}


def weight_of(module: torch.nn.Module, device: torch.device) -> Tensor:
    """The weight of a module on a device, wherever accelerate keeps it; no copy if it lies there already."""
    weight = module.weight.detach()
    if weight.device.type != "meta":
        return weight.to(device)
    from accelerate.utils import align_module_device

    # Offloaded: it is brought in as for a forward pass, and taken over before it goes again.
    with align_module_device(module, device):
        return module.weight.detach().to(device, copy=True)


class TransformersTarget:
    """The target on the transformers backend.

    Args:
        model: On one device, or dispatched over several (memory and disk among them) by accelerate.
        taps: Layers whose output drafters read.
        device: Of a dispatched model, where tokens come from and logits and taps go: that of the drafters, which get
            embedding and head there too.

    Raises:
        DraftpoolError: If the model has recurrent layers, which cannot be rolled back.
    """

    supports_batches = False

    def __init__(self, model: torch.nn.Module, taps: list[int], device: torch.device | None = None):
        recurrent = sorted(set(getattr(model.config, "layer_types", None) or []) - ATTENTION)
        if recurrent:
            raise DraftpoolError(
                f"layers of kind {', '.join(recurrent)} cannot take back a rejected token",
                "config key `target`",
                "choose a model whose layers are all attention",
            )
        self.model = model
        self.hf_config = model.config
        self.taps = taps
        self.device, self.dtype = device or model.device, model.dtype
        inputs, outputs = model.get_input_embeddings(), model.get_output_embeddings()
        self.embedding = weight_of(inputs, self.device)
        # Offloaded weights are place holders, whose identity says nothing.
        offloaded = outputs.weight.device.type == inputs.weight.device.type == "meta"
        tied = model.config.tie_word_embeddings if offloaded else outputs.weight is inputs.weight
        self.head_weight = self.embedding if tied else weight_of(outputs, self.device)

    def new_cache(self, max_length: int, batch: int = 1) -> TransformersCache:
        """Return an empty cache of transformers.

        Raises:
            ValueError: If more than one sequence is asked for.
        """
        from transformers import DynamicCache

        if batch != 1:
            raise ValueError("the transformers backend runs one sequence at a time")
        # Without the configuration every layer keeps all its keys: a sliding window would forget what a long
        # rollback needs. The attention masks come from the model and keep to the window.
        return TransformersCache(DynamicCache(), min(max_length, self.hf_config.max_position_embeddings))

    def cache_bytes(self, n_tokens: int) -> int:
        """Memory of the keys and values of a sequence in bytes."""
        config = self.hf_config
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        size = self.embedding.element_size()
        return 2 * config.num_hidden_layers * heads * head_size(config) * size * n_tokens

    def weights(self) -> list[Tensor]:
        """All its weights."""
        return [parameter.detach() for parameter in self.model.parameters()]

    @torch.inference_mode()
    def forward(
        self, ids: Tensor, cache: TransformersCache, logits: Logits = "all", counts: list[int] | None = None
    ) -> TargetOutput:
        """Append ``ids`` [1, n] to the cache (see :class:`draftpool.targets.base.TargetModel`)."""
        cache.reserve(ids.shape[1])
        keep = {"all": 0, "last": 1, "none": 1}[logits]
        # Layers of a dispatched model lie on several devices; accelerate moves what goes from one to the next.
        output = self.model(
            ids.to(self.device),
            cache=cache.cache,
            use_cache=True,
            output_hidden_states=True,
            logits_to_keep=keep,
        )
        cache.lengths = [cache.lengths[0] + ids.shape[1]]
        # hidden_states[0] is the embedding, so the output of layer i is entry i + 1.
        hidden = output.hidden_states
        taps = join_taps([hidden[tap + 1].to(self.device) for tap in self.taps], hidden[0].to(self.device))
        return TargetOutput(None if logits == "none" else output.logits.to(self.device), taps)
