"""Finds what a decorator registers from the sources alone: one class in one file is all an addition takes.

A package such as ``draftpool.selectors`` is scanned for top-level classes decorated with a literal name, for
example ``@register_selector("metasd_ucb")``. Scanning imports nothing, which lets the workflow ask where a
kind lives (for its code digest) without paying for the imports of that module.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
from collections.abc import Collection, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from pydantic import BaseModel, ValidationError

from draftpool.errors import DraftpoolError

Model = TypeVar("Model", bound=BaseModel)


class _Entry(NamedTuple):
    module: str
    attribute: str


def list_registered(package: str, decorator: str) -> dict[str, str]:
    """Every registered name of `package`, mapped to its module, sorted by name.

    Args:
        package: dotted package name, e.g. ``draftpool.selectors``.
        decorator: name of the registering decorator, e.g. ``register_selector``.

    Raises:
        DraftpoolError: the package does not exist, a source cannot be parsed, a name is not a literal or is
            used twice.
    """
    return {name: entry.module for name, entry in _scan(package, decorator).items()}


def find_registered(package: str, decorator: str, name: str) -> str:
    """Dotted name of the module that registers `name`; DraftpoolError, listing what exists, if none does."""
    return _find(package, decorator, name).module


def load_registered(package: str, decorator: str, name: str) -> Any:
    """Import the module that registers `name` and return the class; DraftpoolError if there is none."""
    entry = _find(package, decorator, name)
    return getattr(importlib.import_module(entry.module), entry.attribute)


def validate_parameters(
    model: type[Model], values: Mapping[str, Any], where: str, hidden: Collection[str] = ()
) -> Model:
    """Build `model` from `values`; pydantic's report becomes one DraftpoolError that lists the parameters.

    Args:
        where: what is being configured, for the message.
        hidden: fields of the model that are not the user's to set; left out of the list.
    """
    try:
        return model.model_validate(dict(values))
    except ValidationError as error:
        problems = []
        for item in error.errors():
            name = ".".join(str(part) for part in item["loc"])
            if item["type"] == "extra_forbidden":
                problems.append(f"unknown parameter {name!r}")
            elif item["type"] == "missing":
                problems.append(f"parameter {name!r} is missing")
            else:
                problems.append(f"parameter {name!r} = {item['input']!r}: {item['msg']}")
        known = [name for name in model.model_fields if name not in hidden]
        remedy = f"it takes: {', '.join(known)}" if known else "it takes no parameters"
        raise DraftpoolError("; ".join(problems), where, remedy) from None


def _find(package: str, decorator: str, name: str) -> _Entry:
    entries = _scan(package, decorator)
    if name not in entries:
        noun = decorator.removeprefix("register_")
        raise DraftpoolError(f"unknown {noun} {name!r}", package, f"use one of: {', '.join(entries)}")
    return entries[name]


def _scan(package: str, decorator: str) -> dict[str, _Entry]:
    folder = _folder(package)
    files = [(file, file.stat()) for file in sorted(folder.rglob("*.py"))]
    stamps = tuple((file, stat.st_mtime_ns, stat.st_size) for file, stat in files)
    return _scan_files(package, decorator, folder, stamps)


@lru_cache(maxsize=32)
def _scan_files(
    package: str, decorator: str, folder: Path, stamps: tuple[tuple[Path, int, int], ...]
) -> dict[str, _Entry]:
    """Entries of files as they stand: selectors are made by the thousand, and parsing takes its time."""
    entries: dict[str, _Entry] = {}
    for file, *_ in stamps:
        source = file.read_text(encoding="utf-8")
        if decorator not in source:
            continue
        place = "/".join([*package.split("."), *file.relative_to(folder).parts])
        module = ".".join([package, *file.relative_to(folder).with_suffix("").parts]).removesuffix(
            ".__init__"
        )
        try:
            tree = ast.parse(source)
        except SyntaxError as error:
            raise DraftpoolError(
                f"cannot parse: {error.msg}", f"{place}, line {error.lineno}", "fix the syntax"
            ) from None
        for node in tree.body:
            for name in _names(node, decorator, place):
                if name in entries:
                    raise DraftpoolError(
                        f"{name!r} is registered twice, here and in {entries[name].module}",
                        place,
                        "rename one of the two",
                    )
                entries[name] = _Entry(module, node.name)
    return dict(sorted(entries.items()))


def _folder(package: str) -> Path:
    top, *rest = package.split(".")
    # The top level only: find_spec of a dotted name would import the parents.
    spec = importlib.util.find_spec(top)
    for location in (spec and spec.submodule_search_locations) or ():
        folder = Path(location, *rest)
        if folder.is_dir():
            return folder
    raise DraftpoolError(f"no package {package!r}", "registry", "check the name and the installation")


def _names(node: ast.stmt, decorator: str, place: str) -> list[str]:
    names = []
    for call in getattr(node, "decorator_list", []):
        if not isinstance(call, ast.Call):
            continue
        function = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", None)
        if function != decorator:
            continue
        argument = call.args[0] if len(call.args) == 1 and not call.keywords else None
        if not isinstance(argument, ast.Constant) or not isinstance(argument.value, str):
            raise DraftpoolError(
                f"@{decorator} needs one literal string",
                f"{place}, line {call.lineno}",
                f'write @{decorator}("my_name")',
            )
        names.append(argument.value)
    return names
