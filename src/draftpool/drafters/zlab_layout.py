"""Block drafters in z-lab's layout: layers of Qwen3's form, target layers and mask token under `dflash_config`.

Keys and names are those of github.com/z-lab/dflash (dflash/model.py). Layer numbers mean the same there as here: the
output of that layer, counted from 0.
"""

from __future__ import annotations

import torch
from torch import Tensor

from draftpool.drafters.block import BlockDrafterModel
from draftpool.drafters.block_config import BlockConfig
from draftpool.drafters.published_files import Checkpoint, check_same_taps, check_target, damaged

OUTER = {
    "fuse.weight": "fc.weight",
    "fuse_norm.weight": "hidden_norm.weight",
    "norm.weight": "norm.weight",
}
# Of one layer; `self_attn` and `mlp` are no levels of ours.
LAYER = {
    "input_norm.weight": "input_layernorm.weight",
    "post_norm.weight": "post_attention_layernorm.weight",
    **{f"{name}.weight": f"self_attn.{name}.weight" for name in ("q_proj", "k_proj", "v_proj", "o_proj")},
    **{f"{name}.weight": f"self_attn.{name}.weight" for name in ("q_norm", "k_norm")},
    **{f"{name}.weight": f"mlp.{name}.weight" for name in ("gate_proj", "up_proj", "down_proj")},
}
BIASES = {f"{name}.bias": f"self_attn.{name}.bias" for name in ("q_proj", "k_proj", "v_proj")}
# Their output projection has a bias where the others have; ours never has.
OUTPUT_BIAS = "self_attn.o_proj.bias"


def names(config: BlockConfig) -> dict[str, str]:
    """Our name -> theirs of all tensors of a drafter with q/k norms, its vocabulary left out."""
    inner = LAYER | (BIASES if config.attention_bias else {})
    layers = {
        f"layers.{index}.{ours}": f"layers.{index}.{theirs}"
        for index in range(config.n_layers)
        for ours, theirs in inner.items()
    }
    return OUTER | layers


def output_biases(config: BlockConfig) -> list[str]:
    """Their names of biases that ours do not have."""
    return [f"layers.{index}.{OUTPUT_BIAS}" for index in range(config.n_layers) if config.attention_bias]


def shapes(config: BlockConfig) -> dict[str, tuple[int, ...]]:
    """Our name -> shape of all tensors but the vocabulary."""
    with torch.device("meta"):
        frozen = torch.empty(1, config.hidden_size)
        model = BlockDrafterModel(config, frozen, frozen, torch.empty(1, dtype=torch.long))
    made = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    return {name: shape for name, shape in made.items() if name != "vocabulary"}


def _setting(checkpoint: Checkpoint, name: str) -> dict:
    """The settings that hold `name`: `dflash_config` before the outer ones."""
    inner = checkpoint.section("dflash_config")
    return inner if inner.get(name) is not None else checkpoint.config


def _check_supported(checkpoint: Checkpoint, n_layers: int) -> None:
    settings = checkpoint.config
    kinds = settings.get("layer_types") or []
    if not kinds and settings.get("use_sliding_window"):
        # Qwen3's rule where the layers are not listed.
        kinds = ["sliding_attention"] * (n_layers - checkpoint.whole("max_window_layers", 28, low=0))
    if any(kind != "full_attention" for kind in kinds):
        raise checkpoint.unsupported("its layers have sliding-window attention")
    if settings.get("is_causal"):
        raise checkpoint.unsupported("its slots see only earlier slots (`is_causal`)")
    for name, neutral in (
        ("output_multiplier", 1.0),
        ("input_embedding_scale", 1.0),
        ("final_logit_softcapping", 0.0),
    ):
        value = _setting(checkpoint, name).get(name)
        if value is not None and value != neutral:
            raise checkpoint.unsupported(f"it has `{name}` {value}")


def read(checkpoint: Checkpoint, target_config, taps: list[int]) -> tuple[BlockConfig, dict[str, Tensor]]:
    """Our configuration and weights of a published block drafter, the whole vocabulary among them.

    Args:
        checkpoint: The drafter.
        target_config: Configuration of the study's target.
        taps: Layers of the target that the study reads.

    Raises:
        DraftpoolError: If it belongs to another target, reads other layers, is damaged, or of an unsupported form.
    """
    shape, n_layers = checkpoint.head_shape(), checkpoint.whole("num_hidden_layers")
    found = {"hidden_size": shape["hidden_size"], "vocab_size": checkpoint.whole("vocab_size")}
    if checkpoint.config.get("num_target_layers") is not None:
        found["num_target_layers"] = checkpoint.whole("num_target_layers")
    needed = {
        "hidden_size": target_config.hidden_size,
        "vocab_size": target_config.vocab_size,
        "num_target_layers": target_config.num_hidden_layers,
    }
    check_target(checkpoint, found, needed)
    _check_supported(checkpoint, n_layers)
    read_layers = checkpoint.layers("target_layer_ids", _setting(checkpoint, "target_layer_ids"))
    check_same_taps(checkpoint, read_layers, taps, target_config.num_hidden_layers)
    mask = checkpoint.whole("mask_token_id", settings=_setting(checkpoint, "mask_token_id"), low=0)
    if mask >= target_config.vocab_size:
        raise damaged(
            f"config.json: `mask_token_id` is {mask}, the vocabulary has {target_config.vocab_size} ids",
            checkpoint.where,
        )
    config = BlockConfig(
        n_layers=n_layers,
        block_size=checkpoint.whole("block_size", settings=_setting(checkpoint, "block_size"), low=2),
        taps=taps,
        mask_token_id=mask,
        qk_norm=True,
        attention_bias=bool(checkpoint.config.get("attention_bias")),
        target_layers=target_config.num_hidden_layers,
        target_vocabulary=target_config.vocab_size,
        **shape,
    )
    biases = [name for name in output_biases(config) if name in checkpoint]
    for name in biases:
        if checkpoint[name].any():
            raise checkpoint.unsupported(f"its `{name}` is not zero")
    state = checkpoint.renamed(names(config), shapes(config), set(biases))
    return config, state | {"vocabulary": torch.arange(config.target_vocabulary)}


def settings_of(config: BlockConfig, dtype: torch.dtype) -> dict:
    """Their `config.json` of one of our drafters."""
    return {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "dtype": str(dtype).removeprefix("torch."),
        "block_size": config.block_size,
        "dflash_config": {"target_layer_ids": config.taps, "mask_token_id": config.mask_token_id},
        "num_target_layers": config.target_layers,
        "vocab_size": config.target_vocabulary,
        "num_hidden_layers": config.n_layers,
        "layer_types": ["full_attention"] * config.n_layers,
        "use_sliding_window": False,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "attention_bias": config.attention_bias,
        "attention_dropout": 0.0,
        "rms_norm_eps": config.eps,
        "rope_theta": config.rope_theta,
        "rope_scaling": None,
        "max_position_embeddings": config.max_positions,
        "tie_word_embeddings": False,
    }


def tensors_of(config: BlockConfig, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Their tensors of one of our drafters with q/k norms."""
    made = {theirs: state[ours].contiguous() for ours, theirs in names(config).items()}
    like = state["norm.weight"]
    return made | {name: torch.zeros_like(like) for name in output_biases(config)}
