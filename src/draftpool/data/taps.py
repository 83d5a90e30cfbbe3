"""Taps on disk: shards of whole answers, written while a target answers and memory-mapped by who reads them.

A folder holds `taps-00001-of-0000N.safetensors` up to N of N, each with one tensor `taps` [tokens, taps x hidden] in
bfloat16. The rows of an answer (prompt and answer, last token left out) lie together in one shard; where they begin
stands in `responses.parquet`: `taps_shard` (from 1), `prompt_offset` and `response_offset` (rows of that shard).
"""

from __future__ import annotations

import re
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from draftpool.errors import DraftpoolError

# A shard is written when it holds this much, so that neither memory (twice this) nor a file grows with the number of
# answers.
SHARD_BYTES = 2**30
NAME = re.compile(r"taps-(\d{5})-of-(\d{5})\.safetensors")


def _name(shard: int, of: int) -> str:
    return f"taps-{shard:05d}-of-{of:05d}.safetensors"


class TapWriter:
    """Writes answers into shards as they come; one shard at a time is held in memory.

    Args:
        folder: Folder that becomes the artefact.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self._written: list[Path] = []
        self._waiting: list[Tensor] = []
        self._rows = self._bytes = 0

    def add(self, taps: Tensor) -> tuple[int, int]:
        """Take the taps of one answer [tokens, taps x hidden]; returns its shard and the row it begins at.

        The answer that exceeds the size of a shard still belongs to it.
        """
        place = len(self._written) + 1, self._rows
        self._waiting.append(taps)
        self._rows += len(taps)
        self._bytes += taps.numel() * taps.element_size()
        if self._bytes >= SHARD_BYTES:
            self._write()
        return place

    def _write(self) -> None:
        joined, self._waiting = torch.cat(self._waiting), []
        path = self.folder / f"taps-{len(self._written) + 1:05d}.part"
        save_file({"taps": joined}, path)
        self._written.append(path)
        self._rows = self._bytes = 0

    def close(self) -> int:
        """Write what is left and give the shards their names; returns how many there are."""
        if self._waiting:
            self._write()
        for shard, path in enumerate(self._written, start=1):
            path.rename(self.folder / _name(shard, len(self._written)))
        return len(self._written)


class Taps:
    """Taps of a response folder; nothing is read until it is asked for, and then its rows only.

    Raises:
        DraftpoolError: If a shard is missing or damaged.
    """

    def __init__(self, folder: Path):
        found = sorted(path for path in folder.glob("taps-*") if NAME.fullmatch(path.name))
        wanted = int(NAME.fullmatch(found[0].name)[2]) if found else 1
        self.paths = [folder / _name(shard, wanted) for shard in range(1, wanted + 1)]
        # Every header is looked at, so that a file cut short is not met in the midst of a training.
        for path in self.paths:
            self._open(path)

    def _open(self, path: Path):
        try:
            return safe_open(path, framework="pt")
        except Exception as error:
            raise DraftpoolError(
                "damaged taps", str(path), "delete the folder and run snakemake again"
            ) from error

    def rows(self, shard: int, start: int, stop: int) -> Tensor:
        """Rows of a shard [stop - start, taps x hidden] in bfloat16.

        Raises:
            DraftpoolError: If the shard has no such rows.
        """
        if not 1 <= shard <= len(self.paths):
            raise DraftpoolError(
                f"no shard {shard} of taps",
                str(self.paths[0].parent),
                "delete the folder and run snakemake again",
            )
        path = self.paths[shard - 1]
        # Opened for each read: it costs less than a row, and thousands of shards need no thousands of open files.
        with self._open(path) as stored:
            rows = stored.get_slice("taps")[start:stop]
        if len(rows) != stop - start:
            raise DraftpoolError(
                f"no rows {start} to {stop} of taps", str(path), "delete the folder and run snakemake again"
            )
        return rows
