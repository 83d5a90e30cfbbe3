"""Seconds of the parts of a round, as the frozen `profile_costs` artefact holds them for the arms of a pool."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from draftpool.artefacts import read_json
from draftpool.errors import DraftpoolError
from draftpool.selectors.base import PLAIN, Bools, Floats, Ints


@dataclass(frozen=True)
class CostModel:
    """Seconds of the parts of a round for the arms of a pool (see :func:`draftpool.decoding.costs.profile_costs`).

    Attributes:
        arms: Names, `plain` for plain decoding.
        verify: float[N], the target reads the arm's longest block.
        widths: float[K + 2], the target reads so many tokens; NaN where that was not measured (and never happens).
        draft: float[N], 0 for plain decoding.
        catch_up: float[N, 2], seconds of a catch-up and of each token in it.
        evaluate: All drafters at one anchor.
        evaluate_catch_up: float[2], the same for drafters that are evaluated together.
        alone: bool[N], arms that an evaluation reads and drafts with one by one.
        ahead: bool[N], arms that keep what they read while drafting, if it came true.
        drafted: float[N], mean tokens of a draft.
        positions: int[N], longest sequence that each arm can draft to its end.
        select: Seconds of selection per round, by what a selector needs (`bandit`, `full`).
    """

    arms: tuple[str, ...]
    verify: Floats
    widths: Floats
    draft: Floats
    catch_up: Floats
    evaluate: float
    evaluate_catch_up: Floats
    alone: Bools
    ahead: Bools
    drafted: Floats
    positions: Ints
    select: Mapping[str, float]

    @property
    def rounds(self) -> Floats:
        """Seconds of a plain round with each arm [N]: draft, verify a draft of mean length, and catch up with one mean
        commitment (which drafters that read ahead know already).
        """
        measured = np.flatnonzero(np.isfinite(self.widths))
        verify = np.interp(self.drafted + 1, measured, self.widths[measured])
        reading = self.catch_up @ np.array([1.0, 2.0])
        return verify + self.draft + np.where(self.ahead, 0.0, reading)


def load_costs(folder: Path, arms: tuple[str, ...], k: Ints) -> CostModel:
    """Read `costs.json` for the arms of a pool.

    Raises:
        DraftpoolError: If a drafter or a block width was not measured.
    """
    raw: dict[str, Any] = read_json(folder / "costs.json")
    try:
        verify = np.array([raw["verify"][str(int(length) + 1)] for length in k])
        draft = np.array([0.0 if arm == PLAIN else raw["draft"][arm] for arm in arms])
        lines = [{"fixed": 0.0, "per_token": 0.0} if arm == PLAIN else raw["catch_up"][arm] for arm in arms]
    except KeyError as error:
        raise DraftpoolError(
            f"{error} was not measured", str(folder), "run profile_costs for this pool again"
        ) from None
    widths = np.full(int(k.max()) + 2, np.nan)
    for width, seconds in raw["verify"].items():
        if int(width) < len(widths):
            widths[int(width)] = seconds
    both = raw["evaluate_catch_up"] or {"fixed": 0.0, "per_token": 0.0}
    return CostModel(
        tuple(arms),
        verify,
        widths,
        draft,
        np.array([[line["fixed"], line["per_token"]] for line in lines]),
        float(raw["evaluate"]),
        np.array([both["fixed"], both["per_token"]]),
        np.array([arm in raw["alone"] for arm in arms]),
        np.array([arm in raw["ahead"] for arm in arms]),
        np.array([0.0 if arm == PLAIN else raw["drafted"][arm] for arm in arms]),
        np.array([_bound(raw["positions"], arm) for arm in arms]),
        raw["select"],
    )


def _bound(positions: Mapping[str, int | None], arm: str) -> int:
    longest = None if arm == PLAIN else positions[arm]
    return np.iinfo(np.int64).max if longest is None else longest
