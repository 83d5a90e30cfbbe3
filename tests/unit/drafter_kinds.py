"""Untrained drafters of every kind over a tiny target, of loud weights so that drafts depend on all they should."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from tiny import SPREAD, VOCABULARY, causal_model, random_drafter

from draftpool.drafters.base import Drafter
from draftpool.drafters.eagle import EagleModel
from draftpool.drafters.eagle_config import eagle_config_for
from draftpool.drafters.eagle_live import EagleDrafter
from draftpool.drafters.independent import SharedWeights
from draftpool.drafters.language_model import FastLanguageModelDrafter, LanguageModelDrafter
from draftpool.drafters.ngram import NgramDrafter
from draftpool.drafters.suffix import SuffixDrafter
from draftpool.targets.fast import FastTarget
from draftpool.targets.hub import TransformersTarget

KINDS = ("block", "eagle", "independent", "published", "early_exit", "ngram", "suffix")
MODELLED = KINDS[:5]
K = 4


def loud(model: torch.nn.Module, seed: int) -> torch.nn.Module:
    """Give a module wide random weights."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * SPREAD)
    return model.eval().requires_grad_(False)


def eagle(target, name: str = "eagle", vocabulary=None, seed: int = 0, k: int = K, own_head: bool = False):
    """An EAGLE head."""
    vocabulary = torch.arange(VOCABULARY) if vocabulary is None else vocabulary
    config = eagle_config_for(target.hf_config, target.taps, k, own_head)
    model = EagleModel(config, target.embedding, target.head_weight[vocabulary], vocabulary)
    return EagleDrafter(name, loud(model, seed))


def independent(target, name: str = "independent", vocabulary=None, n_layers: int = 2, k: int = K):
    """The target's first layers as a small model of its own, so that it agrees with it at times."""
    vocabulary = torch.arange(10, VOCABULARY) if vocabulary is None else vocabulary
    config = SimpleNamespace(**{**vars(target.hf_config), "num_hidden_layers": n_layers})
    state = causal_model(target.hf_config.model_type, 0).state_dict()
    weights = SharedWeights(state, target.embedding, target.head_weight[vocabulary])
    lm = FastTarget(_named(config, target), weights, [])
    return FastLanguageModelDrafter(name, lm, k, vocabulary, "embedding")


def _named(config: SimpleNamespace, target) -> SimpleNamespace:
    wanted = ("hidden_size", "num_attention_heads", "num_key_value_heads", "rms_norm_eps", "rope_parameters")
    values = {name: getattr(target.hf_config, name) for name in wanted}
    values |= {"head_dim": getattr(target.hf_config, "head_dim", None)}
    values |= {"max_position_embeddings": target.hf_config.max_position_embeddings}
    return SimpleNamespace(num_hidden_layers=config.num_hidden_layers, **values)


def published(target, name: str = "published", k: int = K, **changes):
    """Another causal language model, through transformers."""
    model = causal_model("mistral", 1, **changes)
    lm = TransformersTarget(model, [])
    return LanguageModelDrafter(name, lm, k, torch.arange(VOCABULARY - 7))


def early_exit(target, name: str = "early_exit", k: int = K):
    """The target without its last layer."""
    lm = target.first_layers(len(target.layers) - 1)
    return FastLanguageModelDrafter(name, lm, k, torch.arange(VOCABULARY), "everything")


def make(kind: str, target) -> Drafter:
    """A drafter of a kind."""
    if kind == "block":
        return random_drafter(target, "block", block_size=K + 1)
    if kind == "ngram":
        return NgramDrafter("ngram", K)
    if kind == "suffix":
        return SuffixDrafter("suffix", K)
    makers = {
        "eagle": eagle,
        "independent": independent,
        "published": published,
        "early_exit": early_exit,
    }
    return makers[kind](target)


def fresh(drafter: Drafter, target, sequence: list[int]):
    """What the drafter proposes after ``sequence`` (anchor last), everything read at once and from the start."""
    ids = torch.tensor(sequence[:-1])
    taps = target.forward(ids[None], target.new_cache(len(ids)), "none").taps[0]
    drafter.reset(len(ids) + 1)
    drafter.prefill(ids, taps)
    return drafter.draft(sequence[-1])
