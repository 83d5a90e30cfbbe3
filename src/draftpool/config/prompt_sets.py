"""Options of prompt sets: held-out prompts, changed or joined, to be scored and replayed, never trained on."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from draftpool.config.strict import Strict
from draftpool.config.target import Target


class _PromptSet(Strict):
    domains: list[str] | Literal["all"] = Field(
        "all",
        description="Domains whose held-out prompts are taken; `all`: those that drafters are compared on.",
    )
    prompts_per_domain: int = Field(4, description="Held-out prompts of each domain.", ge=1)
    seed: int = Field(0, description="Seed of what is drawn.")


class Reworded(_PromptSet):
    """The same requests in other words (MetaSD reworded by a model)."""

    kind: Literal["reworded"] = Field(description="Kind of set.")
    how: Literal["typos", "reasoning", "template", "llm"] = Field(
        description="`typos`: slips of the keyboard; `reasoning`: a long instruction on how to think stands beside it; "
        "`template`: the request stands in another prompt format; `llm`: a model says it in its own words."
    )
    rate: float = Field(0.2, description="`typos`: share of the words with a slip.", gt=0.0, le=1.0)
    model: Target | None = Field(
        None, description="`llm`: the model that rewords, greedily; null: the study's target."
    )

    @model_validator(mode="after")
    def _model_is_used(self):
        if self.model is not None and self.how != "llm":
            raise ValueError("`model` is for `how: llm`")
        return self


class Sampled(_PromptSet):
    """The same prompts, answered by sampling."""

    kind: Literal["sampled"] = Field(description="Kind of set.")
    temperature: float = Field(1.0, description="Temperature of the target.", gt=0.0)
    top_p: float = Field(
        1.0,
        description="Sample from the smallest set of most likely tokens with this probability.",
        gt=0.0,
        le=1.0,
    )
    repeats: int = Field(1, description="Sampled texts per prompt.", ge=1)


class Sessions(_PromptSet):
    """Conversations of several turns, each turn from another domain, the target's own answers between them."""

    kind: Literal["sessions"] = Field(description="Kind of set.")
    turns: int = Field(2, description="Turns of a session.", ge=2)
    max_prompt_tokens: int = Field(
        1024, description="Sessions in which a turn's whole prompt is longer are left out.", ge=8
    )


PromptSet = Annotated[Reworded | Sampled | Sessions, Field(discriminator="kind")]
