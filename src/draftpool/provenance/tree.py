"""A chain of records as text: one block an artefact, its inputs below it, a shared one told once."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from html import escape
from itertools import groupby
from pathlib import Path

from draftpool.provenance.chain import UNRECORDED, Chain, Link, Node
from draftpool.provenance.contents import BESIDE

SEEDS_SHOWN = 4


def tree(chain: Chain) -> str:
    """Return the chain as a tree, the asked artefacts at its top."""
    told: set[Path] = set()
    lines: list[str] = []
    for node in chain.tops:
        if node.path not in told:
            lines += [node.shown + _flagged(node.state), *_below(node, None, told, "")]
    return "\n".join(lines)


def page(text: str) -> str:
    """Return an HTML page that shows a text as it is."""
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>Provenance</title>\n'
        "<style>body { background: #fff; color: #111; margin: 1rem; font-size: 12px; }</style></head>\n"
        f"<body><pre>{escape(text)}</pre></body></html>\n"
    )


def _below(node: Node, child: Node | None, told: set[Path], indent: str) -> Iterator[str]:
    """What is said of an artefact below its name, then its inputs."""
    told.add(node.path)
    for line in _facts(node, child):
        yield f"{indent}{'│' if node.links else ' '}   {line}"
    branches = list(_branches(node))
    for place, (head, link) in enumerate(branches):
        last = place == len(branches) - 1
        below = None if link is None else link.node
        before = "  (told above)" if below is not None and below.path in told else ""
        yield f"{indent}{'└── ' if last else '├── '}{head}{before}"
        if below is not None and not before:
            yield from _below(below, node, told, indent + ("    " if last else "│   "))


def _branches(node: Node) -> Iterator[tuple[str, Link | None]]:
    """The inputs of an artefact; plain files of one flag that are as they were stand in one line."""
    for (flag, plain), group in groupby(
        node.links, lambda link: (link.flag, link.node is None and not link.state)
    ):
        links = list(group)
        if plain and len(links) > 1:
            yield f"{flag}: {len(links)} files, {links[0].shown} and so on", None
            continue
        for link in links:
            yield f"{flag}: {link.shown}{_flagged(link.state)}", link


def _flagged(state: str) -> str:
    return f"  [{state}]" if state else ""


def _facts(node: Node, child: Node | None) -> Iterator[str]:
    record = node.record
    commit = record.get("git_commit")
    dirty = " (with uncommitted changes)" if record.get("git_dirty") else ""
    yield ", ".join(
        filter(
            None,
            [
                record.get("stage", "stage " + UNRECORDED),
                f"commit {commit[:12]}{dirty}" if commit else "no commit known",
                f"device {record['device']}" if record.get("device") else "",
                _seeds(record.get("seeds") or {}),
                f"digest {record['digest'][:12]}" if record.get("digest") else "",
                f"finished {record['finished']}" if record.get("finished") else "",
            ],
        )
    )
    yield "$ " + _command(node)
    versions = _versions(record)
    before = _versions(child.record) if child is not None else {}
    differing = [f"{name} {version}" for name, version in versions.items() if before.get(name) != version]
    if differing:
        yield "versions: " + ", ".join(differing)
    yield from (f"pinned: {pin}" for pin in _pins(record.get("cfg") or _resolved(node)))
    if "inputs" not in record:
        yield f"inputs {UNRECORDED}: made by an earlier version"


def _versions(record: dict) -> dict[str, str]:
    found = {"python": record.get("python")} | (record.get("versions") or {})
    return {name: version for name, version in found.items() if version}


def _seeds(seeds: dict) -> str:
    if not seeds:
        return ""
    shown = [f"{name} {value}" for name, value in list(seeds.items())[:SEEDS_SHOWN]]
    more = len(seeds) - len(shown)
    return ", ".join(shown) + (f" and {more} further seeds" if more > 0 else "")


def _command(node: Node) -> str:
    """The command line; the configuration as the file that holds it, and many inputs of one flag as their number."""
    words = [str(word) for word in node.record["command"]]
    words[:1] = [Path(word).name for word in words[:1]]
    if "--cfg" in words[:-1]:
        place = words.index("--cfg") + 1
        shown = Path(node.shown)
        held = shown / "resolved.yaml" if node.path.is_dir() else shown.parent / BESIDE / f"{shown.stem}.yaml"
        words[place] = f"@{held}"
    parts: list[list[str]] = [[]]
    for word in words:
        if word.startswith("--"):
            parts.append([])
        parts[-1].append(word if word[:1] == "@" else shlex.quote(word))
    return " ".join(
        " ".join(part) if len(part) <= 3 else f"{part[0]} ({len(part) - 1} paths)" for part in parts
    )


def _resolved(node: Node) -> dict:
    from draftpool.config.load import read_yaml
    from draftpool.errors import DraftpoolError

    try:
        return read_yaml(node.path / "resolved.yaml") if node.path.is_dir() else {}
    except DraftpoolError:
        return {}


def _pins(cfg: dict) -> Iterator[str]:
    """What a configuration pins: packages by their hash, repositories by their revision."""
    for value in cfg.values():
        if isinstance(value, dict) and isinstance(value.get("sha256"), str):
            yield f"{value.get('filename')} sha256 {value['sha256'][:12]}"
        elif isinstance(value, dict):
            yield from _pins(value)
    if cfg.get("model_id"):
        yield f"{cfg['model_id']} revision {cfg.get('revision') or 'none (not pinned)'}"
