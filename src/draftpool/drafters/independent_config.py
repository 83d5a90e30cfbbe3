"""Shape of a distilled language model."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class IndependentConfig(BaseModel):
    """A distilled drafter: layers of the target's form under the target's embedding and head."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    kind: str = "independent"
    draft_tokens: int
    n_layers: int
    lm: dict
    hidden_size: int
    target_layers: int
    target_vocabulary: int
