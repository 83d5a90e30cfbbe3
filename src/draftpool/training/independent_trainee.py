"""Distilling a small language model: some of the target's layers under its own embedding and head."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

from draftpool.drafters.drafter_folder import save_drafter
from draftpool.drafters.independent_config import IndependentConfig
from draftpool.errors import DraftpoolError
from draftpool.targets.fast import unsupported_reason
from draftpool.targets.load import load_weights
from draftpool.training.batches import Batch


def spread_layers(n_layers: int, of: int) -> list[int]:
    """Layers spread evenly from the first to the last."""
    return [round(index * (of - 1) / max(1, n_layers - 1)) for index in range(n_layers)]


class SmallModel(nn.Module):
    """Decoder layers and final norm of transformers; embedding and head are the target's, frozen and not saved."""

    def __init__(self, hf_config, embedding: Tensor, head: Tensor, vocabulary: Tensor):
        super().__init__()
        from transformers import AutoModel

        hf_config.tie_word_embeddings = False
        self.decoder = AutoModel.from_config(hf_config, attn_implementation="sdpa", dtype=torch.float32)
        # The embedding is looked up outside, so that it is no parameter here.
        self.decoder.embed_tokens = nn.Identity()
        self.register_buffer("embedding", embedding, persistent=False)
        self.register_buffer("head", head, persistent=False)
        self.register_buffer("vocabulary", vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        """Hidden states behind the final norm [batch, n, hidden] of tokens [batch, n]."""
        return self.decoder(inputs_embeds=self.embedding[tokens], use_cache=False).last_hidden_state


class IndependentTrainee:
    """A small language model: every anchor proposes one token, from the text alone.

    Raises:
        DraftpoolError: If the target has other layers than asked for, or is not on the fast path.
    """

    slots = 1

    def __init__(self, cfg: dict, target: Path, vocabulary: Tensor):
        from transformers import AutoConfig

        weights = load_weights(target, torch.float32)
        full = AutoConfig.from_pretrained(target, local_files_only=True, trust_remote_code=False)
        reason = unsupported_reason(full)
        if reason is not None:
            raise DraftpoolError(
                f"layers of this target cannot be distilled ({reason})",
                "config key `kind: independent`",
                "use `kind: checkpoint` with `layout: causal_lm`",
            )
        shape, layers = cfg["model"], full.num_hidden_layers
        self.sources = shape["layers"] or spread_layers(shape["n_layers"], layers)
        wrong = [layer for layer in self.sources if not 0 <= layer < layers]
        if wrong or len(self.sources) != shape["n_layers"] or sorted(set(self.sources)) != self.sources:
            raise DraftpoolError(
                f"layers {self.sources} for {shape['n_layers']} draft layers of a target of {layers}",
                "config key `model.layers`",
                f"give n_layers rising layer numbers from 0 to {layers - 1}",
            )
        small = AutoConfig.from_pretrained(target, local_files_only=True, trust_remote_code=False)
        small.num_hidden_layers = shape["n_layers"]
        if getattr(small, "layer_types", None):
            small.layer_types = list(small.layer_types)[: shape["n_layers"]]
        embedding = weights.embedding()
        self.module = SmallModel(small, embedding, weights.head(embedding)[vocabulary], vocabulary)
        self.config = IndependentConfig(
            draft_tokens=shape["draft_tokens"],
            n_layers=shape["n_layers"],
            lm={
                "model_type": full.model_type,
                "hidden_size": full.hidden_size,
                "num_hidden_layers": shape["n_layers"],
                "num_attention_heads": full.num_attention_heads,
                "num_key_value_heads": full.num_key_value_heads,
                "head_dim": getattr(full, "head_dim", None),
                "rms_norm_eps": full.rms_norm_eps,
                "rope_parameters": {"rope_theta": full.rope_parameters["rope_theta"]},
                "max_position_embeddings": full.max_position_embeddings,
                "vocab_size": full.vocab_size,
            },
            hidden_size=full.hidden_size,
            target_layers=layers,
            target_vocabulary=full.vocab_size,
        )
        self._weights = weights

    @property
    def vocabulary(self) -> Tensor:
        """Ids it may propose."""
        return self.module.vocabulary

    @property
    def head(self) -> Tensor:
        """The target's head."""
        return self.module.head

    def start_from_target(self, target: Path, seed: int) -> None:
        """Copy the chosen layers and the final norm."""
        state = {}
        for place, source in enumerate(self.sources):
            prefix = f"model.layers.{source}."
            for name in self._weights:
                if name.startswith(prefix):
                    state[f"layers.{place}.{name.removeprefix(prefix)}"] = self._weights[name]
        state["norm.weight"] = self._weights["model.norm.weight"]
        self.module.decoder.load_state_dict(state)

    def hidden(self, batch: Batch) -> Tensor:
        """Hidden states at the anchors [sequences, anchors, 1, hidden]."""
        device = self.module.embedding.device
        tokens = batch.tokens.to(device)
        made = self.module(tokens)
        rows = torch.arange(len(tokens), device=device)[:, None]
        # Padding anchors stand behind the last token.
        places = batch.positions.to(device).clamp(max=tokens.shape[1] - 1)
        return made[rows, places][:, :, None]

    def save(self, folder: Path) -> None:
        """Write layers and norm by the names transformers gives them in a causal language model."""
        state = {f"model.{name}": value for name, value in self.module.decoder.state_dict().items()}
        save_drafter(folder, self.config, state | {"vocabulary": self.module.vocabulary})
