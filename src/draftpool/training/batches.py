"""Training batches of a block drafter: which sequences, which anchors, which slots are supervised."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from draftpool import draws
from draftpool.artefacts import read_table
from draftpool.data.taps import Taps
from draftpool.drafters.block import context_bias
from draftpool.errors import DraftpoolError


class ResponseSet:
    """Answers of several domains with their taps, which stay on disk (memory-mapped) until they are used.

    Args:
        folders: Response folders (`responses.parquet` and shards of taps).
        prompts_per_domain: Prompts taken of each folder, in the order of the table; None for all.

    Raises:
        DraftpoolError: If a folder is damaged or holds no answer of at least two tokens.
    """

    def __init__(self, folders: list[Path], prompts_per_domain: int | None):
        frames = []
        for number, folder in enumerate(folders):
            frame = read_table(folder / "responses.parquet").head(prompts_per_domain)
            frames.append(frame.assign(folder=number))
        self.taps = [Taps(folder) for folder in folders]
        rows = pd.concat(frames, ignore_index=True)
        # An answer of one token has no anchor with a token after it.
        self.rows = rows[rows.response_ids.map(len) >= 2].reset_index(drop=True)
        if self.rows.empty:
            raise DraftpoolError(
                "no answer of at least two tokens", str(folders[0]), "raise responses.max_new_tokens"
            )

    def __len__(self) -> int:
        return len(self.rows)

    def answers(self) -> list[list[int]]:
        """Token ids of all answers."""
        return [list(ids) for ids in self.rows.response_ids]

    def lengths(self, indices: list[int]) -> list[int]:
        """Tokens of prompt and answer of some sequences."""
        rows = self.rows.iloc[indices]
        return [len(row.prompt_ids) + len(row.response_ids) for row in rows.itertuples()]

    def context(self, index: int) -> Tensor:
        """Taps of a sequence's prompt and answer without its last token, [length, taps x hidden] in bfloat16."""
        row = self.rows.iloc[index]
        start = int(row.prompt_offset)
        stop = int(row.response_offset) + len(row.response_ids) - 1
        return self.taps[row.folder].rows(int(row.taps_shard), start, stop)


@dataclass(frozen=True)
class Batch:
    """Blocks of the sequences of a step, or of a part of them; padding anchors have no supervised slot.

    Attributes:
        taps: [sequences, length, taps x hidden] float32, of all tokens but the last.
        tokens: [sequences, length + 1], zeros behind a sequence's end.
        anchors: Anchor token ids [sequences, anchors].
        positions: Places of the anchors [sequences, anchors].
        bias: [sequences, anchors, length], 0 before the anchor, -inf from it on.
        labels: Columns of the draft vocabulary [sequences, anchors, B - 1], 0 where unsupervised.
        mask: Supervised slots [sequences, anchors, B - 1].
        order_hash: Digest of which anchors of which prompts the whole step has.
    """

    taps: Tensor
    tokens: Tensor
    anchors: Tensor
    positions: Tensor
    bias: Tensor
    labels: Tensor
    mask: Tensor
    order_hash: str


