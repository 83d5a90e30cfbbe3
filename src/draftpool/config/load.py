"""Load YAML, merge overlays, fill in recipes and check; every mistake is one line that names the key."""

from __future__ import annotations

import copy
import difflib
import re
from pathlib import Path
from typing import Any, get_args, get_origin

import yaml
from pydantic import BaseModel, ValidationError

from draftpool.config import models
from draftpool.config.recipes import RECIPES
from draftpool.config.strict import block_models
from draftpool.errors import DraftpoolError
from draftpool.provenance.secrets import refuse_logins

# Mappings from names that users choose.
_NAMED = (
    ("domains",),
    ("prompt_sets",),
    ("drafters",),
    ("sweeps",),
    ("selectors",),
    ("pools",),
    ("decode", "streams"),
    ("replay", "streams"),
    ("replay", "selectors"),
)
SCIENTIFIC = re.compile(r"[+-]?\d+(\.\d*)?[eE][+-]?\d+")


def merge(base: Any, overlay: Any) -> Any:
    """Return ``base`` with ``overlay`` laid over it: mappings deeply, everything else replaced."""
    if isinstance(base, dict) and isinstance(overlay, dict):
        merged = dict(base)
        for key, value in overlay.items():
            merged[key] = merge(base[key], value) if key in base else value
        return merged
    return copy.deepcopy(overlay)


def read_yaml(path: Path) -> dict:
    """Read one YAML file with the safe loader.

    Raises:
        DraftpoolError: If the file is missing, is not YAML or is not a mapping.
    """
    try:
        value = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise DraftpoolError(
            "no such configuration file", str(path), "check the name after --configfile"
        ) from error
    except yaml.YAMLError as error:
        place = getattr(error, "problem_mark", None)
        line = f" in line {place.line + 1}" if place else ""
        raise DraftpoolError(f"not valid YAML{line}", str(path), "check indentation and quotes") from error
    if not isinstance(value, dict):
        raise DraftpoolError("must hold `key: value` pairs", str(path), "see config/default.yaml")
    return value


def _kinds(model: type[BaseModel]) -> tuple:
    kind = model.model_fields.get("kind")
    tag = getattr(model, "tag", None)
    own = () if tag is None else (tag,)
    return (*get_args(kind.annotation), *own) if kind is not None else ()


def _follow(location: tuple) -> tuple[tuple, list[str]]:
    """Follow a location of pydantic into the models: the keys as they stand in the file, and those known there.

    A union of blocks puts the block's kind into the location, which is no key of the file.
    """
    shown: list[Any] = []
    candidates: list[type[BaseModel]] = [models.Study]
    name_is_next = False
    for part in location:
        tagged = [] if name_is_next or len(candidates) < 2 else candidates
        chosen = [model for model in tagged if part in _kinds(model)]
        if chosen:
            candidates = chosen
            continue
        shown.append(part)
        if name_is_next:
            # The models stay those of the mapping's values, whatever the entry is called.
            name_is_next = False
            continue
        fields = [model.model_fields[str(part)] for model in candidates if str(part) in model.model_fields]
        if fields:
            candidates = block_models(fields[0].annotation)
            name_is_next = get_origin(fields[0].annotation) is dict and bool(candidates)
    return tuple(shown), [key for model in candidates for key in model.model_fields]


def _suggest(location: tuple) -> str:
    _, known = _follow(location[:-1])
    close = difflib.get_close_matches(str(location[-1]), known, n=1)
    if close:
        return f"did you mean `{close[0]}`?"
    return f"known keys here: {', '.join(known)}" if known else "see config/README.md"


