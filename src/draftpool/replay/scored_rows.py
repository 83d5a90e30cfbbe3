"""Rows of the acceptance table: drafts at every anchor of one answer, compared with what the target wrote."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from draftpool.decoding.verification import overlap
from draftpool.drafters.base import Everywhere


def rows_of_draft(
    made: Everywhere, answer: list[int], p: Tensor, columns: Tensor, full: list[float] | None
) -> list[dict]:
    """Acceptance of one drafter at every anchor of one answer.

    Args:
        made: Its drafts.
        answer: The target's own ids [n].
        p: The target's probabilities at temperature 1 [n, vocabulary] at every answer token.
        columns: The same of the drafter's own vocabulary [n, draft vocabulary].
        full: BD of all slots at every anchor [n - 1], where the target read the drafts.

    Returns:
        One row per anchor position 0 .. n - 2: position, left, k, drafted, accepted, committed, censored, gamma (1 - TV
        of every slot; without a distribution the next), gamma_hard (probability of the proposed token), reward_bd,
        reward_bd_full, modelled, available, stream.
    """
    device, n, k = p.device, len(answer), made.ids.shape[1]
    # Drafts along a stream were made beside no target.
    proposed, lengths = made.ids.to(device), made.drafted.to(device)
    places = torch.arange(n - 1, device=device)
    # Index of the answer token that slot j of anchor t proposes: t + 1 + j; slots behind the end are left out.
    index = places[:, None] + 1 + torch.arange(k, device=device)
    inside = (index < n) & (torch.arange(k, device=device) < lengths[:, None])
    ids = torch.tensor(answer, device=device)
    agree = (proposed == ids[index.clamp(max=n - 1)]) & inside
    matched = agree.long().cumprod(dim=1).sum(dim=1).tolist()
    hard = torch.zeros(index.shape, device=device)
    hard[inside] = p[index[inside], proposed[inside]]
    gamma = hard
    if made.log_q is not None:
        gamma = torch.zeros(index.shape, device=device)
        gamma[inside] = overlap(made.log_q[inside], columns[index[inside]])
    gamma, hard, drafted = gamma.cpu().numpy(), hard.cpu().numpy(), made.drafted.tolist()
    rows = []
    for place in range(n - 1):
        left, accepted = n - 1 - place, matched[place]
        width = min(drafted[place], left)
        slots = min(accepted + 1, width)
        rows.append(
            {
                "position": place,
                "left": left,
                "k": k,
                "drafted": drafted[place],
                "accepted": accepted,
                "committed": min(accepted + 1, left),
                "censored": accepted == width,
                "gamma": gamma[place, :width],
                "gamma_hard": hard[place, :width],
                "reward_bd": float(gamma[place, :slots].mean()) if slots else float("nan"),
                "reward_bd_full": float("nan") if full is None else full[place],
                "modelled": made.log_q is not None,
                "available": True,
                "stream": "",
            }
        )
    return rows


def rows_without_draft(n: int, k: int) -> list[dict]:
    """Rows of a drafter with too few positions for an answer of n tokens: it drafts nothing and cannot be chosen."""
    nothing = np.zeros(0, dtype=np.float32)
    return [
        {
            "position": place,
            "left": n - 1 - place,
            "k": k,
            "drafted": 0,
            "accepted": 0,
            "committed": 1,
            "censored": True,
            "gamma": nothing,
            "gamma_hard": nothing,
            "reward_bd": float("nan"),
            "reward_bd_full": float("nan"),
            "modelled": True,
            "available": False,
            "stream": "",
        }
        for place in range(n - 1)
    ]
