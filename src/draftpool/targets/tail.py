"""The target behind its deepest tap: from stored taps to its own distribution, without running the layers before.

Taps are kept in bfloat16, so the distribution is that of the target up to their rounding.
"""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from draftpool.errors import DraftpoolError
from draftpool.targets.base import check_taps
from draftpool.targets.fast import FastTarget, unsupported_reason
from draftpool.targets.load import load_weights
from draftpool.targets.weights import read_config


class TargetTail:
    """Layers behind the deepest tap, final norm and head.

    Args:
        model: The target's last layers.
    """

    def __init__(self, model: FastTarget):
        self.model, self.head = model, model.head_weight

    @torch.no_grad()
    def hidden_at(self, taps: Tensor, positions: Tensor, n_slots: int) -> Tensor:
        """The target's hidden states that predict the tokens of the slots, behind its final norm.

        Args:
            taps: Of all tokens but the last [batch, length, taps x hidden].
            positions: Places of the anchors [batch, anchors]; slot j is predicted at place anchor + j - 1.
            n_slots: K.

        Returns:
            [batch, anchors, K, hidden]; what lies behind a sequence's end is arbitrary.
        """
        width = self.head.shape[1]
        x = taps[..., -width:].to(self.model.dtype)
        made = self.model.hidden_behind(x)
        places = positions[..., None] + torch.arange(n_slots, device=positions.device)
        rows = torch.arange(len(taps), device=taps.device)[:, None, None]
        return F.rms_norm(
            made[rows, places.clamp(max=taps.shape[1] - 1)], (width,), self.model.norm, self.model.eps
        )


def load_tail(target: Path, taps: list[int] | None, device: torch.device) -> TargetTail:
    """Load what lies behind the deepest tap.

    Raises:
        DraftpoolError: If the target is not on the fast path.
    """
    config = read_config(target)
    reason = unsupported_reason(config)
    if reason is not None:
        raise DraftpoolError(
            f"the objective reads the target's distribution, which needs the fast path ({reason})",
            "config key `objective`",
            "use an objective of labels, for example cross_entropy",
        )
    deepest = check_taps(taps, config.num_hidden_layers)[-1]
    weights = load_weights(target, torch.float32)
    weights.device = device
    return TargetTail(FastTarget(config, weights, [deepest], first=deepest + 1))
