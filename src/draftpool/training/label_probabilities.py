"""Log-probabilities of the labels without ever holding all logits."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from draftpool.targets.tail import TargetTail
from draftpool.training.objectives.base import Objective

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


def slot_divergences(
    objective: Objective, hidden: Tensor, head: Tensor, wanted: Tensor, tail: TargetTail, vocabulary: Tensor
) -> Tensor:
    """Divergence of drafter and target at every slot, float32 [...], without ever holding all distributions.

    Args:
        objective: Reads the target.
        hidden: Of the drafter [..., hidden].
        head: Of the drafter [draft vocabulary, hidden].
        wanted: The target's hidden states behind its final norm, at the same slots [..., hidden].
        tail: Gives the target's head.
        vocabulary: Ids of the drafter's columns [draft vocabulary].
    """
    own = tail.head[vocabulary]

    def part(mine: Tensor, theirs: Tensor) -> Tensor:
        with torch.no_grad():
            logits = F.linear(theirs, own).float()
            if objective.whole_target and len(own) < len(tail.head):
                # Probabilities among all tokens: what the drafter cannot propose counts against it.
                p = (logits - F.linear(theirs, tail.head).float().logsumexp(dim=-1, keepdim=True)).exp()
            else:
                p = logits.softmax(dim=-1)
        return objective.divergence(F.linear(mine, head).float().log_softmax(dim=-1), p)

    flat, others = hidden.flatten(0, -2), wanted.flatten(0, -2)
    rows = max(1, LOGITS_BYTES // (4 * len(tail.head)))
    parts = [
        checkpoint(part, mine, theirs, use_reentrant=False)
        for mine, theirs in zip(flat.split(rows), others.split(rows), strict=True)
    ]
    return torch.cat(parts).view(hidden.shape[:-1])
