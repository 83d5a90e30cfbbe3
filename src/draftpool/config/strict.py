"""What all blocks of the configuration have in common: unknown keys are errors, and names are plain."""

from __future__ import annotations

import re
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel, ConfigDict

NAME = re.compile(r"[a-z][a-z0-9_]*")


def named(value: dict) -> dict:
    """Check that keys are names and sort them: the order of keys in a file means nothing."""
    for key in value:
        if not NAME.fullmatch(key):
            raise ValueError(
                f"name {key!r} must be lower-case letters, digits and underscores, starting with a letter"
            )
    return dict(sorted(value.items()))


def leaves(annotation: Any) -> list[Any]:
    """Types that an annotation is made of."""
    if get_origin(annotation) is Literal:
        return []
    arguments = get_args(annotation)
    return [leaf for argument in arguments for leaf in leaves(argument)] if arguments else [annotation]


def block_models(annotation: Any) -> list[type[BaseModel]]:
    """Models that an annotation holds."""
    return [leaf for leaf in leaves(annotation) if isinstance(leaf, type) and issubclass(leaf, BaseModel)]


class Strict(BaseModel):
    """Base of all blocks: unknown keys and silent type conversions are errors."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, validate_default=True)
