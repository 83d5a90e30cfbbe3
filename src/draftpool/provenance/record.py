"""What every job writes down of itself: command, versions, commit, device, seeds, and what its inputs held."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from draftpool.artefacts import atomic_path, provenance, read_json, write_json
from draftpool.provenance.contents import content_digest, contents, digest_of, record_path

# Flags that name what a stage writes.
WRITTEN = ("out", "state")
SEEDS = ("seed", "seeds", "selector_seeds", "stream_seeds", "few_seeds")


def inputs_of(flags: dict[str, Any], cfg: dict) -> list[dict]:
    """Return flag, path, id and content digest of everything that a stage is going to read.

    Local folders and files that the configuration names (`path`) are inputs too, under the flag `cfg`.

    Args:
        flags: Paths by flag, None or lists of paths.
        cfg: Configuration of the stage.
    """
    named = [("cfg", path) for path in _local_paths(cfg)]
    for flag, value in flags.items():
        if flag not in WRITTEN and value is not None:
            named += [(flag, path) for path in (value if isinstance(value, list) else [value])]
    return [
        {"flag": flag, "path": str(path), "id": _id_of(path), "digest": content_digest(path)}
        for flag, path in named
        if isinstance(path, Path)
    ]


def _id_of(path: Path) -> str:
    """The name of a folder; of a file that is an artefact, the name of its folder."""
    return path.name if path.is_dir() or not record_path(path).is_file() else path.parent.name


def _local_paths(value: Any) -> Iterator[Path]:
    if isinstance(value, dict):
        for key, inner in value.items():
            if key == "path" and isinstance(inner, str) and inner and Path(inner).exists():
                yield Path(inner)
            else:
                yield from _local_paths(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _local_paths(inner)


def seeds_of(value: Any, key: str = "") -> dict[str, Any]:
    """Return every seed of a configuration by its key (``streams.mixed.seed``)."""
    found = {}
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, part in inner:
        place = f"{key}.{name}" if key else str(name)
        if name in SEEDS and not isinstance(part, dict):
            found[place] = part
        else:
            found |= seeds_of(part, place)
    return found


def _device(cfg: dict) -> str | None:
    """Where a stage ran: `auto` is what torch found; None for stages without a device."""
    device = cfg.get("device")
    if device != "auto":
        return device
    torch = sys.modules.get("torch")
    return "cuda" if torch is not None and torch.cuda.is_available() else "cpu"


@contextmanager
def recorded(stage: str, cfg: dict, flags: dict[str, Any], resolved: bool = True) -> Iterator[None]:
    """Run a stage inside: its inputs are digested before, and its record is completed when it has succeeded.

    A folder's record is its `provenance.json`. That of a single file lies in the folder `provenance/` beside it, as
    `<name>.json` with the configuration in it.

    Args:
        stage: Sub-command.
        cfg: Its configuration.
        flags: Its other flags, `out` among them.
        resolved: Whether a file's configuration is also written as `<name>.yaml`, which `--cfg @` reads.
    """
    started = datetime.now(UTC).isoformat(timespec="seconds")
    inputs = inputs_of(flags, cfg)
    yield
    out = flags["out"]
    if out.exists():
        _complete(out, stage, cfg, inputs, started, resolved)


def _commit(made: dict) -> dict[str, Any]:
    """Commit and whether it was edited; where there is no git, as in a container, ``DRAFTPOOL_COMMIT`` says it."""
    told = os.environ.get("DRAFTPOOL_COMMIT", "")
    if made.get("git_commit") or not told:
        return {}
    return {"git_commit": told.removesuffix("-dirty"), "git_dirty": told.endswith("-dirty")}


def _complete(out: Path, stage: str, cfg: dict, inputs: list[dict], started: str, resolved: bool) -> None:
    path = record_path(out)
    if out.is_dir():
        made = read_json(path) if path.is_file() else provenance()
    else:
        made = provenance() | {"cfg": cfg}
        if resolved:
            import yaml

            with atomic_path(path.with_suffix(".yaml")) as temporary:
                temporary.write_text(yaml.safe_dump(cfg, sort_keys=True), encoding="utf-8")
    files = contents(out, alike=True)
    made |= _commit(made) | {
        "stage": stage,
        "id": out.name if out.is_dir() else out.parent.name,
        "out": str(out),
        "started": started,
        "finished": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": made.get("device") or _device(cfg),
        "seeds": seeds_of(cfg),
        "inputs": inputs,
        "files": files,
        "digest": digest_of(files),
    }
    write_json(path, made)
