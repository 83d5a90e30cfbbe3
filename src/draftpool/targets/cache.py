"""All cache surgery: writing, rolling back and reordering keys and values."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from draftpool.errors import DraftpoolError


def _check_room(lengths: list[int], count: int, max_length: int) -> None:
    longest = max(lengths) + count
    if longest > max_length:
        raise DraftpoolError(
            f"sequence of {longest} tokens is longer than the cache of {max_length}",
            "key/value cache",
            "lower max_new_tokens or max_prompt_tokens",
        )


class KeyValueCache:
    """Preallocated keys and values of all layers, with a length per sequence; rolling back costs nothing.

    Args:
        n_layers: Decoder layers.
        batch: Sequences.
        n_kv_heads: Key/value heads.
        max_length: Tokens a sequence may have.
        head_dim: Size of a head.
    """

    def __init__(
        self, n_layers: int, batch: int, n_kv_heads: int, max_length: int, head_dim: int, device, dtype
    ):
        shape = (n_layers, batch, n_kv_heads, max_length, head_dim)
        self.keys = torch.zeros(shape, device=device, dtype=dtype)
        self.values = torch.zeros(shape, device=device, dtype=dtype)
        self.lengths = [0] * batch
        self.max_length = max_length

    @property
    def batch(self) -> int:
        """Number of sequences."""
        return len(self.lengths)

    def reserve(self, count: int) -> None:
        """Check that ``count`` more tokens fit into every sequence.

        Raises:
            DraftpoolError: If they do not.
        """
        _check_room(self.lengths, count, self.max_length)

    def write(self, layer: int, keys: Tensor, values: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Store new keys and values and return views up to the longest sequence.

        Args:
            layer: Layer index.
            keys: [batch, kv heads, n, head_dim].
            values: As ``keys``.
            positions: [batch, n] place of every new token.
        """
        n = keys.shape[2]
        end = max(self.lengths) + n
        if self.batch == 1:
            start = self.lengths[0]
            self.keys[layer, :, :, start : start + n] = keys
            self.values[layer, :, :, start : start + n] = values
        else:
            index = positions[:, None, :, None].expand_as(keys)
            self.keys[layer].scatter_(2, index, keys)
            self.values[layer].scatter_(2, index, values)
        return self.keys[layer, :, :, :end], self.values[layer, :, :, :end]

    def advance(self, counts: list[int]) -> None:
        """Make ``counts[i]`` new tokens of sequence i part of it; the rest of what was written is ignored."""
        self.lengths = [length + count for length, count in zip(self.lengths, counts, strict=True)]

    def rollback(self, count: int) -> None:
        """Forget the last ``count`` tokens of every sequence.

        Raises:
            DraftpoolError: If ``count`` is negative or more than there are.
        """
        if count < 0 or count > min(self.lengths):
            raise DraftpoolError(
                f"cannot remove {count} of {min(self.lengths)} tokens",
                "key/value cache",
                "this is a bug: please report it",
            )
        self.lengths = [length - count for length in self.lengths]

    def place(self, rows: list[int], other: KeyValueCache) -> None:
        """Put the sequences of another cache into the given rows, whatever was there."""
        length = max(other.lengths)
        index = torch.tensor(rows, device=self.keys.device)
        self.keys[:, :, :, :length].index_copy_(1, index, other.keys[:, :, :, :length])
        self.values[:, :, :, :length].index_copy_(1, index, other.values[:, :, :, :length])
        for row, count in zip(rows, other.lengths, strict=True):
            self.lengths[row] = count

    def keep(self, rows: list[int]) -> None:
        """Keep only the given sequences (in this order)."""
        index = torch.tensor(rows, device=self.keys.device)
        self.keys = self.keys.index_select(1, index)
        self.values = self.values.index_select(1, index)
        self.lengths = [self.lengths[row] for row in rows]


class TransformersCache:
    """The same handle over a cache of transformers (one sequence)."""

    def __init__(self, cache: Any, max_length: int):
        self.cache = cache
        self.max_length = max_length
        self.lengths = [0]

    def reserve(self, count: int) -> None:
        """Check that ``count`` more tokens fit.

        Raises:
            DraftpoolError: If they do not.
        """
        _check_room(self.lengths, count, self.max_length)

    def rollback(self, count: int) -> None:
        """Forget the last ``count`` tokens.

        Raises:
            DraftpoolError: If ``count`` is negative or more than there are.
        """
        if count < 0 or count > self.lengths[0]:
            raise DraftpoolError(
                f"cannot remove {count} of {self.lengths[0]} tokens",
                "key/value cache",
                "this is a bug: please report it",
            )
        if count:
            # transformers 5.24 takes the number of tokens to remove, as a negative count.
            self.cache.crop(-count)
        self.lengths = [self.lengths[0] - count]
