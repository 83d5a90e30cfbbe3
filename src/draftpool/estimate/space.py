"""Bytes and files on disk, and peak memory, of every job."""

from __future__ import annotations

from dataclasses import dataclass

from draftpool.estimate.counts import Work
from draftpool.estimate.machines import ITEM, measured
from draftpool.estimate.world import World

# Python with torch and transformers, before a model is loaded.
PROCESS, LIGHT_PROCESS = 700e6, 250e6
# Of a training: weights, gradients and two moments in float32; a checkpoint holds weights and moments.
TRAINED, CHECKPOINT, FLOAT32 = 16, 12, 4
PACKED = 2
# Activations kept of a slot in a draft layer: inputs, norms, queries, keys, values; three of the feed-forward block.
KEPT_WIDTHS, KEPT_FEED_FORWARD = 10, 3
# Logits that training holds at the same time (training/label_probabilities.py), with their gradient.
LOGITS = 2 * 256 * 2**20
# A shard of taps (data/taps.py, which imports torch).
SHARD_BYTES = 2**30
# Bytes of a scored anchor in lists of Python, before it becomes a table.
SCORED_ROW = 700
# Bytes of a row of the acceptance table in memory.
READ_ROW = 1250
# Bytes of a token's id in Parquet, and of a training log's cell.
TOKEN_ID, LOG_CELL = 4, 20
# Files of an artefact, its log and its benchmark left out.
FILES = {
    "fetch_target": 9,
    "prepare_prompts": 5,
    "prepare_set": 3,
    "generate_responses": 4,
    "train_drafter": 5,
    "fetch_drafter": 4,
    "make_drafter": 4,
    "check_lossless": 1,
    "score_pool": 1,
    "decode_live": 4,
    "profile_decode": 3,
    "profile_costs": 3,
    "train_router": 4,
    "replay_selectors": 9,
    "compute_stats": 40,
    "copy_summary": 1,
    "judge_claims": 4,
    "draw_figure": 3,
    "write_table": 5,
    "trace_provenance": 1,
}


@dataclass(frozen=True)
class Space:
    """What a job takes besides time.

    Attributes:
        disk: Bytes of its artefact.
        scratch: Bytes beside it while it runs or that a restart uses.
        files: Files, log, benchmark and scratch cells among them.
        host, device: Peak memory in bytes.
    """

    disk: float = 0.0
    scratch: float = 0.0
    files: float = 0.0
    host: float = 0.0
    device: float = 0.0


def _disk(work: Work, world: World) -> tuple[float, float]:
    """Bytes of the artefact and of its scratch."""
    counts, unit, shape = work.counts, measured()["bytes"], world.shape
    width = world.n_taps * shape.hidden
    if work.stage == "fetch_target":
        return counts["weights"] * shape.stored_bytes, 0.0
    if work.stage in ("prepare_prompts", "prepare_set"):
        return counts["prompts"] * unit["prepare_prompts/prompt"], 0.0
    if work.stage == "generate_responses":
        tokens = counts["kept_tokens"]
        return tokens * (width * ITEM["bfloat16"] + TOKEN_ID), 0.0
    if work.stage == "train_drafter":
        log = counts["steps"] * (7 + 2 * counts["logged_slots"]) * LOG_CELL
        ids = 8 * counts["draft_vocab"]
        return FLOAT32 * counts["weights"] + ids + log, CHECKPOINT * counts["weights"] + log
    if work.stage == "fetch_drafter":
        return FLOAT32 * counts["weights"], 0.0
    if work.stage == "make_drafter":
        return 5000 + 8 * counts["tokens"], 0.0
    if work.stage == "score_pool":
        size = (counts["rows"] + counts["slots"]) * unit["score_pool/value"]
        return size, size
    if work.stage == "decode_live":
        # Scratch cells are JSON, seven times as large as their tables in the measured study.
        return counts["calls"] * unit["decode_live/call"], 7 * counts["calls"] * unit["decode_live/call"]
    if work.stage == "profile_decode":
        return counts["calls"] * unit["profile_decode/call"], 0.0
    if work.stage == "train_router":
        return counts["prompts"] * unit["train_router/prompt"], 0.0
    if work.stage == "replay_selectors":
        return counts["rows"] * unit["replay_selectors/row"], 0.0
    if work.stage == "compute_stats":
        return unit["study"], 0.0
    return unit.get(f"{work.stage}/job", 0.0), 0.0


