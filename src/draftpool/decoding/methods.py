"""Methods of live decoding: plain decoding, every drafter alone, every selector at every seed, and what they read."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from draftpool.config.digest import code_digest
from draftpool.config.ids import make_key
from draftpool.decoding.cost_model import load_costs
from draftpool.drafters.kinds import modules_of
from draftpool.errors import DraftpoolError
from draftpool.registry import find_registered
from draftpool.replay.routes import load_routes
from draftpool.selectors.base import (
    DECORATOR,
    PACKAGE,
    PLAIN,
    Context,
    Selector,
    arms_of,
    make_selector,
)


@dataclass(frozen=True)
class Method:
    """A selector at one seed over its arms.

    Attributes:
        name: Of the selector.
        cfg: Kind and parameters.
        arms: Names of its arms, in order.
        seed: Of its draws.
        costs: Modelled seconds of a round with each arm, if it weighs them.
        routes: Its arm by prompt or session, if it is a router.
        kinds: Kinds of the drafters among its arms.
    """

    name: str
    cfg: dict
    arms: list[str]
    seed: int
    costs: tuple[float, ...] | None = None
    routes: tuple[tuple[str, int], ...] | None = None
    kinds: tuple[str, ...] = ()

    @cached_property
    def key(self) -> str:
        """Names this method's cells: its configuration, what it reads and the code it runs."""
        module = find_registered(PACKAGE, DECORATOR, self.cfg["kind"])
        code = code_digest("draftpool.decoding.live", module, *modules_of(self.kinds))
        return make_key([self.name, self.cfg, self.arms, self.seed, self.costs, self.routes, code])

    @cached_property
    def carries(self) -> bool:
        """Whether what it learnt passes from one query to the next."""
        return self.selector().carries

    def selector(self) -> Selector:
        """A new selector."""
        return make_selector(self.cfg, self.arms)

    def context(self, query: str) -> Context:
        """What the selector may know in one query (a prompt or session).

        Raises:
            DraftpoolError: If a router has no route for it.
        """
        costs = None if self.costs is None else np.array(self.costs)
        if self.routes is None:
            return Context(costs)
        routes = dict(self.routes)
        if query not in routes:
            raise DraftpoolError("a prompt has no route", query, "run train_router again")
        return Context(costs, {self.cfg["features"]: np.array([routes[query]])})


def methods_of(
    cfg: dict,
    lengths: dict[str, int],
    queries: list[str],
    costs: Path | None = None,
    routes: Path | None = None,
) -> list[Method]:
    """Plain decoding, every drafter alone, and every selector at every seed.

    Args:
        cfg: `drafters`, `pool`, `selectors`, `selector_seeds`; with routers `homes` and `generalist`.
        lengths: Tokens that each drafter drafts.
        queries: Prompts and sessions of the stream: routes of others are no part of a router's key.
        costs: Folder of profile_costs, if a selector weighs costs.
        routes: Folder of train_router, if there are routers.

    Raises:
        DraftpoolError: If a drafter was not measured.
    """
    kind_of_arm = {drafter["name"]: drafter["kind"] for drafter in cfg["drafters"]}
    methods = [Method(PLAIN, {"kind": "plain"}, [PLAIN], 0)]
    methods += [
        Method(f"fixed:{d['name']}", {"kind": "fixed", "arm": d["name"]}, [d["name"]], 0, kinds=(d["kind"],))
        for d in cfg["drafters"]
    ]
    for name, selector in cfg["selectors"].items():
        arms = arms_of(selector, cfg["pool"])
        kinds = tuple(sorted({kind_of_arm[arm] for arm in arms if arm != PLAIN}))
        seconds = arm_by_prompt = None
        if make_selector(selector, arms).plays_plain:
            k = np.array([lengths.get(arm, 0) for arm in arms])
            seconds = tuple(map(float, load_costs(costs, arms, k).rounds))
        if selector["kind"] == "router":
            table = load_routes(routes, cfg["homes"], arms, cfg["generalist"])
            # Filled in, so that the key and the context know the features.
            selector = make_selector(selector, arms).params.model_dump() | {"kind": "router"}
            own = table[selector["features"]].reindex(queries).dropna().astype(int)
            arm_by_prompt = tuple(own.items())
        methods += [
            Method(name, selector, list(arms), seed, seconds, arm_by_prompt, kinds)
            for seed in cfg["selector_seeds"]
        ]
    return methods
