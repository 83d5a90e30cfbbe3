"""How many sequences fit into memory, told before work starts."""

from __future__ import annotations

import psutil
import torch

from draftpool.errors import DraftpoolError
from draftpool.targets.base import TargetModel, head_size

# Share of the free memory that may be planned for; the rest is for the allocator and other processes.
USABLE = 0.8


def sequence_bytes(target: TargetModel, length: int, prompt: int) -> int:
    """Memory of one sequence in a batch: keys and values of ``length`` tokens, and reading a prompt at once.

    Args:
        target: The model.
        length: Tokens of prompt and answer.
        prompt: Tokens read at once.
    """
    config = target.hf_config
    cache = 2 * config.num_hidden_layers * config.num_key_value_heads * head_size(config) * length
    # The widest moment of a layer: its input, gate, up and their product; and the taps kept of every token.
    activations = prompt * (
        2 * config.hidden_size + 3 * config.intermediate_size + 2 * len(target.taps) * config.hidden_size
    )
    return target.dtype.itemsize * (cache + activations) + 4 * config.vocab_size


def free_bytes(device: torch.device) -> int:
    """Memory that is free on the device."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return psutil.virtual_memory().available


def check_batch(target: TargetModel, batch: int, length: int, prompt: int, where: str) -> None:
    """Refuse a batch that does not fit.

    Args:
        target: The model.
        batch: Sequences at the same time.
        length: Tokens of the longest prompt with its answer.
        prompt: Tokens of the longest prompt.
        where: Place of the batch size in the configuration.

    Raises:
        DraftpoolError: Naming the largest batch that fits.
    """
    each, free = sequence_bytes(target, length, prompt), free_bytes(target.device)
    fits = int(USABLE * free / each)
    if batch > fits:
        raise DraftpoolError(
            f"{batch} sequences of {length} tokens need {batch * each / 2**30:.1f} GiB, "
            f"{free / 2**30:.1f} GiB are free",
            where,
            f"use at most {fits}" if fits else "use shorter prompts, or a machine with more memory",
        )
