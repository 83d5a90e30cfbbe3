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


def selector_key(seed: int, repeat: int, prompt_id: str) -> tuple[str | int, ...]:
    """Key of a selector's draws in one answer, live and in replay."""
    return ("selector", seed, repeat, prompt_id)


class RoundDraws:
    """Uniforms of one episode: row t of `width` numbers depends on the key, the width and t alone.

    Rounds are drawn in blocks, since making a generator costs more than its numbers.
    """

    BLOCK = 64

    def __init__(self, width: int, *key: str | int) -> None:
        self.width, self.key = width, key
        self._block, self._number = np.empty((0, width)), -1

    def block(self, number: int) -> np.ndarray:
        """Rows ``number * BLOCK`` to ``(number + 1) * BLOCK`` [BLOCK, width]."""
        return uniform((self.BLOCK, self.width), *self.key, number)

    def row(self, t: int) -> np.ndarray:
        """Row t [1, width]."""
        number, place = divmod(t, self.BLOCK)
        if number != self._number:
            self._block, self._number = self.block(number), number
        return self._block[place : place + 1]


def seed_of(*key: str | int) -> int:
    """Return a 63-bit seed for libraries that want an integer."""
    return int(generator(*key).integers(0, 2**63 - 1))
