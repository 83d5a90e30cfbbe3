"""Near duplicates of held-out prompts, by word Jaccard."""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np

WORD = re.compile(r"\w+")


def words(text: str) -> set[str]:
    """Return the set of lower-case words of a text."""
    return set(WORD.findall(text.lower()))


def near_duplicates(texts: Sequence[str], held_out: Sequence[str], threshold: float) -> np.ndarray:
    """Tell which texts resemble a held-out one.

    Jaccard of two texts = shared words / words of either; two texts without words are not alike.

    Args:
        texts: [n] candidates.
        held_out: [m] texts compared with.
        threshold: A text is a near duplicate if its largest Jaccard exceeds this.

    Returns:
        bool [n].
    """
    rows = [words(text) for text in held_out]
    index = {word: i for i, word in enumerate(sorted(set().union(*rows)))}
    contains = np.zeros((len(index), len(rows)), dtype=np.int32)
    for column, row in enumerate(rows):
        contains[[index[word] for word in row], column] = 1
    sizes = np.array([len(row) for row in rows], dtype=np.int64)
    flags = np.zeros(len(texts), dtype=bool)
    for i, text in enumerate(texts):
        own = words(text)
        known = [index[word] for word in own if word in index]
        if known:
            shared = contains[known].sum(axis=0)
            flags[i] = bool((shared > threshold * (len(own) + sizes - shared)).any())
    return flags
