"""A causal language model of its own as drafter (speculative decoding's small model; MetaSD's black box).

Either one distilled here, some of the target's layers under the target's own embedding and head, or any published
model with the target's tokenizer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace

import torch
from pydantic import BaseModel, ConfigDict
from torch import Tensor

from draftpool.artefacts import read_json
from draftpool.drafters.base import register_drafter
from draftpool.drafters.drafter_folder import check_fits, damaged, read_drafter, target_shape
from draftpool.drafters.independent_config import IndependentConfig
from draftpool.drafters.language_model import FastLanguageModelDrafter, LanguageModelDrafter
from draftpool.errors import DraftpoolError
from draftpool.targets.base import TargetModel
from draftpool.targets.fast import FastTarget
from draftpool.targets.load import load_target

# Sub-folder of a drafter folder with a published model as transformers saves it.
MODEL = "model"


class PublishedConfig(BaseModel):
    """A published causal language model, whole in the folder's `model/`."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    kind: str = "independent"
    draft_tokens: int
    published: str
    common_vocabulary: int
    target_vocabulary: int


class SharedWeights(Mapping[str, Tensor]):
    """A distilled drafter's tensors by the names transformers gives them, embedding and head those of the target."""

    def __init__(self, state: Mapping[str, Tensor], embedding: Tensor, head: Tensor):
        self._state, self._embedding, self._head = state, embedding, head

    def __getitem__(self, name: str) -> Tensor:
        """The tensor of this name, as the target has it."""
        return self._state[name].to(self._embedding.device, self._embedding.dtype)

    def __iter__(self) -> Iterator[str]:
        return iter(self._state)

    def __len__(self) -> int:
        return len(self._state)

    def embedding(self) -> Tensor:
        """The target's embedding [vocabulary, hidden]."""
        return self._embedding

    def head(self, embedding: Tensor) -> Tensor:
        """Rows of the target's head that the drafter proposes [draft vocabulary, hidden]."""
        return self._head


def load_distilled(name: str, folder: Path, target: TargetModel) -> LanguageModelDrafter:
    """Load a drafter that was distilled here.

    Raises:
        DraftpoolError: If it is damaged or belongs to another target.
    """
    config, state = read_drafter(folder, IndependentConfig)
    check_fits(config, target_shape(target.hf_config), str(folder))
    vocabulary = state.pop("vocabulary").to(target.device)
    head = target.head_weight[vocabulary]
    weights = SharedWeights(state, target.embedding, head)
    try:
        lm = FastTarget(SimpleNamespace(**config.lm), weights, [])
    except KeyError as error:
        raise damaged(f"no tensor {error}", folder) from error
    return FastLanguageModelDrafter(name, lm, config.draft_tokens, vocabulary, "embedding")


def load_published(name: str, folder: Path, target: TargetModel) -> LanguageModelDrafter:
    """Load a published model.

    Raises:
        DraftpoolError: If it is damaged or was compared with another target.
    """
    try:
        config = PublishedConfig.model_validate(read_json(folder / "config.json"))
    except ValueError as error:
        raise damaged(str(error).splitlines()[0], folder) from error
    check_fits(config, {"target_vocabulary": target.hf_config.vocab_size}, str(folder))
    lm = load_target(folder / MODEL, [], target.device, target.dtype)
    vocabulary = torch.arange(config.common_vocabulary, device=target.device)
    kind = FastLanguageModelDrafter if lm.supports_batches else LanguageModelDrafter
    return kind(name, lm, config.draft_tokens, vocabulary)


@register_drafter("independent")
class IndependentDrafter:
    """How drafters of kind `independent` are loaded."""

    @classmethod
    def load(cls, name: str, folder: Path, target: TargetModel) -> LanguageModelDrafter:
        """Load a distilled or a published model beside its target."""
        published = "published" in read_json(folder / "config.json")
        return (load_published if published else load_distilled)(name, folder, target)


def common_vocabulary(theirs, ours, their_size: int, our_size: int, where: str) -> int:
    """Ids that two models with the same tokenizer have in common, padding of either's head left out.

    Args:
        theirs: Tokenizer of the drafter.
        ours: Tokenizer of the target.
        their_size: Rows of the drafter's head.
        our_size: Rows of the target's head.
        where: The drafter, for the message.

    Raises:
        DraftpoolError: If a token has another id, or special tokens differ: drafts would be other texts.
    """
    left, right = theirs.get_vocab(), ours.get_vocab()
    differing = sorted(token for token in left.keys() & right.keys() if left[token] != right[token])
    known = min(len(left), len(right))
    missing = [token for token, place in right.items() if place < known and token not in left]
    if differing or missing:
        token = (differing or sorted(missing))[0]
        raise DraftpoolError(
            f"token {token!r} is {left.get(token, 'unknown')} for the drafter and {right[token]} for the target",
            where,
            "choose a drafter with the target's tokenizer",
        )
    for name in ("eos_token_id", "bos_token_id"):
        if getattr(theirs, name) != getattr(ours, name):
            raise DraftpoolError(
                f"{name} is {getattr(theirs, name)} for the drafter and {getattr(ours, name)} for the target",
                where,
                "choose a drafter with the target's tokenizer",
            )
    # Rows beyond the tokenizer pad the head to a round size and stand for no token.
    tokens = max(right.values()) + 1
    return min(their_size, our_size, tokens, max(left.values()) + 1)
