"""Figures and tables of a study: those whose parts it has."""

from __future__ import annotations

from typing import TYPE_CHECKING

from draftpool import figures, tables
from draftpool.data.streams import MAIN

if TYPE_CHECKING:
    from draftpool.config.plan import Plan


def parts_of(plan: Plan) -> dict[str, bool]:
    """Which parts a study has, as figures and tables name them."""
    replayed = plan.study.replay is not None and bool(plan.pools)
    return {
        "scored": True,
        "pool": bool(plan.study.pool),
        "live": bool(plan.decodes),
        "profile": bool(plan.profiles),
        "replay": replayed,
        # Live streams of which rounds can be compared, and of those the ones that are replayed.
        "live exact": any(plan.pool_of_stream(name) == MAIN for name in plan.exact_streams),
        "replay and live": replayed and any(plan.replayed_live),
        "pool_sizes": replayed and plan.study.replay.pool_sizes is not None,
        "pools": bool(plan.study.pools),
        "sweeps": any(sweep.group != "objective" for sweep in plan.study.sweeps.values()),
    }


def figure_names(plan: Plan) -> list[str]:
    """Figures of the study."""
    parts = parts_of(plan)
    return [name for name, part in figures.FIGURES.items() if parts[part]]


def table_names(plan: Plan) -> list[str]:
    """Tables of the study."""
    parts = parts_of(plan)
    return [name for name, part in tables.TABLES.items() if parts[part]]
