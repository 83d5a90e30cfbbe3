"""Recipes: how the drafters of every kind are made."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, field_validator, model_validator

from draftpool.config.strict import Strict
from draftpool.drafters.kinds import DECORATOR, PACKAGE
from draftpool.registry import list_registered


class BlockModel(Strict):
    """Shape of a block drafter (DFlash)."""

    n_layers: int = Field(2, description="Draft layers.", ge=1)
    block_size: int = Field(
        4, description="Anchor plus drafted slots; a block drafts block_size - 1 tokens.", ge=2
    )
    draft_vocab: int | None = Field(
        8192,
        description="Reduced vocabulary: most frequent ids of the training answers. Null: the whole one.",
        ge=16,
    )


class EagleModel(Strict):
    """Shape of an autoregressive head on target features (EAGLE-3)."""

    draft_tokens: int = Field(
        3, description="Tokens of a draft; training unrolls as many steps (training-time test).", ge=1
    )
    draft_vocab: int | None = Field(8192, description="Reduced vocabulary; null: the whole one.", ge=16)
    own_head: bool = Field(
        False, description="Train an output head too; false: the target's, frozen and shared."
    )


class IndependentModel(Strict):
    """Shape of a small language model made of the target's layers, under the target's embedding and head."""

    n_layers: int = Field(2, description="Layers.", ge=1)
    layers: list[int] | None = Field(
        None,
        description="Target layers that it starts from, rising; null: spread evenly from the first to the last.",
    )
    draft_tokens: int = Field(3, description="Tokens of a draft.", ge=1)
    draft_vocab: int | None = Field(8192, description="Reduced vocabulary; null: the whole one.", ge=16)


class Training(Strict):
    """Optimiser and budget."""

    steps: int = Field(400, description="Optimiser steps.", ge=1)
    batch_sequences: int = Field(8, description="Sequences per step.", ge=1)
    anchors_per_sequence: int = Field(
        32, description="Anchors drawn per sequence and step (at most all positions).", ge=1
    )
    lr: float = Field(1.0e-3, description="Peak learning rate of AdamW.", gt=0.0)
    weight_decay: float = Field(0.01, description="Weight decay of AdamW.", ge=0.0)
    beta2: float = Field(
        0.999, description="Decay of AdamW's second moments; lower it for few steps.", gt=0.0, lt=1.0
    )
    warmup_ratio: float = Field(
        0.04, description="Share of the steps with rising learning rate; then cosine to zero.", ge=0.0, lt=1.0
    )
    clip: float | None = Field(1.0, description="Gradient norm limit; null: none.", gt=0.0)
    checkpoint_every: int = Field(100, description="Steps between checkpoints.", ge=1)
    threads: int | None = Field(
        None,
        description="Cores of this training, so that several run side by side; null: as `threads`.",
        ge=1,
    )
    processes: int = Field(
        1,
        description="Processes that share every step, inside one job: on GPUs one for each, otherwise with their share "
        "of the cores (docs/large-targets.md).",
        ge=1,
    )
    accumulate: int = Field(
        1,
        description="Micro-batches that every process cuts its share of a step into, one in memory at a time; the "
        "result is the same up to rounding.",
        ge=1,
    )
    precision: Literal["auto", "float32", "bfloat16"] = Field(
        "auto",
        description="Of products in training; weights, gradients and losses are float32. `auto`: bfloat16 on a GPU "
        "or a processor that multiplies it.",
    )

    @model_validator(mode="after")
    def _every_part_has_a_sequence(self):
        if self.processes * self.accumulate > self.batch_sequences:
            raise ValueError(
                f"`processes` {self.processes} x `accumulate` {self.accumulate} are more parts than the "
                f"`batch_sequences` {self.batch_sequences} of a step"
            )
        return self


class Objective(BaseModel):
    """Training objective: `kind` names a registered objective, the other keys are its parameters."""

    model_config = ConfigDict(extra="allow", strict=True, frozen=True)
    kind: str = Field(
        description="Registered objective, for example `dpace` or `dflash` (docs/add-an-objective.md)."
    )
    reduction: Literal["anchor_mean", "weight_mean", "sequence_sum", "published"] = Field(
        "anchor_mean", description="How weighted token losses become one number."
    )


class _Recipe(Strict):
    trained: ClassVar[bool] = False
    role: Literal["generalist", "specialist", "sweep"] = Field(
        "generalist", description="Its part in the study."
    )
    group: str = Field("", description="Sweep axis this drafter belongs to.")


class _Trained(_Recipe):
    trained: ClassVar[bool] = True
    per_domain: bool = Field(False, description="Make one drafter per domain, called `<recipe>_<domain>`.")
    domains: list[str] | Literal["all"] = Field(
        "all", description="Domains it is trained on; `all`: those with training prompts."
    )
    prompts_per_domain: int = Field(150, description="Training prompts used of each domain.", ge=1)
    seeds: list[int] = Field(default=[0], description="Training seeds; one drafter each.", min_length=1)
    init: str = Field(
        "target_layers",
        description="`target_layers` (copies of target layers), `random`, or the name of a drafter of the same shape "
        "to start from, for example `generalist-s0`.",
    )
    training: Training = Field(description="Budget.")


class BlockRecipe(_Trained):
    """A block drafter (DFlash): all slots of a block at once. Missing blocks come from `drafter_defaults`."""

    kind: Literal["block"] = Field("block", description="Kind of drafter.")
    objective: Objective = Field(description="Training objective.")
    model: BlockModel = Field(description="Shape.")

    @property
    def draft_tokens(self) -> int:
        """Tokens of a draft."""
        return self.model.block_size - 1


class EagleRecipe(_Trained):
    """An autoregressive head on the target's features (EAGLE-3), trained on its own outputs over several steps."""

    kind: Literal["eagle"] = Field(description="Kind of drafter.")
    objective: Objective = Field(
        default=Objective(kind="cross_entropy"),
        description="Training objective; one for sequential drafters.",
    )
    model: EagleModel = Field(default=EagleModel(), description="Shape.")

    @property
    def draft_tokens(self) -> int:
        """Tokens of a draft."""
        return self.model.draft_tokens


