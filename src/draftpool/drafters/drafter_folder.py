"""How a drafter with weights is kept in a folder, and what all such drafters check when they are loaded."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from draftpool.artefacts import read_json, write_json
from draftpool.errors import DraftpoolError
from draftpool.targets.base import head_size

Config = TypeVar("Config", bound=BaseModel)


def kind_of(folder: Path) -> str:
    """Kind of the drafter in a folder.

    Raises:
        DraftpoolError: If the folder holds no drafter.
    """
    config = read_json(folder / "config.json") if (folder / "config.json").exists() else {}
    if not isinstance(config.get("kind"), str):
        raise damaged("config.json names no kind", folder)
    return config["kind"]


def save_drafter(folder: Path, config: BaseModel, state: dict[str, Tensor]) -> None:
    """Write `model.safetensors` and `config.json`."""
    save_file(
        {name: tensor.detach().to("cpu").contiguous() for name, tensor in state.items()},
        folder / "model.safetensors",
    )
    write_json(folder / "config.json", config.model_dump())


def read_drafter(folder: Path, model: type[Config]) -> tuple[Config, dict[str, Tensor]]:
    """Read a drafter's shape and weights.

    Raises:
        DraftpoolError: If the folder is incomplete or damaged.
    """
    try:
        config = model.model_validate(read_json(folder / "config.json"))
        state = load_file(folder / "model.safetensors")
    except (OSError, SafetensorError, ValueError) as error:
        raise damaged(str(error).splitlines()[0], folder) from error
    if "vocabulary" not in state:
        raise damaged("model.safetensors holds no vocabulary", folder)
    return config, state


def load_weights(model: nn.Module, state: dict[str, Tensor], folder: Path) -> None:
    """Fill a model with the weights that were read from a folder.

    Raises:
        DraftpoolError: If they are not those of its `config.json`.
    """
    try:
        model.load_state_dict(state)
    except RuntimeError as error:
        raise damaged("model.safetensors does not fit config.json", folder) from error


def damaged(what: str, folder: Path) -> DraftpoolError:
    """The error about a folder that cannot be read."""
    return DraftpoolError(
        f"damaged drafter ({what})", str(folder), "delete the folder and run snakemake again"
    )


def check_fits(config: BaseModel, expected: dict[str, object], where: str) -> None:
    """Refuse a drafter that was made for another target.

    Args:
        config: Of the drafter.
        expected: Fields and what the target needs them to be.
        where: The drafter, for the message.

    Raises:
        DraftpoolError: Naming the first field that differs.
    """
    for name, value in expected.items():
        if getattr(config, name) != value:
            raise DraftpoolError(
                f"drafter has {name} {getattr(config, name)}, the target needs {value}",
                where,
                "train it for this target",
            )


def target_shape(hf_config, taps: Iterable[int] | None = None) -> dict[str, object]:
    """What a drafter must share with its target: widths, layers, vocabulary, and taps if it reads them."""
    shape: dict[str, object] = {
        "hidden_size": hf_config.hidden_size,
        "target_layers": hf_config.num_hidden_layers,
        "target_vocabulary": hf_config.vocab_size,
    }
    return shape if taps is None else shape | {"taps": list(taps)}


def layer_fields(hf_config) -> dict[str, Any]:
    """Fields of a drafter shaped after its target's layers: widths, heads, rotary base, and the target's size."""
    heads = hf_config.num_attention_heads
    return {
        "hidden_size": hf_config.hidden_size,
        "intermediate_size": hf_config.intermediate_size,
        "heads": heads,
        "kv_heads": getattr(hf_config, "num_key_value_heads", heads),
        "head_dim": head_size(hf_config),
        "eps": getattr(hf_config, "rms_norm_eps", 1e-6),
        "rope_theta": (getattr(hf_config, "rope_parameters", None) or {}).get("rope_theta", 10000.0),
        "max_positions": hf_config.max_position_embeddings,
        "target_layers": hf_config.num_hidden_layers,
        "target_vocabulary": hf_config.vocab_size,
    }
