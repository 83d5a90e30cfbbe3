"""`config/schema.json` and `config/README.md`, generated from the models and so in step with them."""

from __future__ import annotations

import json
import types
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from draftpool.artefacts import atomic_path
from draftpool.config import models
from draftpool.config.strict import block_models

HEAD = """# Configuration

Generated from the models in `src/draftpool/config/` by `draftpool write_config_docs`; a test compares the two.

`config/default.yaml` is the study that `snakemake` runs. Another file is laid over it by
`snakemake --configfile OVERLAY.yaml`: mappings are merged, everything else (lists too) is replaced.
`draftpool check_config config/default.yaml OVERLAY.yaml` checks files without running anything.

Unknown keys and wrong types are errors. YAML 1.1 reads `1e-4` as text; write `1.0e-4`. The order of keys
means nothing. An option that changes a result is part of the id of what it changes, so that a changed option
reruns exactly what depends on it.

`schema.json` serves editors: put `# yaml-language-server: $schema=schema.json` on top of a file.
"""


def _models(model: type[BaseModel], found: dict[str, type[BaseModel]]) -> dict[str, type[BaseModel]]:
    """Collect a model and those of its fields, in reading order."""
    if model.__name__ not in found:
        found[model.__name__] = model
        for option in model.model_fields.values():
            for part in block_models(option.annotation):
                _models(part, found)
    return found


def _type(annotation: Any) -> str:
    """Name a type as a user of YAML would."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _type(arguments[0])
    if origin in (Union, types.UnionType):
        return " or ".join(_type(argument) for argument in arguments)
    if origin is Literal:
        return " or ".join(f"`{value}`" for value in arguments)
    if origin is list:
        return f"list of {_type(arguments[0])}"
    if origin is dict:
        inner = _type(arguments[1])
        return "mapping" if inner == "any" else f"name -> {inner}"
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return f"[{annotation.__name__}](#{annotation.__name__.lower()})"
    names = {
        str: "text",
        int: "integer",
        float: "number",
        bool: "true or false",
        type(None): "null",
        Any: "any",
    }
    return names[annotation]


def _default(option: FieldInfo) -> str:
    if option.is_required():
        return "required"
    if isinstance(option.default, BaseModel):
        return "its defaults"
    return f"`{json.dumps(option.default)}`"


def _table(name: str, model: type[BaseModel]) -> str:
    rows = [
        f"## {name}",
        "",
        (model.__doc__ or "").strip(),
        "",
        "| key | type | default | meaning |",
        "|---|---|---|---|",
    ]
    for key, option in model.model_fields.items():
        cells = (f"`{key}`", _type(option.annotation), _default(option), option.description or "")
        rows.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    if model.model_config.get("extra") == "allow":
        rows.append("| other keys | any | | Parameters of the `kind`. |")
    return "\n".join(rows)


def schema() -> dict:
    """Return the JSON schema of a configuration file, for editors."""
    made = models.Study.model_json_schema()
    for block in (made, *made["$defs"].values()):
        # An overlay or a recipe holds only what it changes; an editor must not call it incomplete.
        block.pop("required", None)
    return {"$schema": "https://json-schema.org/draft/2020-12/schema"} | made


def readme() -> str:
    """Return the Markdown reference: one table per block."""
    tables = [_table(name, model) for name, model in _models(models.Study, {}).items()]
    return "\n\n".join([HEAD.strip(), *tables]) + "\n"


def write_reference(folder: Path) -> None:
    """Write ``schema.json`` and ``README.md`` into ``folder``."""
    for name, text in (("schema.json", json.dumps(schema(), indent=2) + "\n"), ("README.md", readme())):
        with atomic_path(Path(folder) / name) as temporary:
            temporary.write_text(text, encoding="utf-8")