def explain(error: ValidationError) -> DraftpoolError:
    """Turn the most telling complaint of pydantic into one line that names key and remedy."""
    # A misspelt key also leaves its right spelling missing: the unknown key is what to name.
    order = {"extra_forbidden": 0, "missing": 2}
    first = min(error.errors(), key=lambda complaint: order.get(complaint["type"], 1))
    location = tuple(
        part for part in first["loc"] if not str(part).startswith(("literal[", "list[", "function-"))
    )
    where = "config key `" + ".".join(str(part) for part in _follow(location)[0]) + "`"
    value = first.get("input")
    if first["type"] == "extra_forbidden":
        return DraftpoolError("unknown key", where, _suggest(location))
    if first["type"] == "missing":
        return DraftpoolError("is missing", where, "add it; config/README.md says what it is")
    if isinstance(value, str) and SCIENTIFIC.fullmatch(value):
        return DraftpoolError(
            f"{value!r} is text in YAML 1.1, not a number",
            where,
            f"write it with a decimal point, for example {float(value):.1e}",
        )
    shown = repr(value) if len(repr(value)) < 60 else type(value).__name__
    return DraftpoolError(f"{first['msg']} (found {shown})", where, "see config/README.md")


def overlay_recipe(base: dict, recipe: dict) -> dict:
    """Return ``base`` with ``recipe`` laid over it; of another objective only the reduction is kept."""
    merged = merge(base, recipe)
    ours, theirs = recipe.get("objective"), base.get("objective")
    if (
        isinstance(ours, dict)
        and isinstance(theirs, dict)
        and ours.get("kind", theirs.get("kind")) != theirs.get("kind")
    ):
        # Parameters of one objective mean nothing to another.
        merged["objective"] = {key: theirs[key] for key in ("reduction",) if key in theirs} | ours
    if isinstance(merged.get("objective"), dict):
        # Overlays are merged before kinds are compared: null takes a parameter of the other objective out.
        merged["objective"] = {key: value for key, value in merged["objective"].items() if value is not None}
    return merged


def _drop_empty(raw: dict) -> dict:
    """Leave out the entries of named mappings that an overlay set to null: merging alone can only add."""
    kept = dict(raw)
    for block, *inner in _NAMED:
        if inner and isinstance(kept.get(block), dict):
            kept[block] = dict(kept[block])
        holder, key = (kept.get(block), inner[0]) if inner else (kept, block)
        if isinstance(holder, dict) and isinstance(holder.get(key), dict):
            holder[key] = {name: entry for name, entry in holder[key].items() if entry is not None}
    return kept


def _fill_recipes(raw: dict) -> dict:
    """Lay every recipe over `drafter_defaults`, so that what pydantic checks is what runs.

    Shape and objective of the defaults mean nothing to another kind of drafter, and nothing does to an untrained one.
    """
    defaults = raw.get("drafter_defaults") or {}
    drafters = raw.get("drafters")
    if not isinstance(drafters, dict) or not isinstance(defaults, dict):
        return raw
    own_kind = defaults.get("kind", "block")
    filled = {}
    for name, recipe in drafters.items():
        if isinstance(recipe, dict):
            kind = recipe.get("kind", own_kind)
            known = RECIPES.get(kind) if isinstance(kind, str) else None
            base = defaults
            if kind != own_kind:
                trained = known is not None and known.trained
                kept = set(known.model_fields) - {"model", "objective", "init"} if trained else ()
                base = {key: value for key, value in defaults.items() if key in kept}
            recipe = overlay_recipe(base, recipe) | {"kind": kind}
        filled[name] = recipe
    return raw | {"drafters": filled}


def resolve(raw: dict) -> models.Study:
    """Check a merged configuration.

    Args:
        raw: The mapping that Snakemake holds as ``config``.

    Raises:
        DraftpoolError: One line naming the key, what is wrong and what to do.
    """
    refuse_logins(raw)
    try:
        return models.Study.model_validate(_fill_recipes(_drop_empty(raw)))
    except ValidationError as error:
        raise explain(error) from error


def load(*paths: Path) -> models.Study:
    """Read YAML files, later ones laid over earlier ones, and check the result."""
    raw: dict = {}
    for path in paths:
        raw = merge(raw, read_yaml(path))
    return resolve(raw)
