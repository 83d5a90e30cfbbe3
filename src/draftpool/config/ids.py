"""Artefact ids: a readable slug and 12 hex digits over the fields that change the result."""

from __future__ import annotations

import hashlib
import re

from draftpool.artefacts import canonical_json

ID_PATTERN = r"[a-z0-9][a-z0-9._-]*-[0-9a-f]{12}"


def make_key(value: object) -> str:
    """Return 12 hex digits over the canonical JSON of ``value``."""
    return hashlib.sha256(canonical_json(value).encode()).hexdigest()[:12]


def make_id(slug: str, fields: dict) -> str:
    """Return ``<slug>-<12 hex>``, hashed over the canonical JSON of ``fields`` (upstream ids included)."""
    readable = re.sub(r"[^a-z0-9._-]+", "-", slug.lower()).strip("-._") or "x"
    return f"{readable[:48]}-{make_key(fields)}"
