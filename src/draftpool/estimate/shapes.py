"""Shapes of targets without loading them: a table of models, or the `config.json` of a folder."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from draftpool.artefacts import read_json
from draftpool.config.load import read_yaml
from draftpool.config.target import Target
from draftpool.errors import DraftpoolError

TABLE = Path(__file__).with_name("models.yaml")


@dataclass(frozen=True)
class Shape:
    """A causal language model of Llama's form.

    Attributes:
        layers, hidden, heads, kv_heads, head_dim, intermediate, vocabulary: Sizes.
        tied: Whether embedding and head are one matrix.
        stored_bytes: Bytes of a weight in its folder.
    """

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocabulary: int
    tied: bool
    stored_bytes: int

    @property
    def attention(self) -> int:
        """Weights of a layer's attention."""
        return self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)

    @property
    def feed_forward(self) -> int:
        """Weights of a layer's feed-forward block."""
        return 3 * self.hidden * self.intermediate

    @property
    def layer(self) -> int:
        """Weights of a layer, its norms left out (below 0.1 %)."""
        return self.attention + self.feed_forward

    @property
    def embedding(self) -> int:
        """Weights of the embedding."""
        return self.vocabulary * self.hidden

    @property
    def parameters(self) -> int:
        """Weights of the model."""
        return self.layers * self.layer + self.embedding * (1 if self.tied else 2)

    @property
    def multiplied(self) -> int:
        """Weights that a token is multiplied by: all layers and the head."""
        return self.layers * self.layer + self.embedding

    @property
    def cache_values(self) -> int:
        """Keys and values kept of a token."""
        return 2 * self.layers * self.kv_heads * self.head_dim


@cache
def _table() -> dict[str, Any]:
    return read_yaml(TABLE)


def known_drafter(model_id: str) -> dict[str, int] | None:
    """Layers and block of a published block drafter, if the table has it."""
    return _table()["drafters"].get(model_id)


def read_shape(path: Path, where: str) -> Shape:
    """The shape that a `config.json` of transformers describes.

    Raises:
        DraftpoolError: If the file is missing or no such description.
    """
    config = read_json(path)
    try:
        hidden, heads = config["hidden_size"], config["num_attention_heads"]
        return Shape(
            layers=config["num_hidden_layers"],
            hidden=hidden,
            heads=heads,
            kv_heads=config.get("num_key_value_heads") or heads,
            head_dim=config.get("head_dim") or hidden // heads,
            intermediate=config["intermediate_size"],
            vocabulary=config["vocab_size"],
            tied=bool(config.get("tie_word_embeddings", False)),
            stored_bytes=4 if (config.get("dtype") or config.get("torch_dtype")) == "float32" else 2,
        )
    except (KeyError, TypeError) as error:
        raise DraftpoolError(
            f"no configuration of a language model ({error})", f"{where} ({path})", "give its config.json"
        ) from error


def shape_of(name: str, given: Mapping[str, Path], where: str) -> Shape:
    """The shape of a model by its name on the Hub, or as the user gave it.

    Raises:
        DraftpoolError: If nobody knows it.
    """
    if name in given:
        return read_shape(given[name], f"flag --shape {name}")
    if name in _table()["models"]:
        return Shape(**_table()["models"][name])
    raise DraftpoolError(
        f"the shape of `{name}` is not known",
        where,
        f"give its config.json: --shape {name}=FILE",
    )


def target_model(target: Target) -> str:
    """What the table calls a target: its repository, package or folder."""
    if target.source == "path":
        return target.path
    return target.model_id if target.source == "hub" else target.archive.package


def target_shape(target: Target, given: Mapping[str, Path], where: str = "config key `target`") -> Shape:
    """The shape of a study's target.

    Raises:
        DraftpoolError: If it is neither in the table nor given, nor in the folder of a local model.
    """
    name = target_model(target)
    if target.source == "path" and name not in given:
        local = Path(name) / "config.json"
        if local.is_file():
            return read_shape(local, where)
    return shape_of(name, given, where)
