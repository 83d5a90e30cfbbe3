"""Code digests: which stages must run again after an edit.

The digest of a stage is the SHA-256 of the syntax trees, docstrings removed, of its module and of everything
it imports inside ``draftpool``. Comments, docstrings and formatting do not change it; one line of logic does.
"""

from __future__ import annotations

import ast
import hashlib
from functools import cache
from pathlib import Path

from draftpool.errors import DraftpoolError

PACKAGE = "draftpool"
ROOT = Path(__file__).resolve().parents[1]


def module_path(module: str) -> Path | None:
    """Return the source file of a module of the package, or None if there is none."""
    package, *rest = module.split(".")
    if package != PACKAGE or not rest:
        return None
    base = ROOT.joinpath(*rest)
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
            # `from draftpool.figures import style` uses style, not the list of figures beside it.
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            found.update(name if module_path(name) else node.module for name in names)
    return {name for name in found if module_path(name)}


@cache
def _read(module: str) -> tuple[str, frozenset[str]]:
    tree = ast.parse(module_path(module).read_text(encoding="utf-8"))
    imports = frozenset(_imports(tree))
    return ast.dump(_without_docstrings(tree)), imports


def modules_of(*modules: str) -> list[str]:
    """Return the given modules and all that they import inside the package, sorted.

    Raises:
        DraftpoolError: If one of the given modules does not exist.
    """
    for module in modules:
        if module_path(module) is None:
            raise DraftpoolError(f"no module {module}", "code digest", "check the name and the installation")
    waiting, seen = list(modules), set()
    while waiting:
        module = waiting.pop()
        if module not in seen:
            seen.add(module)
            waiting.extend(_read(module)[1])
    return sorted(seen)


def code_digest(*modules: str) -> str:
    """Return 16 hex digits over the code of the modules and all that they import inside the package.

    Raises:
        DraftpoolError: If one of the modules does not exist.
    """
    digest = hashlib.sha256()
    for module in modules_of(*modules):
        digest.update(f"{module}\0{_read(module)[0]}\0".encode())
    return digest.hexdigest()[:16]
