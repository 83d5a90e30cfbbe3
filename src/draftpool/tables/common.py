"""What several tables share: the note under them, and domains with their number of prompts."""

from __future__ import annotations

import pandas as pd


def note(meta: dict, rest: str = "") -> str:
    """Say what brackets are."""
    return f"Brackets: {meta['confidence'] * 100:.0f} % bootstrap intervals over prompts. {rest}".strip()


def with_counts(rows: pd.DataFrame, scopes: list[str], column: str = "scope") -> dict[str, str]:
    """Column heads such as ``code (n = 24)``, n being the most prompts that any row has there."""
    largest = rows.groupby(column)["n"].max()
    return {scope: f"{scope} (n = {int(largest[scope])})" for scope in scopes if scope in largest}
