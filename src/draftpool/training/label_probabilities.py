"""Log-probabilities of the labels without ever holding all logits."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

# Largest tensor of logits: more rows are done in turns, whose logits are computed again for the gradient.
LOGITS_BYTES = 256 * 2**20


def _log_q(hidden: Tensor, head: Tensor, labels: Tensor) -> Tensor:
    return -F.cross_entropy(F.linear(hidden, head).float(), labels, reduction="none")


def label_log_probabilities(
    hidden: Tensor, head: Tensor, labels: Tensor, max_bytes: int = LOGITS_BYTES
) -> Tensor:
    """Log-probability of every label under softmax(hidden head^T), in float32.

    Args:
        hidden: [..., hidden].
        head: [vocabulary, hidden].
        labels: Columns [...].
        max_bytes: Largest float32 tensor of logits.

    Returns:
        float32 [...]
    """
    flat, wanted = hidden.flatten(0, -2), labels.flatten()
    rows = max(1, max_bytes // (4 * head.shape[0]))
    if len(flat) <= rows:
        return _log_q(flat, head, wanted).view(labels.shape)
    parts = [
        checkpoint(_log_q, part, head, own, use_reentrant=False)
        for part, own in zip(flat.split(rows), wanted.split(rows), strict=True)
    ]
    return torch.cat(parts).view(labels.shape)
