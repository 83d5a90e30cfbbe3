"""EAGLE-3 heads in SafeAILab's layout: one Llama layer `midlayer`, a head of its own over a reduced vocabulary.

Names are those of github.com/SafeAILab/EAGLE (eagle/model/cnets.py). Two things are counted otherwise than here. Ids:
draft id i stands for token i + d2t[i], and t2d marks those tokens. Layers: SafeAILab takes what goes into the layers
2, n // 2 and n - 3, counted from 0, that is what comes out of 1, n // 2 - 1 and n - 4, our taps.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from draftpool.drafters.eagle import EagleModel
from draftpool.drafters.eagle_config import EagleConfig
from draftpool.drafters.published_files import Checkpoint, check_same_taps, check_target, damaged
from draftpool.targets.load import load_weights

NAMES = {
    "fuse.weight": "fc.weight",
    "norm.weight": "norm.weight",
    "head": "lm_head.weight",
    "layer.input_norm.weight": "midlayer.input_layernorm.weight",
    "layer.hidden_norm.weight": "midlayer.hidden_norm.weight",
    "layer.post_norm.weight": "midlayer.post_attention_layernorm.weight",
    **{
        f"layer.{name}.weight": f"midlayer.self_attn.{name}.weight"
        for name in ("q_proj", "k_proj", "v_proj", "o_proj")
    },
    **{
        f"layer.{name}.weight": f"midlayer.mlp.{name}.weight"
        for name in ("gate_proj", "up_proj", "down_proj")
    },
}
BIASES = {f"layer.{name}.bias": f"midlayer.self_attn.{name}.bias" for name in ("q_proj", "k_proj", "v_proj")}
EMBEDDING = "embed_tokens.weight"
LAYER_KEY = "eagle_aux_hidden_state_layer_ids"
# Variants that other trainers write under the same names; they change the formula.
VARIANTS = ("norm_before_residual", "norm_before_fc", "fc_norm")
# Rows of the embedding that are compared at a time.
ROWS = 8192


def target_layers(checkpoint: Checkpoint, n_layers: int) -> list[int]:
    """Layers of the target whose outputs the head reads.

    A configuration may name them, and does so in two ways: by output (first number 1) or, as SafeAILab counts, by
    input (first number 2). Like SGLang (its pull request 25454), the first number decides.
    """
    inner = checkpoint.section("eagle_config")
    settings = inner if inner.get(LAYER_KEY) is not None else checkpoint.config
    if settings.get(LAYER_KEY) is None:
        return [1, n_layers // 2 - 1, n_layers - 4]
    layers = checkpoint.layers(LAYER_KEY, settings)
    return layers if layers[0] <= 1 else [layer - 1 for layer in layers]


def _vocabulary(checkpoint: Checkpoint, size: int, target_size: int) -> Tensor:
    """Token id of every draft id [size], in the checkpoint's order."""
    if size == target_size:
        # SafeAILab's code does not look at the maps then, and leaves zeros in them.
        return torch.arange(size)
    if "d2t" not in checkpoint:
        raise damaged("no tensor `d2t`", checkpoint.where)
    shifts = checkpoint["d2t"]
    if tuple(shifts.shape) != (size,) or shifts.is_floating_point():
        raise damaged(f"`d2t` is no list of {size} whole numbers", checkpoint.where)
    ids = torch.arange(size) + shifts.long()
    if int(ids.min()) < 0 or int(ids.max()) >= target_size or len(ids.unique()) < size:
        raise damaged(f"`d2t` does not lead to {size} different ids below {target_size}", checkpoint.where)
    if "t2d" in checkpoint:
        marked = checkpoint["t2d"]
        if tuple(marked.shape) != (target_size,) or not torch.equal(
            marked.nonzero()[:, 0], ids.sort().values
        ):
            raise damaged("`t2d` marks other tokens than `d2t` leads to", checkpoint.where)
    return ids


def _check_embedding(checkpoint: Checkpoint, target: Path) -> None:
    """Refuse a head with an embedding of its own; a copy of the target's is left out."""
    theirs, ours = checkpoint[EMBEDDING], load_weights(target, torch.float32).embedding()
    same = theirs.shape == ours.shape and all(
        # Either may have been rounded to another type on the way.
        torch.allclose(theirs[start : start + ROWS].float(), ours[start : start + ROWS], rtol=1e-2, atol=1e-6)
        for start in range(0, len(ours), ROWS)
    )
    if not same:
        raise checkpoint.unsupported(f"its `{EMBEDDING}` is not the target's embedding")


def _shapes(config: EagleConfig, size: int) -> dict[str, tuple[int, ...]]:
    with torch.device("meta"):
        head = torch.empty(size, config.hidden_size)
        model = EagleModel(config, head, head, torch.empty(size, dtype=torch.long))
    return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}


def read(
    checkpoint: Checkpoint, target: Path, target_config, taps: list[int], draft_tokens: int
) -> tuple[EagleConfig, dict[str, Tensor]]:
    """Our configuration and weights of a published EAGLE-3 head.

    Args:
        checkpoint: The head.
        target: Folder of the study's target; its embedding is read if the head brings a copy.
        target_config: Configuration of the target.
        taps: Layers of the target that the study reads.
        draft_tokens: Tokens of a draft.

    Raises:
        DraftpoolError: If it belongs to another target, reads other layers, is damaged, or of an unsupported form.
    """
    inner = checkpoint.section("eagle_config")
    for name in VARIANTS:
        if inner.get(name) or checkpoint.config.get(name):
            raise checkpoint.unsupported(f"it has `{name}`")
    if inner.get("use_aux_hidden_state") is False:
        raise checkpoint.unsupported("it reads one layer of the target, as before EAGLE-3")
    shape, vocabulary = checkpoint.head_shape(), checkpoint.whole("vocab_size")
    found = {"hidden_size": shape["hidden_size"], "vocab_size": vocabulary}
    if checkpoint.config.get("target_hidden_size") is not None:
        found["target_hidden_size"] = checkpoint.whole("target_hidden_size")
    needed = {
        "hidden_size": target_config.hidden_size,
        "vocab_size": target_config.vocab_size,
        "target_hidden_size": target_config.hidden_size,
    }
    check_target(checkpoint, found, needed)
    n_layers = target_config.num_hidden_layers
    check_same_taps(checkpoint, target_layers(checkpoint, n_layers), taps, n_layers)
    if checkpoint.whole("num_hidden_layers", 1) != 1:
        raise checkpoint.unsupported(f"it has {checkpoint.config['num_hidden_layers']} layers")
    size = checkpoint.whole("draft_vocab_size", vocabulary)
    bias = next(iter(BIASES.values())) in checkpoint
    config = EagleConfig(
        draft_tokens=draft_tokens,
        taps=taps,
        # Llama's `attention_bias` is not looked at in SafeAILab's code; the tensors tell.
        attention_bias=bias,
        own_head=True,
        target_layers=n_layers,
        target_vocabulary=vocabulary,
        **shape,
    )
    beside = {name for name in ("d2t", "t2d", EMBEDDING) if name in checkpoint}
    state = checkpoint.renamed(NAMES | (BIASES if bias else {}), _shapes(config, size), beside)
    ids = _vocabulary(checkpoint, size, vocabulary)
    if EMBEDDING in checkpoint:
        _check_embedding(checkpoint, target)
    # Ours rises; the head's rows move along.
    order = ids.argsort()
    return config, state | {"head": state["head"][order], "vocabulary": ids[order]}
