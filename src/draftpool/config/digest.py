"""Code digests: which stages must run again after an edit.

The digest of a stage is the SHA-256 of the syntax trees, docstrings removed, of its module and of everything
it imports inside ``draftpool``. Comments, docstrings and formatting do not change it; one line of logic does.
"""

from __future__ import annotations

import ast
import hashlib
from functools import cache
from pathlib import Path

PACKAGE = "draftpool"
ROOT = Path(__file__).resolve().parents[1]


def module_path(module: str) -> Path | None:
    """Return the source file of a module of the package, or None if there is none."""
    base = ROOT.joinpath(*module.split(".")[1:])
    for candidate in (base.with_suffix(".py"), base / "__init__.py"):
        if candidate.is_file():
            return candidate
    return None


def _without_docstrings(tree: ast.AST) -> ast.AST:
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
            and ast.get_docstring(node, clean=False) is not None
        ):
            node.body = node.body[1:]
    return tree


def _imports(tree: ast.AST) -> set[str]:
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            found.add(node.module)
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
    return {name for name in found if name == PACKAGE or name.startswith(PACKAGE + ".")}


@cache
def _read(module: str) -> tuple[str, frozenset[str]]:
    path = module_path(module)
    if path is None:
        return "", frozenset()
    tree = ast.parse(path.read_text(encoding="utf-8"))
    imports = frozenset(_imports(tree))
    return ast.dump(_without_docstrings(tree)), imports


def modules_of(*modules: str) -> list[str]:
    """Return the given modules and all that they import inside the package, sorted."""
    waiting, seen = list(modules), set()
    while waiting:
        module = waiting.pop()
        if module in seen or module_path(module) is None or module == PACKAGE:
            continue
        seen.add(module)
        waiting.extend(_read(module)[1])
        # Importing a module runs the `__init__` of its packages.
        waiting.append(module.rpartition(".")[0])
    return sorted(seen)


def code_digest(*modules: str) -> str:
    """Return 16 hex digits over the code of the modules and all that they import inside the package."""
    digest = hashlib.sha256()
    for module in modules_of(*modules):
        digest.update(f"{module}\0{_read(module)[0]}\0".encode())
    return digest.hexdigest()[:16]