def _files(work: Work) -> float:
    files = FILES[work.stage] * work.counts.get("jobs", 1)
    if work.stage == "profile_decode":
        files += work.counts["methods"]
    if work.stage == "decode_live":
        files += work.counts["queries"]
    if work.stage == "score_pool":
        files += work.counts["cells"]
    # A log and a benchmark of every job.
    return files + 2 * work.counts.get("jobs", 1)


def _decoding_memory(work: Work, world: World, on_gpu: bool) -> float:
    """Target, drafters with their heads, and the cache of one sequence."""
    shape, counts, item = world.shape, work.counts, ITEM.get(work.detail, FLOAT32)
    # On a CPU in float32 the products keep packed copies of the weights (targets/linear.py).
    copies = 1 if on_gpu or item != FLOAT32 else PACKED
    weights = copies * item * (shape.parameters + counts.get("drafter_weights", 0.0))
    if work.stage == "check_lossless":
        weights += ITEM["bfloat16"] * shape.parameters
    return weights + counts["longest"] * shape.cache_values * item


def _memory(work: Work, world: World, on_gpu: bool) -> tuple[float, float]:
    """Peak memory of the host and of the device."""
    counts, shape = work.counts, world.shape
    width = world.n_taps * shape.hidden
    logits = FLOAT32 * shape.vocabulary
    if work.stage == "fetch_target":
        return LIGHT_PROCESS + counts["weights"] * shape.stored_bytes, 0.0
    if work.stage == "generate_responses":
        item, read = ITEM[work.detail], counts["longest_prompt"]
        # As targets/memory.py counts a sequence.
        each = item * (counts["longest"] * shape.cache_values)
        each += item * read * (2 * shape.hidden + 3 * shape.intermediate + 2 * width) + logits
        # Taps of the answers at work, and of ended ones the shard that is being filled, twice when it is joined.
        taps = counts["batch"] * counts["longest"] * width * ITEM["bfloat16"]
        taps += 2 * min(SHARD_BYTES, counts["kept_tokens"] * width * ITEM["bfloat16"])
        copies = 1 if on_gpu or item != FLOAT32 else PACKED
        return PROCESS + taps, copies * item * shape.parameters + counts["batch"] * each
    if work.stage == "train_drafter":
        frozen = FLOAT32 * 2 * shape.embedding
        kept = counts["slots"] + counts["batch"] * counts["longest"]
        layer = KEPT_WIDTHS * shape.hidden + KEPT_FEED_FORWARD * shape.intermediate
        activations = kept * max(1, counts["layers"]) * layer * (2 if on_gpu else 4)
        batch = counts["batch"] * counts["longest"] * width * FLOAT32
        return PROCESS + batch + frozen, TRAINED * counts["weights"] + frozen + activations + batch + LOGITS
    if work.stage == "score_pool":
        rows = counts["largest_rows"] * SCORED_ROW
        # Logits, probabilities and their columns of one answer.
        return PROCESS + rows, _decoding_memory(work, world, on_gpu) + 4 * counts["length"] * logits
    if work.stage == "prepare_set" and work.detail == "":
        return PROCESS, 0.0
    if work.stage in ("decode_live", "check_lossless", "profile_decode", "profile_costs", "prepare_set"):
        return PROCESS, _decoding_memory(work, world, on_gpu)
    return LIGHT_PROCESS + counts.get("acceptance_rows", 0.0) * READ_ROW, 0.0


def space_of(work: Work, world: World, on_gpu: bool) -> Space:
    """Disk, files and memory of a job; without a GPU the device's memory is the host's."""
    disk, scratch = _disk(work, world)
    host, device = _memory(work, world, on_gpu)
    if not on_gpu:
        host, device = host + device, 0.0
    return Space(disk, scratch, _files(work), host, device)