class IndependentRecipe(_Trained):
    """A small language model distilled from the target's answers (MetaSD's black box)."""

    kind: Literal["independent"] = Field(description="Kind of drafter.")
    objective: Objective = Field(
        default=Objective(kind="cross_entropy"),
        description="Training objective; one for sequential drafters.",
    )
    model: IndependentModel = Field(default=IndependentModel(), description="Shape.")

    @property
    def draft_tokens(self) -> int:
        """Tokens of a draft."""
        return self.model.draft_tokens


class _Untrained(_Recipe):
    role: Literal["generalist", "specialist", "sweep", "untrained"] = Field(
        "untrained", description="Its part in the study."
    )


class NgramRecipe(_Untrained):
    """Prompt lookup: what followed the last tokens where they stood before."""

    kind: Literal["ngram"] = Field(description="Kind of drafter.")
    draft_tokens: int = Field(3, description="Longest draft.", ge=1)
    max_ngram: int = Field(2, description="Longest n-gram that is looked up.", ge=1)


class SuffixRecipe(_Untrained):
    """Retrieval by a suffix automaton over the text and a store of past outputs."""

    kind: Literal["suffix"] = Field(description="Kind of drafter.")
    draft_tokens: int = Field(3, description="Longest draft.", ge=1)
    store: Literal["stream", "training", "none"] = Field(
        "stream",
        description="`stream`: outputs so far of the stream, empty where a selector, seed or repeat begins; "
        "`training`: the training answers, frozen; `none`: the text alone.",
    )
    store_tokens: int = Field(
        4096,
        description="Tokens kept; of a stream the oldest outputs go, training answers beyond are refused.",
        ge=1,
    )
    domains: list[str] | Literal["all"] = Field(
        "all", description="`training`: domains of the answers; `all`: those with training prompts."
    )
    prompts_per_domain: int = Field(16, description="`training`: answers taken of each domain.", ge=1)


class EarlyExitRecipe(_Untrained):
    """The target's own first layers with its final norm and head, untrained."""

    kind: Literal["early_exit"] = Field(description="Kind of drafter.")
    n_layers: int = Field(description="Layers that are run; fewer than the target has.", ge=1)
    draft_tokens: int = Field(2, description="Tokens of a draft.", ge=1)


class CheckpointRecipe(_Recipe):
    """A published drafter, read from a folder or the Hub; safetensors only."""

    kind: Literal["checkpoint"] = Field(description="Kind of recipe.")
    layout: Literal["dflash", "eagle3", "causal_lm"] = Field(
        description="`dflash`: a block drafter as z-lab publishes them; `eagle3`: a head as SafeAILab does; "
        "`causal_lm`: any causal language model with the target's tokenizer."
    )
    path: str | None = Field(None, description="Folder.")
    model_id: str | None = Field(None, description="Hub repository, if it is no folder.")
    revision: str | None = Field(None, description="Commit or tag on the Hub; pin it.")
    draft_tokens: int = Field(
        3, description="Tokens of a draft; a block drafter has its own block instead.", ge=1
    )

    @model_validator(mode="after")
    def _one_source(self):
        if (self.path is None) == (self.model_id is None):
            raise ValueError("give either `path` or `model_id`")
        return self


class OtherRecipe(_Untrained):
    """A kind of your own: a class registered under this name (docs/add-a-drafter.md) and what it is told."""

    tag: ClassVar[str] = "other"
    kind: str = Field(description="Name that the class is registered under.")
    draft_tokens: int = Field(3, description="Longest draft.", ge=1)
    options: dict[str, Any] = Field(default={}, description="Stands in the drafter's `config.json`.")
    learns: bool = Field(
        False,
        description="It remembers the stream (`memory`, `remember`), so that it is scored along every stream.",
    )

    @field_validator("kind")
    @classmethod
    def _is_registered(cls, value: str) -> str:
        known = list_registered(PACKAGE, DECORATOR)
        if value not in known:
            raise ValueError(f"unknown kind of drafter; known: {', '.join(sorted({*RECIPES, *known}))}")
        return value


RECIPES = {
    "block": BlockRecipe,
    "eagle": EagleRecipe,
    "independent": IndependentRecipe,
    "ngram": NgramRecipe,
    "suffix": SuffixRecipe,
    "early_exit": EarlyExitRecipe,
    "checkpoint": CheckpointRecipe,
}


def _tag(raw: Any) -> str:
    """Which model a recipe is checked by: that of its kind, or the one for kinds of one's own."""
    kind = raw.get("kind") if isinstance(raw, dict) else raw.kind
    return kind if isinstance(kind, str) and kind in RECIPES else OtherRecipe.tag


Recipe = Annotated[
    Annotated[BlockRecipe, Tag("block")]
    | Annotated[EagleRecipe, Tag("eagle")]
    | Annotated[IndependentRecipe, Tag("independent")]
    | Annotated[NgramRecipe, Tag("ngram")]
    | Annotated[SuffixRecipe, Tag("suffix")]
    | Annotated[EarlyExitRecipe, Tag("early_exit")]
    | Annotated[CheckpointRecipe, Tag("checkpoint")]
    | Annotated[OtherRecipe, Tag("other")],
    Discriminator(_tag),
]
