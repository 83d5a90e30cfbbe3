"""Read a target folder's configuration and weights without building the model.

Importing and building a transformers model takes longer than many jobs; the fast path and training need only tensors.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from draftpool.errors import DraftpoolError

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
DELETE_TARGET = "delete the folder and run snakemake again"


def read_config(folder: Path):
    """Return the transformers configuration of a target folder.

    Raises:
        DraftpoolError: If there is none, or transformers does not know the model.
    """
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError) as error:
        message = str(error).splitlines()[0]
        raise DraftpoolError(f"cannot load the target ({message})", str(folder), DELETE_TARGET) from error


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
        self.folder, self.dtype, self.device = folder, dtype, torch.device(device)
        index = folder / "model.safetensors.index.json"
        try:
            shards = (
                sorted(set(json.loads(index.read_text())["weight_map"].values()))
                if index.exists()
                else ["model.safetensors"]
            )
            files = [safe_open(folder / shard, framework="pt") for shard in shards]
        except (OSError, ValueError, KeyError, SafetensorError) as error:
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
