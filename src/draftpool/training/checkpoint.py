"""Checkpoints of a training run: one safetensors file, replaced atomically, bound to its configuration and code."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

from draftpool.artefacts import atomic_path

FIELDS = ("step", "exp_avg", "exp_avg_sq")


def save_checkpoint(
    path: Path,
    key: str,
    step: int,
    model: nn.Module,
    optimiser: torch.optim.Optimizer,
    log: list[dict],
    order: str,
) -> None:
    """Write parameters, optimiser state, log and position in the data.

    Args:
        path: File to replace.
        key: Digest of the run's configuration, inputs and code.
        step: Steps done.
        model: Its parameters are kept.
        optimiser: AdamW over the same parameters.
        log: Rows of `training.csv` so far.
        order: Running digest of the data order.
    """
    tensors = {}
    for name, parameter in model.named_parameters():
        tensors[f"parameter.{name}"] = parameter.detach().cpu().contiguous()
        for field in FIELDS:
            tensors[f"{field}.{name}"] = optimiser.state[parameter][field].detach().cpu().contiguous()
    metadata = {"key": key, "step": str(step), "log": json.dumps(log), "order": order}
    with atomic_path(path) as temporary:
        save_file(tensors, temporary, metadata)


def load_checkpoint(
    path: Path, key: str, model: nn.Module, optimiser: torch.optim.Optimizer
) -> tuple[int, list[dict], str] | None:
    """Restore a run in place and return (steps done, log rows, order digest).

    Returns None, leaving everything as it was, if there is no checkpoint, it is damaged, or it was made by another
    configuration or other code.
    """
    try:
        with safe_open(path, framework="pt") as stored:
            metadata = stored.metadata()
            if metadata["key"] != key:
                return None
            tensors = {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118 (not a mapping)
            log, step = json.loads(metadata["log"]), int(metadata["step"])
    except Exception:
        # safetensors raises several types on a file cut short; whatever it was, training starts afresh.
        return None
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(tensors[f"parameter.{name}"])
            # AdamW wants its step counter as a float32 tensor beside the moments.
            optimiser.state[parameter] = {
                field: tensors[f"{field}.{name}"].to(parameter.device) for field in FIELDS
            }
    return step, log, metadata["order"]
