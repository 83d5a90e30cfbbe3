"""What decides whether a stage runs again: the digest of its code and of the registered kinds it loads."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

from draftpool.cli import STAGES
from draftpool.config.digest import code_digest
from draftpool.config.plan import Plan
from draftpool.drafters.kinds import modules_of
from draftpool.errors import DraftpoolError
from draftpool.registry import find_registered
from draftpool.selectors.base import make_selector
from draftpool.training.objectives.base import make_objective

# Names that stand for something else in tables and in summary.json.
RESERVED = ("plain", "generalist", "ensemble")
RESERVED += ("best_fixed", "best_fixed_query", "best_fixed_stream", "best_switching")
# Selectors that a stage plays whatever its configuration says.
ALWAYS = {"check_lossless": ("plain", "round_robin"), "decode_live": ("plain", "fixed")}
ALWAYS["profile_costs"] = ("metasd_ucb", "hedgespec")
ALWAYS["profile_decode"] = ALWAYS["replay_selectors"] = ALWAYS["decode_live"]


@cache
def _module(package: str, decorator: str, kind: str) -> str:
    return find_registered(package, decorator, kind)


def _registered(stage: str, cfg: dict) -> Iterator[str]:
    """Modules that a stage with this configuration finds by a registry instead of importing them."""
    kinds = [selector["kind"] for selector in cfg.get("selectors", {}).values()]
    for kind in (*ALWAYS.get(stage, ()), *kinds):
        yield _module("draftpool.selectors", "register_selector", kind)
    yield from modules_of(drafter["kind"] for drafter in cfg.get("drafters", ()))
    if "objective" in cfg:
        yield _module("draftpool.training.objectives", "register_objective", cfg["objective"]["kind"])


def stage_code(stage: str, cfg: dict) -> str:
    """Return the code digest of a stage: its module, the registered ones ``cfg`` names, and their imports.

    Raises:
        DraftpoolError: If ``cfg`` names an objective or selector that nobody registered.
    """
    return code_digest(STAGES[stage].split(":")[0], *_registered(stage, cfg))


def check_kinds(plan: Plan) -> None:
    """Build every objective and selector once, so that a wrong kind or parameter ends before any job.

    Raises:
        DraftpoolError: One line naming the drafter or selector, what is wrong and what exists.
    """
    for name, run in plan.runs.items():
        if not run.recipe.trained:
            continue
        try:
            make_objective(run.recipe.objective.model_dump(), run.recipe.draft_tokens + 1, run.recipe.kind)
        except DraftpoolError as error:
            raise DraftpoolError(str(error), f"drafter `{name}`") from error
    replay = plan.study.replay
    replayed = {} if replay is None else replay.selectors
    sized = [] if replay is None or replay.pool_sizes is None else replay.pool_sizes.selectors
    for block, selectors in (("selectors", plan.study.selectors), ("replay.selectors", replayed)):
        for name, selector in selectors.items():
            key = f"config key `{block}.{name}`"
            if name in RESERVED:
                raise DraftpoolError("this name is taken", key, "choose another one")
            try:
                made = make_selector(selector, [*(plan.study.pool or plan.runs), "plain"])
            except DraftpoolError as error:
                raise DraftpoolError(str(error), key) from error
            if made.reads_bd_full and name in sized:
                raise DraftpoolError(
                    "BD of all slots is known on a few prompts only",
                    "config key `replay.pool_sizes.selectors`",
                    f"leave `{name}` out",
                )
            if made.reads_prefill and block == "selectors":
                raise DraftpoolError(
                    "losses as published are replayed only", key, "move it to `replay.selectors`"
                )
            reads_artefact = made.plays_plain or selector["kind"] == "router"
            if reads_artefact and plan.study.replay is None:
                raise DraftpoolError(
                    "it reads measured costs or routes, which belong to replay", key, "add a `replay` block"
                )