def block_labels(
    answer: np.ndarray, places: np.ndarray, slots: int, columns: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Labels and mask of blocks inside one answer.

    A slot is supervised if its token lies inside the answer and all block tokens up to it are in the draft
    vocabulary: behind a token that cannot be proposed no slot is ever reached.

    Args:
        answer: Token ids [n].
        places: Anchor indices in the answer [anchors].
        slots: B - 1.
        columns: Column of every token id in the draft vocabulary, -1 if it has none.

    Returns:
        Labels [anchors, slots] (0 where unsupervised) and mask [anchors, slots].
    """
    index = places[:, None] + 1 + np.arange(slots)
    inside = index < len(answer)
    found = columns[answer[np.minimum(index, len(answer) - 1)]]
    mask = np.logical_and.accumulate(inside & (found >= 0), axis=1)
    return np.where(mask, found, 0), mask


@lru_cache(maxsize=4)
def sequence_order(n_sequences: int, seed: int, epoch: int) -> np.ndarray:
    """Permutation of the sequences in one epoch; depends on (seed, epoch) only."""
    order = draws.generator("sequence_order", seed, epoch).permutation(n_sequences)
    order.flags.writeable = False
    return order


def step_rows(responses: ResponseSet, step: int, seed: int, batch_sequences: int) -> list[int]:
    """The sequences of a step, as rows of the answers; every one is met once an epoch."""
    places = range(step * batch_sequences, (step + 1) * batch_sequences)
    met = [divmod(place, len(responses)) for place in places]
    return [int(sequence_order(len(responses), seed, epoch)[offset]) for epoch, offset in met]


def parts_of(lengths: list[int], processes: int, accumulate: int, process: int) -> list[list[int]]:
    """Micro-batches of one process: places in a step of its share of the sequences.

    Every sequence is in one part of one process. Shares differ by one sequence at most, as do the parts of a share; a
    part is empty where there are fewer sequences than parts. Processes get sequences of all lengths, so that none waits
    for another, and micro-batches those of similar length, which need little padding.

    Args:
        lengths: Tokens of every sequence of the step.
        processes: How many share it.
        accumulate: Parts of each share.
        process: Number of the process.
    """
    by_length = sorted(range(len(lengths)), key=lambda place: (lengths[place], place))
    share = by_length[process::processes]
    size, more = divmod(len(share), accumulate)
    ends = [size * part + min(part, more) for part in range(accumulate + 1)]
    return [sorted(share[start:stop]) for start, stop in zip(ends[:-1], ends[1:], strict=True)]


@dataclass(frozen=True)
class _Drawn:
    """The sequences of a step, the places of their anchors in the answers, and a digest of both."""

    rows: list[int]
    places: list[np.ndarray]
    order_hash: str


def _draw(
    responses: ResponseSet, step: int, seed: int, batch_sequences: int, anchors_per_sequence: int
) -> _Drawn:
    digest, places = hashlib.sha256(), []
    rows = step_rows(responses, step, seed, batch_sequences)
    for number, row in enumerate(rows):
        anchored = len(responses.rows.response_ids.iloc[row]) - 1
        wanted = min(anchors_per_sequence, anchored)
        generator = draws.generator("anchors", seed, step, number)
        places.append(np.sort(generator.choice(anchored, size=wanted, replace=False)))
        digest.update(f"{responses.rows.prompt_id.iloc[row]}:{places[-1].tolist()};".encode())
    return _Drawn(rows, places, digest.hexdigest()[:16])


def make_batch(
    responses: ResponseSet,
    step: int,
    seed: int,
    batch_sequences: int,
    anchors_per_sequence: int,
    block_size: int,
    columns: np.ndarray,
    part: Sequence[int] | None = None,
) -> Batch:
    """Return the batch of one step; a pure function of its arguments, so that a resumed run sees the same data.

    Args:
        responses: The answers.
        step: Number of the step.
        seed: Of the training.
        batch_sequences: Sequences of the whole step.
        anchors_per_sequence: Anchors drawn of each (at most all).
        block_size: B.
        columns: Column of every token id in the draft vocabulary, -1 if it has none.
        part: Places in the step of the sequences that are wanted (at least one); None for all. Only their taps are
            read, and they have the anchors that they have in the whole step.
    """
    drawn = _draw(responses, step, seed, batch_sequences, anchors_per_sequence)
    part = range(batch_sequences) if part is None else part
    chosen = [drawn.rows[place] for place in part]
    rows = responses.rows.iloc[chosen]
    contexts = [responses.context(index) for index in chosen]
    length = max(context.shape[0] for context in contexts)
    slots = block_size - 1
    taps = torch.zeros(len(chosen), length, contexts[0].shape[1])
    tokens = torch.zeros(len(chosen), length + 1, dtype=torch.long)
    shape = (len(chosen), anchors_per_sequence)
    anchors, positions = np.zeros(shape, dtype=np.int64), np.zeros(shape, dtype=np.int64)
    labels = np.zeros((*shape, slots), dtype=np.int64)
    mask = np.zeros((*shape, slots), dtype=bool)
    for number, (place, row) in enumerate(zip(part, rows.itertuples(), strict=True)):
        answer, places = np.asarray(row.response_ids), drawn.places[place]
        wanted = len(places)
        taps[number, : contexts[number].shape[0]] = contexts[number]
        text = [*row.prompt_ids, *answer]
        tokens[number, : len(text)] = torch.tensor(text)
        anchors[number, :wanted] = answer[places]
        # Padding anchors stand at the end, where they see a whole context and no softmax is empty.
        positions[number] = contexts[number].shape[0]
        positions[number, :wanted] = len(row.prompt_ids) + places
        labels[number, :wanted], mask[number, :wanted] = block_labels(answer, places, slots, columns)
    tensors = [torch.from_numpy(array) for array in (anchors, positions, labels, mask)]
    bias = context_bias(tensors[1], length)
    return Batch(taps, tokens, tensors[0], tensors[1], bias, tensors[2], tensors[3], drawn.order_hash)
