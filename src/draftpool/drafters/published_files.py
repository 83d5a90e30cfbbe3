"""Reading the files of a published drafter: safetensors and `config.json`, nothing that could run code."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from draftpool.errors import DraftpoolError
from draftpool.targets.weights import INDEX, shard_names

# What is asked of the Hub: weights, configuration and tokenizer; never code, never a pickle.
WANTED = ["*.safetensors", "*.json", "*.jinja", "*.txt", "*.model"]
# Copies of the weights in other layouts that some repositories hold.
UNWANTED = ["*/*", "consolidated*"]
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
WEIGHTS = "model.safetensors"


def source_folder(cfg: dict) -> tuple[Path, str]:
    """The folder of a checkpoint, downloaded if it lies on the Hub, and what messages call it.

    Args:
        cfg: `path`, or `model_id` and `revision`.

    Raises:
        DraftpoolError: If there is no such folder or repository, or it cannot be downloaded.
    """
    name = cfg.get("path") or cfg["model_id"]
    where = f"drafter checkpoint `{name}`"
    # As in transformers, a repository name may be a folder.
    if Path(name).is_dir():
        return Path(name), where
    if cfg.get("path"):
        raise DraftpoolError("no such folder", where, "give the folder that holds config.json")
    import huggingface_hub

    try:
        folder = huggingface_hub.snapshot_download(
            name, revision=cfg.get("revision"), allow_patterns=WANTED, ignore_patterns=UNWANTED
        )
    except Exception as error:
        # Versions of huggingface_hub differ in their HTTP library, whose errors have no base of their own.
        message = next(iter(str(error).splitlines()), type(error).__name__)
        raise DraftpoolError(
            f"cannot be downloaded ({message})", where, "check the name, the revision and the network"
        ) from error
    return Path(folder), where


def weight_files(folder: Path, where: str) -> list[Path]:
    """The safetensors files of a checkpoint.

    Raises:
        DraftpoolError: If there are none (pickles are not read), or a shard is missing.
    """
    if (folder / WEIGHTS).is_file():
        return [folder / WEIGHTS]
    if (folder / INDEX).is_file():
        try:
            shards = shard_names(folder / INDEX)
        except (OSError, ValueError) as error:
            raise damaged(str(error), where) from error
        for shard in shards:
            if not (folder / shard).is_file():
                raise damaged(f"{shard} is missing", where)
        return [folder / shard for shard in shards]
    pickles = sorted(path.name for pattern in PICKLES for path in folder.glob(pattern))
    if pickles:
        raise DraftpoolError(
            f"holds its weights as {pickles[0]}, a pickle, which may run code when it is read",
            where,
            "give a checkpoint with model.safetensors",
        )
    raise DraftpoolError(f"holds no {WEIGHTS}", where, "give a checkpoint with safetensors (no pickles)")


def damaged(what: str, where: str) -> DraftpoolError:
    """The error about a checkpoint that cannot be read."""
    return DraftpoolError(f"damaged ({what})", where, "check its layout, fetch it again, or give another one")


class Checkpoint:
    """Settings and tensors of a checkpoint, tensors read when they are asked for.

    Args:
        folder: Holds `config.json` and safetensors.
        where: What messages call it.

    Raises:
        DraftpoolError: If a file is missing or damaged, or the weights are pickles.
    """

    def __init__(self, folder: Path, where: str):
        self.where = where
        paths = weight_files(folder, where)
        try:
            self.config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        except FileNotFoundError as error:
            raise damaged("config.json is missing", where) from error
        except (OSError, ValueError) as error:
            raise damaged(f"config.json: {error}", where) from error
        if not isinstance(self.config, dict):
            raise damaged("config.json holds no settings", where)
        self._files = {}
        for path in paths:
            try:
                file = safe_open(path, framework="pt")
            except (OSError, SafetensorError) as error:
                raise damaged(f"{path.name}: {str(error).splitlines()[0]}", where) from error
            self._files |= dict.fromkeys(file.keys(), file)

    def __contains__(self, name: str) -> bool:
        """Whether there is a tensor of this name."""
        return name in self._files

    def __getitem__(self, name: str) -> Tensor:
        """The tensor of this name, as it is stored."""
        return self._files[name].get_tensor(name)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor; nothing is read."""
        return tuple(self._files[name].get_slice(name).get_shape())

    def section(self, name: str) -> dict:
        """A part of the settings, empty if there is none."""
        part = self.config.get(name) or {}
        if not isinstance(part, dict):
            raise self._wrong(name, part, "a group of settings")
        return part

    def whole(
        self, name: str, default: int | None = None, settings: Mapping | None = None, low: int = 1
    ) -> int:
        """A setting that is a whole number.

        Args:
            name: Its key.
            default: Taken if it is missing or null; None if it is required.
            settings: Where it stands; None for the settings themselves.
            low: Smallest value.

        Raises:
            DraftpoolError: If it is missing or something else.
        """
        value = (self.config if settings is None else settings).get(name)
        value = default if value is None else value
        if value is None:
            raise damaged(f"config.json has no `{name}`", self.where)
        if isinstance(value, bool) or not isinstance(value, int) or value < low:
            raise self._wrong(name, value, f"a whole number of at least {low}")
        return value

    def real(self, name: str, default: float, settings: Mapping | None = None) -> float:
        """A setting that is a positive number.

        Raises:
            DraftpoolError: If it is something else.
        """
        value = (self.config if settings is None else settings).get(name)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
            raise self._wrong(name, value, "a number above 0")
        return float(value)

    def layers(self, name: str, settings: Mapping) -> list[int]:
        """A setting that is a list of layer numbers.

        Raises:
            DraftpoolError: If it is missing or something else.
        """
        value = settings.get(name)
        if value is None:
            raise damaged(f"config.json has no `{name}`", self.where)
        if not isinstance(value, list) or not value or any(type(layer) is not int for layer in value):
            raise self._wrong(name, value, "a list of layer numbers")
        return value

    def _wrong(self, name: str, value: object, needed: str) -> DraftpoolError:
        return damaged(f"config.json: `{name}` is {value!r}, not {needed}", self.where)

    def unsupported(self, what: str) -> DraftpoolError:
        """The error about a drafter of a form that is not run here."""
        return DraftpoolError(f"{what}, which is not supported", self.where, "give another checkpoint")

    def head_shape(self) -> dict:
        """Fields that block drafters and EAGLE heads share, from keys of Llama's and Qwen3's settings.

        Raises:
            DraftpoolError: If a setting is missing, wrong, or asks for what our layers do not do.
        """
        if self.config.get("hidden_act", "silu") != "silu":
            raise self.unsupported(f"its activation is `{self.config['hidden_act']}`")
        rope = self.section("rope_parameters") or self.section("rope_scaling")
        kind = rope.get("rope_type", rope.get("type", "default"))
        if kind != "default":
            raise self.unsupported(f"its rotary embedding is of type `{kind}`")
        hidden, heads = self.whole("hidden_size"), self.whole("num_attention_heads")
        kv_heads = self.whole("num_key_value_heads", heads)
        head_dim = self.whole("head_dim", max(1, hidden // heads))
        if heads % kv_heads or head_dim % 2:
            raise damaged(
                f"config.json: {heads} heads of size {head_dim} cannot share {kv_heads} keys and values",
                self.where,
            )
        return {
            "hidden_size": hidden,
            "intermediate_size": self.whole("intermediate_size"),
            "heads": heads,
            "kv_heads": kv_heads,
            "head_dim": head_dim,
            "eps": self.real("rms_norm_eps", 1e-6),
            "rope_theta": self.real("rope_theta", 10000.0, rope if "rope_theta" in rope else None),
            "max_positions": self.whole("max_position_embeddings"),
        }

    def renamed(
        self, names: Mapping[str, str], shapes: Mapping[str, tuple[int, ...]], beside: set[str] = frozenset()
    ) -> dict[str, Tensor]:
        """All tensors by our names, every one of the checkpoint accounted for.

        Args:
            names: Our name -> theirs.
            shapes: Our name -> shape.
            beside: Their further tensors that have been dealt with.

        Raises:
            DraftpoolError: Naming the first tensor that is missing, unknown, of another shape, or not of floats.
        """
        missing = [theirs for theirs in names.values() if theirs not in self]
        if missing:
            raise damaged(f"no tensor `{missing[0]}`", self.where)
        unknown = sorted(self._files.keys() - set(names.values()) - beside)
        if unknown:
            raise self.unsupported(f"it has a further tensor `{unknown[0]}`")
        state = {}
        for ours, theirs in names.items():
            if self.shape(theirs) != tuple(shapes[ours]):
                needed = f"{list(self.shape(theirs))}, config.json asks for {list(shapes[ours])}"
                raise damaged(f"tensor `{theirs}` is {needed}", self.where)
            state[ours] = self[theirs]
            if state[ours].dtype not in (torch.float32, torch.float16, torch.bfloat16):
                raise self.unsupported(f"its tensor `{theirs}` is of type {state[ours].dtype}")
        return state


def check_target(checkpoint: Checkpoint, found: Mapping[str, int], needed: Mapping[str, int]) -> None:
    """Refuse a drafter of another target.

    Args:
        checkpoint: For the message.
        found: What its settings say, by the names of its settings.
        needed: The same of the target.

    Raises:
        DraftpoolError: Naming the first number that differs.
    """
    for name, value in found.items():
        if value != needed[name]:
            raise DraftpoolError(
                f"was trained for another target: its {name} is {value}, the target's is {needed[name]}",
                checkpoint.where,
                "give a checkpoint trained for this target",
            )


def check_same_taps(checkpoint: Checkpoint, found: list[int], taps: list[int], n_layers: int) -> None:
    """Refuse a drafter that reads other layers of the target than the study's.

    Raises:
        DraftpoolError: Naming both lists.
    """
    if sorted(set(found)) != found or not 0 <= found[0] <= found[-1] < n_layers - 1:
        raise DraftpoolError(
            f"reads the layers {found}, which do not fit a target of {n_layers} layers",
            checkpoint.where,
            "give a checkpoint trained for this target",
        )
    if found != taps:
        raise DraftpoolError(
            f"reads the target's layers {found}, the study's are {taps}",
            checkpoint.where,
            f"set `target.taps` to {found}; all drafters of a study read the same layers",
        )
