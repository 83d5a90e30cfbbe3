"""Random numbers keyed by what they are for, never by how many were drawn before.

Every draw is a pure function of its key (purpose, seed, repeat, prompt id, round, ...), so that one and a
thousand episodes, a resumed and an uninterrupted run see the same numbers.
"""

from __future__ import annotations

import hashlib

import numpy as np


def generator(*key: str | int) -> np.random.Generator:
    """Return a counter-based generator (Philox) whose state is the SHA-256 of the key."""
    text = "\x1f".join(f"{type(part).__name__}:{part}" for part in key)
    digest = hashlib.sha256(text.encode("utf-8")).digest()
    return np.random.Generator(np.random.Philox(key=np.frombuffer(digest[:16], dtype=np.uint64)))


def uniform(size: int | tuple[int, ...], *key: str | int) -> np.ndarray:
    """Return float64 uniforms in the open interval (0, 1) for ``key``; shape ``size``."""
    draws = generator(*key).random(size)
    return np.clip(draws, np.finfo(np.float64).tiny, 1.0 - np.finfo(np.float64).epsneg)


def seed_of(*key: str | int) -> int:
    """Return a 63-bit seed for libraries that want an integer."""
    return int(generator(*key).integers(0, 2**63 - 1))
