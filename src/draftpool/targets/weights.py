"""Read a target folder's configuration and weights without importing or building the model.

That takes longer than many jobs; the fast path and training need only numbers and tensors.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from draftpool.artefacts import read_json
from draftpool.errors import DraftpoolError

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
DELETE_TARGET = "delete the folder and run snakemake again"
INDEX = "model.safetensors.index.json"


# Everything the fast path and training ask of configuration and tokenizer, written once when the target is fetched.
DESCRIPTION = "draftpool.json"


def read_config(folder: Path):
    """Return the transformers configuration of a target folder, or what `fetch_target` wrote of it.

    Raises:
        DraftpoolError: If there is none, or transformers does not know the model.
    """
    described = _description(folder)
    if described is not None:
        return SimpleNamespace(**described["config"])
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError) as error:
        message = str(error).splitlines()[0]
        raise DraftpoolError(f"cannot load the target ({message})", str(folder), DELETE_TARGET) from error


def described_mask_token(folder: Path) -> int | None:
    """Id of the masked slots as `fetch_target` found it, or None if the folder is not of its making."""
    described = _description(folder)
    return None if described is None else described["mask_token_id"]


def _description(folder: Path) -> dict | None:
    path = folder / DESCRIPTION
    return read_json(path) if path.exists() else None


def shard_names(index: Path) -> list[str]:
    """Return the files that an index of shards names.

    transformers reads a shard of another name as a pickle, so nothing but safetensors beside the index is accepted.

    Raises:
        ValueError: If it is damaged, or names other files.
        OSError: If it cannot be read.
    """
    try:
        named = {str(name) for name in json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{index.name} cannot be read") from error
    if not named or any(Path(name).name != name or not name.endswith(".safetensors") for name in named):
        raise ValueError(f"{index.name} names no safetensors, or other files")
    return sorted(named)


class TargetWeights(Mapping[str, Tensor]):
    """Tensors of a target folder by the names transformers saves them under, read when they are asked for.

    Args:
        folder: Holds `model.safetensors`, or shards and `model.safetensors.index.json`.
        dtype: Type the tensors are returned in.
        device: Where they are put.

    Raises:
        DraftpoolError: If a file is missing or damaged.
    """

    def __init__(self, folder: Path, dtype: torch.dtype, device: torch.device | str = "cpu"):
        self.dtype, self.device = dtype, torch.device(device)
        index = folder / INDEX
        try:
            shards = shard_names(index) if index.exists() else ["model.safetensors"]
            files = [safe_open(folder / shard, framework="pt") for shard in shards]
        except (OSError, ValueError, SafetensorError) as error:
            raise DraftpoolError(
                f"cannot load the target ({str(error).splitlines()[0]})", str(folder), DELETE_TARGET
            ) from error
        self._files = {name: file for file in files for name in file.keys()}  # noqa: SIM118

    def __getitem__(self, name: str) -> Tensor:
        """The tensor of this name."""
        return self._files[name].get_tensor(name).to(self.device, self.dtype)

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)

    def embedding(self) -> Tensor:
        """Input embedding [vocabulary, hidden]."""
        return self[EMBEDDING]

    def head(self, embedding: Tensor) -> Tensor:
        """Output head [vocabulary, hidden]: the embedding itself where the two are tied."""
        return self.get(HEAD, embedding)


class ModelWeights(TargetWeights):
    """The same view of a model that was built after all, for families that name their tensors otherwise."""

    def __init__(self, model: torch.nn.Module):
        self._state = {name: tensor.detach() for name, tensor in model.state_dict().items()}
        self._model = model

    def __getitem__(self, name: str) -> Tensor:
        """The tensor of this name."""
        return self._state[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._state)

    def __len__(self) -> int:
        return len(self._state)

    def embedding(self) -> Tensor:
        """Input embedding [vocabulary, hidden]."""
        return self._model.get_input_embeddings().weight.detach()

    def head(self, embedding: Tensor) -> Tensor:
        """Output head [vocabulary, hidden]."""
        return self._model.get_output_embeddings().weight.detach()
