"""Artefacts of live decoding: the gate before it, the decoded streams, and the profile."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from draftpool.config.ids import make_id
from draftpool.config.plan_pools import PoolPlan
from draftpool.config.plan_prompts import is_session, stream_sampling
from draftpool.config.plan_replay import costs_artefact, router_artefact
from draftpool.data.streams import MAIN
from draftpool.selectors.base import PLAIN, arms_of

if TYPE_CHECKING:
    from draftpool.config.plan import Artefact, Plan


def lossless_artefact(plan: Plan, make: type[Artefact]) -> Artefact:
    """The losslessness report of the live drafters."""
    cfg = plan.study.lossless.model_dump() | {
        "drafters": plan.named_drafters(plan.checked_drafters),
        "taps": plan.study.target.taps,
        **plan.study.target.loading,
        "max_prompt_tokens": plan.study.responses.max_prompt_tokens,
        "device": plan.study.device,
        "seed": plan.study.seed,
    }
    inputs = {
        "target": plan.target.id,
        "prompts": [plan.prompts[domain].id for domain in plan.evaluation_domains],
    }
    return make(make_id("lossless", cfg | inputs), cfg, inputs)


def _context(plan: Plan, make: type[Artefact], pool: PoolPlan) -> dict[str, Any]:
    """What some live selectors read: costs of the pool, routes of the prompts."""
    selectors = plan.study.selectors.values()
    weighs = any(PLAIN in arms_of(selector, ()) for selector in selectors)
    routed = any(selector["kind"] == "router" for selector in selectors)
    costs = costs_artefact(plan, make, pool) if weighs else []
    routes = router_artefact(plan, make) if routed else []
    return {"costs": [made.id for made in costs], "routes": [made.id for made in routes]}


def decode_artefacts(plan: Plan, make: type[Artefact]) -> dict[tuple[str, str], Artefact]:
    """Live decoding per (stream, dtype)."""
    made = {}
    for name, stream in plan.study.decode.streams.items():
        where = f"decode.streams.{name}.domains"
        domains = plan.stream_names(stream.domains, where)
        pool = plan.pools[stream.pool or MAIN]
        context = _context(plan, make, pool)
        # Drafters outside the main pool are decoded with it, a further pool's stream has its own only.
        drafters = plan.live_drafters if pool.name == MAIN else pool.drafters
        for dtype in plan.dtypes:
            cfg = {
                "stream": name,
                "domains": domains,
                "prompts_per_domain": stream.prompts_per_domain,
                "order": stream.order,
                "stream_seed": stream.seed,
                "dtype": dtype,
                "pool": list(pool.arms),
                "homes": pool.homes(plan),
                "generalist": pool.generalist,
                "drafters": plan.named_drafters(drafters),
                "selectors": plan.study.selectors,
                "taps": plan.study.target.taps,
                **plan.study.target.loading,
                "device": plan.study.device,
                "max_prompt_tokens": plan.study.responses.max_prompt_tokens,
            }
            cfg |= plan.study.decode.model_dump(exclude={"streams", "dtypes"})
            cfg |= stream_sampling(plan.study, domains, where)
            inputs = {
                "target": plan.target.id,
                "prompts": [plan.held_out[domain].id for domain in domains],
                "answers": [
                    plan.responses[name, "eval"].id for name in domains if is_session(plan.study, name)
                ],
            } | context
            made[name, dtype] = make(make_id(f"{name}-{dtype}", cfg | inputs), cfg, inputs)
    return made


def profile_artefact(plan: Plan, make: type[Artefact]) -> list[Artefact]:
    """The profile of the first stream in the first dtype, if one is wanted."""
    if plan.study.profile is None or not plan.decodes:
        return []
    stream = next(iter(plan.decodes.values()))
    dropped = ("prompts_per_domain", "repeats", "selector_seeds", "warmup_prompts")
    cfg = {name: value for name, value in stream.cfg.items() if name not in dropped}
    cfg |= {"selector_seeds": [0]} | plan.study.profile.model_dump()
    return [make(make_id(f"profile-{cfg['stream']}", cfg | stream.inputs), cfg, stream.inputs)]
