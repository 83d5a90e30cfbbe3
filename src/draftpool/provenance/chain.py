"""The chain of records from a figure, a table or any artefact back to the prompts and the target."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftpool.artefacts import atomic_path
from draftpool.errors import DraftpoolError
from draftpool.provenance.contents import BESIDE, RECORD, content_digest, contents, record_path
from draftpool.provenance.secrets import mask

UNRECORDED = "not recorded"
CHANGED = "changed since"
MISSING = "missing"
FS_COPIES = (".snakemake", "storage", "fs")
# Keys of a record that the chain shows; damaged records lack them or hold something else.
_SHAPES = {"command": list, "versions": dict, "inputs": list, "files": dict, "seeds": dict}
_INPUT = {"flag": str, "path": str}


@dataclass
class Link:
    """One input of an artefact: where it lies, and whether it still holds what was read."""

    flag: str
    path: Path
    shown: str
    state: str  # "" if it is as it was
    node: Node | None


@dataclass
class Node:
    """One artefact, its record and its inputs."""

    path: Path
    shown: str
    record: dict
    state: str
    links: list[Link]


def artefact_of(file: Path) -> Path:
    """Return the artefact that a file belongs to: itself, the figure or table it is a form of, or its folder.

    Raises:
        DraftpoolError: If there is no such file, or it belongs to no artefact.
    """
    if not file.exists():
        raise DraftpoolError("no such file or folder", str(file), "check the name")
    file = file.absolute()
    if file.parent.name == BESIDE and file.suffix in (".json", ".yaml"):
        # The record says which of the files was asked for; that one need not be there any more.
        told = file.with_suffix(".json")
        out = Path(_parse(told).get("out") or file.stem) if told.is_file() else Path(file.stem)
        file = file.parent.parent / out.name
    if record_path(file).is_file():
        return file
    for folder in file.parents:
        if (folder / RECORD).is_file():
            return folder
    # The headline numbers are copied out of the statistics, for readers.
    made = file.parent / "stats" / file.name
    if made.is_file() and (made.parent / RECORD).is_file() and content_digest(file) == content_digest(made):
        return made.parent
    raise DraftpoolError(
        "belongs to no artefact",
        str(file),
        "give a figure, a table, or a file or folder below results/ that a stage made",
    )


def read_record(artefact: Path) -> dict:
    """Read the provenance of an artefact.

    Raises:
        DraftpoolError: If it is damaged.
    """
    path = record_path(artefact)
    record, problem = _parse(path), ""
    for key, kind in _SHAPES.items():
        if key in record and not isinstance(record[key], kind):
            problem = f"`{key}` is no {kind.__name__}"
    for entry in record.get("inputs", []) if not problem else ():
        if not isinstance(entry, dict) or any(not isinstance(entry.get(key), t) for key, t in _INPUT.items()):
            problem = "an input has no flag or no path"
    for entry in record.get("files", {}).values() if not problem else ():
        if not isinstance(entry, dict) or not isinstance(entry.get("sha256"), str):
            problem = "a file has no hash"
    if problem or "command" not in record:
        raise _damaged(path, problem or "no command")
    return record


def _parse(path: Path) -> dict:
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise _damaged(path, "no JSON") from error
    if not isinstance(record, dict) or not isinstance(record.get("out", ""), str):
        raise _damaged(path, "no JSON object, or `out` is no text")
    return record


def _damaged(path: Path, what: str) -> DraftpoolError:
    return DraftpoolError(
        f"damaged provenance ({what})", str(path), "delete the artefact and run snakemake again"
    )


class Chain:
    """Artefacts by path, each read and digested once.

    Args:
        files: Figures, tables, artefacts, or files inside one.

    Raises:
        DraftpoolError: If a file belongs to no artefact, or a record in the chain is damaged.
    """

    def __init__(self, *files: Path):
        self._nodes: dict[Path, Node] = {}
        self._digests: dict[Path, str | None] = {}
        self.tops = [self._node(artefact_of(file), "") for file in files]

    def _digest(self, path: Path) -> str | None:
        if path not in self._digests:
            self._digests[path] = content_digest(path)
        return self._digests[path]

    def _node(self, path: Path, shown: str) -> Node:
        if path in self._nodes:
            return self._nodes[path]
        record = read_record(path)
        node = Node(path, shown or _shown(path, record), record, _own_state(path, record), [])
        self._nodes[path] = node
        for entry in record.get("inputs", []):
            target = _found(entry["path"], path, record)
            known = target.exists() and record_path(target).is_file()
            node.links.append(
                Link(
                    flag=entry["flag"],
                    path=target,
                    shown=entry["path"],
                    state=self._state(target, entry.get("digest")),
                    node=self._node(target, entry["path"]) if known else None,
                )
            )
        return node

    def _state(self, path: Path, read: str | None) -> str:
        now = self._digest(path)
        if now is None:
            return MISSING
        if read is None:
            return UNRECORDED
        return "" if now == read else CHANGED

    @property
    def nodes(self) -> list[Node]:
        """All artefacts, every one once."""
        return list(self._nodes.values())


def _found(entry: str, path: Path, record: dict) -> Path:
    """Where an input lies now: results may have been moved or copied as a whole since they were made.

    What the artefact's own path has in common with the one it was written to says what stands for what.
    """
    given, out = Path(entry), Path(record.get("out") or path)
    common = 0
    while common < min(len(out.parts), len(path.parts)) and out.parts[-1 - common] == path.parts[-1 - common]:
        common += 1
    before, now = out.parts[: len(out.parts) - common], path.parts[: len(path.parts) - common]
    if common and given.parts[: len(before)] == before and given.is_absolute() == out.is_absolute():
        given = Path(*now, *given.parts[len(before) :])
    given = Path.cwd() / given
    copies = len(given.parts) - len(FS_COPIES)
    starts = [place for place in range(copies) if given.parts[place : place + len(FS_COPIES)] == FS_COPIES]
    if starts and not given.exists():
        # A local copy of the storage plugin `fs` that is gone: what it was made of lies where it says.
        return Path("/", *given.parts[starts[0] + len(FS_COPIES) :])
    return given


def _shown(path: Path, record: dict) -> str:
    return record.get("out") or str(path)


def _own_state(path: Path, record: dict) -> str:
    made = record.get("files")
    if made is None:
        return UNRECORDED
    now = contents(path, alike=True)
    if set(made) - set(now):
        return MISSING
    return CHANGED if any(now[name]["sha256"] != made[name]["sha256"] for name in made) else ""


def as_json(chain: Chain) -> dict[str, Any]:
    """Return the chain as one object: the asked artefacts, and every artefact's record and inputs with their states."""
    return {
        "asked": [node.shown for node in chain.tops],
        "artefacts": {
            node.shown: node.record
            | {
                "state": node.state or "unchanged",
                "inputs": [
                    entry | {"state": link.state or "unchanged", "recorded": link.node is not None}
                    for entry, link in zip(node.record.get("inputs", []), node.links, strict=True)
                ],
            }
            for node in chain.nodes
        },
    }


def tell(files: list[Path], as_object: bool = False, out: Path | None = None) -> None:
    """Print the chain of files as a tree or as JSON, or write it as a page.

    Args:
        files: Figures, tables, artefacts, or files inside one.
        as_object: JSON instead of the tree.
        out: HTML file to write instead of printing.

    Raises:
        DraftpoolError: If a file belongs to no artefact, or a record in the chain is damaged.
    """
    from draftpool.provenance.tree import page, tree

    chain = Chain(*files)
    text = mask(json.dumps(as_json(chain), indent=2, sort_keys=True) if as_object else tree(chain))
    if out is None:
        print(text)
        return
    with atomic_path(out) as temporary:
        temporary.write_text(page(text), encoding="utf-8")
