"""Reading and writing artefacts: atomic, so that nothing half-written is ever taken for complete."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from draftpool.errors import DraftpoolError

if TYPE_CHECKING:
    import pandas as pd


@contextmanager
def _replacing(path: Path, make_temporary) -> Iterator[Path]:
    path = Path(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = make_temporary(path)
        yield temporary
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        os.replace(temporary, path)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise DraftpoolError(
                "the disk is full", str(path), "free some space and run the same command again"
            ) from error
        if error.errno in (errno.EACCES, errno.EROFS, errno.EPERM):
            raise DraftpoolError(
                "cannot write here", str(path), "check the permissions of the folder"
            ) from error
        raise
    except Exception as error:
        # safetensors writes in Rust and tells of a full disk by the text alone.
        if "No space left" in str(error):
            raise DraftpoolError(
                "the disk is full", str(path), "free some space and run the same command again"
            ) from error
        raise
    finally:
        if "temporary" in locals():
            if temporary.is_dir():
                shutil.rmtree(temporary, ignore_errors=True)
            else:
                temporary.unlink(missing_ok=True)


PART = ".part"
LEFTOVER = re.compile(rf"\..+\.(?P<machine>[0-9a-f]{{8}})\.(?P<pid>\d+)\.[^.]+{re.escape(PART)}")


@cache
def _machine() -> str:
    """8 hex digits of where a process number means this process: node, its boot, and the namespace of numbers."""
    where = [platform.node()]
    for path in ("/proc/sys/kernel/random/boot_id", "/proc/self/ns/pid"):
        with suppress(OSError):
            where.append(os.readlink(path) if path.endswith("pid") else Path(path).read_text())
    return hashlib.sha256("\0".join(where).encode()).hexdigest()[:8]


def _owner() -> str:
    return f"{_machine()}.{os.getpid()}"


def _temporary_file(path: Path) -> Path:
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.{_owner()}.", suffix=PART, dir=path.parent)
    os.close(handle)
    os.chmod(name, 0o644)
    return Path(name)


def _temporary_dir(path: Path) -> Path:
    folder = Path(tempfile.mkdtemp(prefix=f".{path.name}.{_owner()}.", suffix=PART, dir=path.parent))
    folder.chmod(0o755)
    return folder


def clear_leftovers(*folders: Path) -> None:
    """Remove temporary files and folders directly in ``folders`` whose process was killed before it could.

    Those of living processes stay, and those of other machines (or boots, or containers), which cannot be asked.
    """
    for folder in folders:
        # Other jobs finish theirs meanwhile.
        with suppress(OSError):
            for entry in list(os.scandir(folder)):
                made = LEFTOVER.fullmatch(entry.name)
                if made is None or made["machine"] != _machine() or psutil.pid_exists(int(made["pid"])):
                    continue
                if entry.is_dir(follow_symlinks=False):
                    shutil.rmtree(entry.path, ignore_errors=True)
                else:
                    Path(entry.path).unlink(missing_ok=True)


@contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """Yield a temporary file beside ``path`` that replaces it on success and is removed on any error.

    Raises:
        DraftpoolError: If the disk is full or the folder cannot be written.
    """
    with _replacing(Path(path), _temporary_file) as temporary:
        yield temporary


@contextmanager
def atomic_dir(path: Path) -> Iterator[Path]:
    """Yield a temporary folder that becomes ``path`` on success and is removed on any error.

    Raises:
        DraftpoolError: If the disk is full or the folder cannot be written.
    """
    with _replacing(Path(path), _temporary_dir) as temporary:
        yield temporary


def canonical_json(value: Any) -> str:
    """Return the one JSON text of ``value``: sorted keys, no spaces, no NaN."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False, ensure_ascii=True)


def write_json(path: Path, value: Any) -> None:
    """Write indented JSON atomically."""
    with atomic_path(path) as temporary:
        temporary.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def read_json(path: Path) -> Any:
    """Read a JSON file.

    Raises:
        DraftpoolError: If the file is missing or not JSON.
    """
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise DraftpoolError("file not found", str(path), "run the stage that makes it") from error
    except ValueError as error:
        raise DraftpoolError(
            f"not valid JSON ({error})", str(path), "delete it and run snakemake again"
        ) from error


def write_jsonl(path: Path, rows: Iterable[dict]) -> None:
    """Write one JSON object a line, atomically."""
    with atomic_path(path) as temporary, temporary.open("w", encoding="utf-8") as handle:
        for row in rows:
            handle.write(json.dumps(row, ensure_ascii=False, sort_keys=True) + "\n")


