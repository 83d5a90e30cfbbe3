"""Columns of the acceptance table that drafters with a distribution and a full draft everywhere have alike."""

from __future__ import annotations

import pandas as pd


def scored(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows with k tokens drafted at every anchor, along no stream."""
    return rows.assign(drafted=rows["k"], available=True, modelled=True, gamma_hard=rows["gamma"], stream="")
