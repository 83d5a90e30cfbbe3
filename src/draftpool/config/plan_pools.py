"""Pools of a study: the main one and further ones of the same drafters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from draftpool.data.streams import MAIN
from draftpool.errors import DraftpoolError
from draftpool.selectors.base import PLAIN

if TYPE_CHECKING:
    from draftpool.config.plan import Plan


@dataclass(frozen=True)
class PoolPlan:
    """A pool, its generalist, and where it is replayed.

    Attributes:
        name: `main` for the study's own pool.
        arms: Drafters in the selectors' order, `plain` among them if plain decoding is an arm.
        generalist: The drafter that the others are compared with.
        streams: Names of streams that it is replayed on; None for all.
        selectors: Names of selectors; None for all.
    """

    name: str
    arms: tuple[str, ...]
    generalist: str
    streams: tuple[str, ...] | None = None
    selectors: tuple[str, ...] | None = None

    @property
    def drafters(self) -> list[str]:
        """Arms that draft."""
        return [name for name in self.arms if name != PLAIN]

    def homes(self, plan: Plan) -> dict[str, str]:
        """Domain of every specialist of the pool."""
        return {name: plan.runs[name].home for name in self.drafters if plan.runs[name].home is not None}


def main_pool(plan: Plan) -> PoolPlan:
    """The study's own pool."""
    return PoolPlan(MAIN, tuple(plan.study.pool), plan.study.generalist)


def pools_of(plan: Plan) -> dict[str, PoolPlan]:
    """All pools by name, the main one first (if there is one)."""
    found = {MAIN: main_pool(plan)} if plan.study.pool else {}
    for name, pool in plan.study.pools.items():
        selectors = None if pool.selectors == "all" else tuple(pool.selectors)
        found[name] = PoolPlan(name, tuple(pool.drafters), pool.generalist, tuple(pool.streams), selectors)
    return found


def check_pools(plan: Plan) -> None:
    """Check the names that pools are made of.

    Raises:
        DraftpoolError: If a drafter, stream or selector is not known, or a pool does not hold its generalist.
    """
    replay = plan.study.replay
    if plan.study.pools and (replay is None or not plan.study.pool):
        raise DraftpoolError(
            "further pools are replayed beside the main one",
            "config key `pools`",
            "add `pool` and a `replay` block",
        )
    for name, pool in plan.study.pools.items():
        where = f"config key `pools.{name}`"
        if name == MAIN:
            raise DraftpoolError("this is the study's own pool", where, "choose another name")
        if len(set(pool.drafters)) < len(pool.drafters):
            raise DraftpoolError("a drafter is named twice", f"{where}.drafters", "name each once")
        for drafter in pool.drafters:
            if drafter != PLAIN and drafter not in plan.runs:
                raise DraftpoolError(
                    f"unknown drafter `{drafter}`", where, f"known drafters: {', '.join(plan.runs)}, {PLAIN}"
                )
        if pool.generalist not in pool.drafters or pool.generalist == PLAIN:
            raise DraftpoolError("the generalist is not in the pool", where, f"add `{pool.generalist}`")
        known = {*plan.study.selectors, *replay.selectors}
        for selector in [] if pool.selectors == "all" else pool.selectors:
            if selector not in known:
                raise DraftpoolError(
                    f"unknown selector `{selector}`",
                    f"{where}.selectors",
                    f"known: {', '.join(sorted(known))}",
                )
    for name, stream in plan.study.decode.streams.items():
        if stream.pool is not None and stream.pool not in plan.study.pools:
            raise DraftpoolError(
                f"unknown pool `{stream.pool}`",
                f"config key `decode.streams.{name}.pool`",
                f"known: {', '.join(plan.study.pools) or 'none'}",
            )
    for name, stream in {} if replay is None else replay.streams.items():
        if stream.pool is not None:
            raise DraftpoolError(
                "a replayed stream is named by the pools that play it",
                f"config key `replay.streams.{name}.pool`",
                "name the stream under `pools`",
            )