def read_jsonl(path: Path) -> list[dict]:
    """Read one JSON object a line.

    Raises:
        DraftpoolError: If the file is missing or a line is not JSON (named by its number).
    """
    rows = []
    try:
        with Path(path).open(encoding="utf-8") as handle:
            for number, line in enumerate(handle, start=1):
                try:
                    rows.append(json.loads(line))
                except ValueError as error:
                    raise DraftpoolError(
                        f"line {number} is not valid JSON", str(path), "delete the file and rerun"
                    ) from error
    except FileNotFoundError as error:
        raise DraftpoolError("file not found", str(path), "run the stage that makes it") from error
    except UnicodeDecodeError as error:
        raise DraftpoolError("not UTF-8 text", str(path), "delete the file and rerun") from error
    return rows


def write_table(path: Path, frame: pd.DataFrame) -> None:
    """Write a data frame as Parquet, atomically and without its index."""
    with atomic_path(path) as temporary:
        frame.to_parquet(temporary, index=False)


def append_tables(path: Path, parts: list[tuple[Path, dict[str, str]]]) -> None:
    """Write one Parquet table of many, part after part, atomically.

    Args:
        path: File to write.
        parts: Tables of the same columns, and columns of one value that are added to each.

    Raises:
        DraftpoolError: If a part is damaged.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    with atomic_path(path) as temporary:
        writer = None
        try:
            for part, added in parts:
                try:
                    table = pq.read_table(part)
                except (OSError, ValueError) as error:
                    raise DraftpoolError(
                        f"damaged table ({error})", str(part), "delete it and run snakemake again"
                    ) from error
                if not table.num_rows:
                    continue
                for name, value in added.items():
                    column = pa.array([value]).dictionary_encode().take(pa.array([0] * table.num_rows))
                    table = table.append_column(name, column)
                table = table.replace_schema_metadata()
                writer = writer or pq.ParquetWriter(temporary, table.schema)
                # Rows of another stage may name their columns in another order.
                writer.write_table(table.select(writer.schema.names).cast(writer.schema))
        finally:
            if writer is not None:
                writer.close()


def read_table(
    path: Path, columns: list[str] | None = None, where: list[tuple] | None = None
) -> pd.DataFrame:
    """Read a Parquet table, all rows or those for which a list of (column, operator, value) holds.

    Raises:
        DraftpoolError: If the file is missing or damaged.
    """
    import pandas as pd

    try:
        return pd.read_parquet(path, columns=columns, filters=where)
    except FileNotFoundError as error:
        raise DraftpoolError("table not found", str(path), "run the stage that makes it") from error
    except (OSError, ValueError) as error:
        raise DraftpoolError(
            f"damaged table ({error})", str(path), "delete it and run snakemake again"
        ) from error


def sha256_file(path: Path) -> str:
    """Return the SHA-256 of a file as 64 hex digits."""
    with Path(path).open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def content_hash(*paths: Path) -> str:
    """Return 16 hex digits over the weights and tables below files or folders.

    Scratch results are bound to it: an artefact made again by other code keeps its id, but not its content.
    """
    digest = hashlib.sha256()
    for path in paths:
        files = [path] if path.is_file() else sorted(path.rglob("*"))
        for file in files:
            if file.suffix in (".safetensors", ".parquet", ".jsonl") or file.name == "config.json":
                digest.update(f"{file.name}\0{sha256_file(file)}\0".encode())
    return digest.hexdigest()[:16]


def _git(*arguments: str) -> str | None:
    # Where the package lies, not where the user stands: results may live on another disk.
    here = Path(__file__).resolve().parent
    try:
        answer = subprocess.run(
            ["git", *arguments], cwd=here, capture_output=True, text=True, timeout=10, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return answer.stdout.strip()


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def provenance() -> dict:
    """Return what made an artefact: command, versions, git commit (with a dirty flag)."""
    packages = ("draftpool", "torch", "transformers", "datasets", "numpy", "pandas", "scipy", "snakemake")
    return {
        "command": sys.argv,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "cpu_count": os.cpu_count(),
        "versions": {package: _version(package) for package in packages},
        "git_commit": _git("rev-parse", "HEAD"),
        "git_dirty": bool(_git("status", "--porcelain", "--untracked-files=no")),
    }


def write_provenance(folder: Path, cfg: dict, extra: dict | None = None) -> None:
    """Write ``resolved.yaml`` (feeds back into the same stage by ``--cfg @file``) and ``provenance.json``."""
    import yaml

    folder = Path(folder)
    with atomic_path(folder / "resolved.yaml") as temporary:
        temporary.write_text(yaml.safe_dump(cfg, sort_keys=True), encoding="utf-8")
    write_json(folder / "provenance.json", provenance() | (extra or {}))
