"""How a drafter starts: random, from the target's deepest layers, or from another drafter."""

from __future__ import annotations

import hashlib
from pathlib import Path

import torch
from torch import nn

from draftpool import draws
from draftpool.drafters.block import BlockDrafterModel
from draftpool.drafters.block_config import BlockConfig
from draftpool.drafters.drafter_folder import kind_of, load_weights, read_drafter
from draftpool.drafters.eagle import EagleModel
from draftpool.drafters.eagle_config import EagleConfig
from draftpool.drafters.independent_config import IndependentConfig
from draftpool.errors import DraftpoolError
from draftpool.targets.weights import TargetWeights

PARTS = {
    "input_norm.weight": "input_layernorm.weight",
    "post_norm.weight": "post_attention_layernorm.weight",
    "gate_proj.weight": "mlp.gate_proj.weight",
    "up_proj.weight": "mlp.up_proj.weight",
    "down_proj.weight": "mlp.down_proj.weight",
    "q_norm.weight": "self_attn.q_norm.weight",
    "k_norm.weight": "self_attn.k_norm.weight",
} | {f"{part}_proj.{kind}": f"self_attn.{part}_proj.{kind}" for part in "qkvo" for kind in ("weight", "bias")}


CONFIGS = {"block": BlockConfig, "eagle": EagleConfig, "independent": IndependentConfig}
# What must be equal for weights to be taken over.
SHAPE = ("n_layers", "block_size", "draft_tokens", "taps", "hidden_size", "own_head")


def start_random(model: nn.Module, seed: int) -> None:
    """Normal weights of standard deviation 0.02, norms at one, as the target families start."""
    generator = torch.Generator().manual_seed(draws.seed_of("initialise", seed))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.02)
            elif name.endswith("bias"):
                parameter.zero_()


def start_block_from_target(model: BlockDrafterModel, state: TargetWeights, seed: int) -> None:
    """Copy the target's deepest layers; the fusion starts as the identity on the deepest tap.

    The fusion's norm starts from the deepest layer's input norm, so that the deepest draft layer sees nearly the
    keys and values that this layer has in the target. The other taps enter with small random weights drawn by seed.

    Raises:
        DraftpoolError: If the target's layers are not of the same form.
    """
    config = model.config
    first = config.target_layers - config.n_layers
    if first < 0:
        raise DraftpoolError(
            f"{config.n_layers} draft layers cannot start from a target of {config.target_layers}",
            "config key `model.n_layers`",
            "lower it or use `init: random`",
        )
    start_random(model, seed)
    with torch.no_grad():
        for index, layer in enumerate(model.layers):
            for name, parameter in layer.named_parameters():
                source = f"model.layers.{first + index}.{PARTS[name]}"
                if source not in state or state[source].shape != parameter.shape:
                    raise DraftpoolError(
                        f"the target has no `{source}` of the drafter's shape",
                        "config key `init`",
                        "use `init: random`",
                    )
                parameter.copy_(state[source])
        width = config.hidden_size
        model.fuse.weight.mul_(0.1)
        model.fuse.weight[:, -width:] = torch.eye(width)
        model.fuse_norm.weight.copy_(state[f"model.layers.{config.target_layers - 1}.input_layernorm.weight"])
        model.norm.weight.copy_(state["model.norm.weight"])


def start_eagle_from_target(model: EagleModel, state: TargetWeights, seed: int) -> None:
    """Copy the target's last layer; the feature starts as the deepest tap and the embedding enters weakly.

    Raises:
        DraftpoolError: If the target's layers are not of the same form.
    """
    config, layer = model.config, model.layer
    prefix = f"model.layers.{config.target_layers - 1}."
    width = config.hidden_size
    start_random(model, seed)
    with torch.no_grad():
        for name in ("o_proj", "gate_proj", "up_proj", "down_proj", "q_proj", "k_proj", "v_proj"):
            source, weight = f"{prefix}{PARTS[f'{name}.weight']}", getattr(layer, name).weight
            wide = name in ("q_proj", "k_proj", "v_proj")
            expected = (weight.shape[0], width) if wide else tuple(weight.shape)
            if source not in state or tuple(state[source].shape) != expected:
                raise DraftpoolError(
                    f"the target has no `{source}` of the drafter's shape",
                    "config key `init`",
                    "use `init: random`",
                )
            # Of [embedding, feature] the second half is what the target's layer reads.
            (weight[:, width:] if wide else weight).copy_(state[source])
        layer.hidden_norm.weight.copy_(state[f"{prefix}input_layernorm.weight"])
        layer.post_norm.weight.copy_(state[f"{prefix}post_attention_layernorm.weight"])
        model.norm.weight.copy_(state["model.norm.weight"])
        model.fuse.weight.mul_(0.1)
        model.fuse.weight[:, -width:] = torch.eye(width)


def start_from_drafter(model: nn.Module, folder: Path, kind: str) -> None:
    """Take the weights of another drafter of the same shape (HedgeSpec's recipe for specialists).

    Raises:
        DraftpoolError: If it is damaged, or of another kind or shape.
    """
    found = kind_of(folder)
    if found != kind:
        raise DraftpoolError(
            f"the drafter to start from is of kind {found}, not {kind}",
            str(folder),
            "start from one of the same kind",
        )
    config, state = read_drafter(folder, CONFIGS[kind])
    own = getattr(model, "config", None)
    differing = [
        name for name in SHAPE if own and hasattr(own, name) and getattr(config, name) != getattr(own, name)
    ]
    if differing:
        raise DraftpoolError(
            f"the drafter to start from differs in {', '.join(differing)}",
            str(folder),
            "give both the same `model` block",
        )
    if "head" in state:
        # A head of its own goes on row by row where both may propose the token.
        rows = {token: row for row, token in enumerate(state["vocabulary"].tolist())}
        known = [place for place, token in enumerate(model.vocabulary.tolist()) if token in rows]
        head = model.head.detach().clone()
        head[known] = state["head"][[rows[token] for token in model.vocabulary[known].tolist()]].to(
            head.dtype
        )
        state["head"] = head
    state["vocabulary"] = model.vocabulary
    if kind == "independent":
        state = {name.replace("model.", "decoder.", 1): value for name, value in state.items()}
    load_weights(model, state, folder)


def parameter_hash(model: nn.Module) -> str:
    """Digest of all weights (16 hex digits), to show that compared runs start alike."""
    digest = hashlib.sha256()
    for name, parameter in sorted(model.named_parameters()):
        digest.update(name.encode())
        digest.update(parameter.detach().float().cpu().numpy().tobytes())
    return digest.hexdigest()[:16]
