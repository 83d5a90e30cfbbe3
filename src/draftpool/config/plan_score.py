"""The artefact of the acceptance table: which drafters are scored on which answers, and along which streams."""

from __future__ import annotations

from typing import TYPE_CHECKING

from draftpool.config.ids import make_id
from draftpool.config.plan_prompts import temperature_of, top_p_of
from draftpool.config.plan_replay import streams_of
from draftpool.config.recipes import OtherRecipe, SuffixRecipe
from draftpool.data.streams import HELD_OUT

if TYPE_CHECKING:
    from draftpool.config.plan import Artefact, Plan


def _learns(plan: Plan, name: str) -> bool:
    """Whether a drafter's drafts depend on the stream before the prompt."""
    recipe = plan.runs[name].recipe
    if isinstance(recipe, SuffixRecipe):
        return recipe.store == "stream"
    return isinstance(recipe, OtherRecipe) and recipe.learns


def _scored_on(plan: Plan, name: str, played: dict[str, list[str]]) -> list[str] | None:
    """Drafters that are scored on a domain or prompt set; None for all, on domains that are trained on.

    On sampled sets drafters of the main pool's kinds are compared.
    """
    if name in plan.evaluation_domains or not plan.study.pool:
        return None
    wanted = {*plan.study.pool, *played.get(name, [])}
    if temperature_of(plan.study, name) > 0.0:
        kinds = {plan.runs[drafter].kind for drafter in plan.study.pool}
        wanted |= {drafter for drafter, run in plan.runs.items() if run.kind in kinds}
    return [run for run in plan.runs if run in wanted]


def score_artefact(plan: Plan, make: type[Artefact]) -> Artefact:
    """The acceptance table of all drafters."""
    study, learning = plan.study, [name for name in plan.runs if _learns(plan, name)]
    # Domains and prompt sets that further pools play, and streams that drafters remember.
    played: dict[str, list[str]] = {}
    streams = {}
    if learning:
        # What statistics read, with or without replay.
        everything = {
            "domains": plan.evaluation_domains,
            "prompts_per_domain": None,
            "order": "blocks",
            "seed": 0,
        }
        streams[HELD_OUT] = everything | {"limit": None}
    if study.replay is not None:
        for pool in plan.pools.values():
            for stream, told in streams_of(plan, pool).items():
                for name in told["domains"]:
                    played.setdefault(name, []).extend(pool.drafters)
                if any(name in learning for name in pool.drafters):
                    streams[stream] = {key: value for key, value in told.items() if key != "seeds"}
    cfg = {
        "answers": [
            {
                "name": name,
                "temperature": temperature_of(study, name),
                "top_p": top_p_of(study, name),
                "prompts": study.score.prompts_per_domain if name in plan.prompts else None,
                "bd_full": study.score.bd_full_prompts if name in plan.evaluation_domains else 0,
                "drafters": _scored_on(plan, name, played),
            }
            for name in plan.held_out
        ],
        "pool": list(study.pool) if study.score.bd_full_prompts else [],
        "drafters": [
            drafter | ({"learns": True} if drafter["name"] in learning else {})
            for drafter in plan.named_drafters(plan.runs)
        ],
        "streams": streams,
        "taps": study.target.taps,
        **study.target.loading,
        "device": study.device,
    }
    inputs = {
        "target": plan.target.id,
        "responses": [plan.responses[name, "eval"].id for name in plan.held_out],
    }
    return make(make_id("acceptance", cfg | inputs), cfg, inputs)
