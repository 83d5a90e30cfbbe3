"""Digests of what artefacts hold; a file that was hashed before and is untouched is not read again."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from draftpool.artefacts import sha256_file

RECORD = "provenance.json"
# Folder of the records of artefacts that are single files, beside them.
BESIDE = "provenance"


def record_path(artefact: Path) -> Path:
    """Return where the provenance of an artefact lies: inside a folder, or in `provenance/` beside a file.

    Files that differ in their ending only (a figure as PNG and PDF) are one artefact.
    """
    if artefact.is_dir():
        return artefact / RECORD
    return artefact.parent / BESIDE / f"{artefact.stem}.json"


def files_of(artefact: Path, alike: bool = False) -> dict[str, Path]:
    """Return the files of an artefact by their names inside it; its record and hidden files are left out.

    Args:
        artefact: A folder or a file.
        alike: Of a file also those beside it that differ in their ending only.
    """
    if artefact.is_dir():
        found = {str(path.relative_to(artefact)): path for path in sorted(artefact.rglob("*"))}
    else:
        beside = sorted(artefact.parent.glob("*")) if alike else [artefact]
        found = {path.name: path for path in beside if path.stem == artefact.stem}
    return {
        name: path
        for name, path in found.items()
        if path.is_file() and name != RECORD and not path.name.startswith(".")
    }


def _recorded(artefact: Path) -> tuple[dict, int]:
    """What the artefact's record says of its files, and when the record was written."""
    path = record_path(artefact)
    try:
        files = json.loads(path.read_text(encoding="utf-8"))["files"]
        return (files if isinstance(files, dict) else {}), path.stat().st_mtime_ns
    except (OSError, ValueError, KeyError, TypeError):
        return {}, 0


def contents(artefact: Path, alike: bool = False) -> dict[str, dict]:
    """Return SHA-256, size in bytes and modification time (ns) of every file of an artefact.

    A hash that the artefact's own record holds is taken over where size and time are still the same and the file is
    older than the record, as git does with its index: reading the weights of a target again for each of a hundred jobs
    would take longer than some of the jobs.

    Args:
        artefact: A folder or a file.
        alike: Of a file also those beside it that differ in their ending only.
    """
    known, written = _recorded(artefact)
    found = {}
    for name, path in files_of(artefact, alike).items():
        state = path.stat()
        entry = {"bytes": state.st_size, "mtime_ns": state.st_mtime_ns}
        old = known.get(name)
        untouched = (
            isinstance(old, dict)
            and isinstance(old.get("sha256"), str)
            and {key: old.get(key) for key in entry} == entry
            and state.st_mtime_ns < written
        )
        found[name] = entry | {"sha256": old["sha256"] if untouched else sha256_file(path)}
    return found


def digest_of(files: dict[str, dict]) -> str:
    """Return 64 hex digits over names and hashes, whatever the times."""
    digest = hashlib.sha256()
    for name in sorted(files):
        digest.update(f"{name}\0{files[name]['sha256']}\0".encode())
    return digest.hexdigest()


def content_digest(path: Path) -> str | None:
    """Return the digest of a folder or a file; None if it is missing."""
    return digest_of(contents(path)) if path.exists() else None
