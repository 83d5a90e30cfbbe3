"""Artefacts of the replay laboratory: frozen costs and replayed selectors."""

from __future__ import annotations

from typing import TYPE_CHECKING

from draftpool.config.ids import make_id
from draftpool.config.models import Stream
from draftpool.config.plan_pools import PoolPlan
from draftpool.config.plan_prompts import temperature_of
from draftpool.data.streams import HELD_OUT, MAIN
from draftpool.errors import DraftpoolError
from draftpool.selectors.base import make_selector

if TYPE_CHECKING:
    from draftpool.config.plan import Artefact, Plan


def replayed_selectors(plan: Plan) -> dict[str, dict]:
    """Live selectors and those of the `replay` block, by name.

    Raises:
        DraftpoolError: If a name stands in both blocks, or `few` names none of them.
    """
    replay = plan.study.replay
    for name in replay.selectors:
        if name in plan.study.selectors:
            raise DraftpoolError(
                "this selector is decoded live and replayed already",
                f"config key `replay.selectors.{name}`",
                "rename it or leave it out",
            )
    both = plan.study.selectors | replay.selectors
    sized = [] if replay.pool_sizes is None else replay.pool_sizes.selectors
    for key, names in (("few", replay.few), ("pool_sizes.selectors", sized)):
        for name in names:
            if name not in both:
                raise DraftpoolError(
                    f"unknown selector `{name}`", f"config key `replay.{key}`", f"known: {', '.join(both)}"
                )
    return both


def costs_artefact(plan: Plan, make: type[Artefact], pool: PoolPlan) -> list[Artefact]:
    """Costs of a pool in the dtype that live decoding is timed in."""
    if plan.study.replay is None or not pool.arms:
        return []
    cfg = {
        "drafters": plan.named_drafters(pool.drafters),
        "repeats": plan.study.replay.cost_repeats,
        "dtype": plan.dtypes[-1],
        "taps": plan.study.target.taps,
        **plan.study.target.loading,
        "device": plan.study.device,
    }
    inputs = {
        "target": plan.target.id,
        "responses": [plan.responses[domain, "eval"].id for domain in plan.evaluation_domains],
    }
    return [make(make_id("costs", cfg | inputs), cfg, inputs)]


def _routes_anything(plan: Plan) -> bool:
    return any(selector["kind"] == "router" for selector in replayed_selectors(plan).values())


def router_artefact(plan: Plan, make: type[Artefact]) -> list[Artefact]:
    """Routes of the held-out prompts, if a selector is a router."""
    if plan.study.replay is None or not plan.study.pool or not _routes_anything(plan):
        return []
    domains, routed = plan.trained_domains, list(plan.held_out)
    cfg = {"domains": domains, "routed": routed, "taps": plan.study.target.taps}
    inputs = {
        "prompts": [plan.prompts[domain].id for domain in domains],
        "train": [plan.responses[domain, "train"].id for domain in domains],
        "heldout_prompts": [plan.held_out[name].id for name in routed],
        "heldout": [plan.responses[name, "eval"].id for name in routed],
    }
    return [make(make_id("routes", cfg | inputs), cfg, inputs)]


def replayed_streams(plan: Plan) -> dict[str, dict]:
    """Every stream that is replayed."""

    replay = plan.study.replay

    def told(name: str, stream: Stream, where: str, limit: int | None, seeds: int) -> dict:
        return {
            "seeds": seeds,
            "domains": plan.stream_names(stream.domains, f"{where}.streams.{name}.domains"),
            "prompts_per_domain": stream.prompts_per_domain,
            "order": stream.order,
            "seed": stream.seed,
            "limit": limit,
        }

    decode, streams = plan.study.decode, {}
    for name, stream in decode.streams.items():
        own = told(name, stream, "decode", decode.max_new_tokens, replay.seeds)
        # The held-out answers of domains are greedy: at another temperature only sampled sets have an exact replay, and
        # under `rejection` those have none either, since the text depends on what is drafted.
        sampled = any(temperature_of(plan.study, name) > 0.0 for name in own["domains"])
        exact = decode.verification == "match" if sampled else decode.temperature == 0.0
        if exact:
            streams[name] = own
    for name, stream in replay.streams.items():
        streams[name] = told(name, stream, "replay", None, min(replay.seeds, replay.stream_seeds))
    everything = Stream(prompts_per_domain=None, order="blocks")
    return streams | {HELD_OUT: told(HELD_OUT, everything, "replay", None, replay.seeds)}


def replay_artefacts(plan: Plan, make: type[Artefact]) -> list[Artefact]:
    """The replay of every pool, the main one first."""
    if plan.study.replay is None:
        return []
    return [_replay_artefact(plan, make, pool) for pool in plan.pools.values()]


def streams_of(plan: Plan, pool: PoolPlan) -> dict[str, dict]:
    """Streams that a pool is replayed on.

    Raises:
        DraftpoolError: If it names one that there is not.
    """
    streams = replayed_streams(plan)
    if pool.streams is None:
        return {name: told for name, told in streams.items() if _played_by(plan, name) in (None, pool.name)}
    for name in pool.streams:
        # A live stream may have no exact replay (sampled prompts, `rejection`): it is decoded only.
        if name not in streams and name not in plan.study.decode.streams:
            raise DraftpoolError(
                f"unknown stream `{name}`",
                f"config key `pools.{pool.name}.streams`",
                f"known: {', '.join(streams)}",
            )
    return {name: streams[name] for name in pool.streams if name in streams}


def _played_by(plan: Plan, stream: str) -> str | None:
    """The further pool that decodes a stream live."""
    return plan.study.decode.streams[stream].pool if stream in plan.study.decode.streams else None


def _replay_artefact(plan: Plan, make: type[Artefact], pool: PoolPlan) -> Artefact:
    """Replay of a pool's selectors on the live streams, cut to the live length, on streams of its own, and on all
    held-out answers (`heldout`).
    """
    streams = streams_of(plan, pool)
    sizes = plan.study.replay.pool_sizes if pool.name == MAIN else None
    if sizes is not None and max(sizes.sizes) > len(plan.live_drafters):
        raise DraftpoolError(
            f"a pool of {max(sizes.sizes)} of {len(plan.live_drafters)} drafters",
            "config key `replay.pool_sizes.sizes`",
            "lower it or train more drafters",
        )
    selectors = replayed_selectors(plan)
    if pool.selectors is not None:
        selectors = {name: cfg for name, cfg in selectors.items() if name in pool.selectors}
    blocks = [name for name in pool.drafters if plan.runs[name].kind == "block"]
    prefill = [name for name, cfg in selectors.items() if make_selector(cfg, pool.arms).reads_prefill]
    if blocks and pool.selectors is not None and prefill:
        raise DraftpoolError(
            f"`{prefill[0]}` reads one-step acceptance, which says nothing of the later slots of `{blocks[0]}`",
            f"config key `pools.{pool.name}.selectors`",
            "leave one of the two out",
        )
    if blocks:
        # Among all selectors it is left out of pools with block drafters.
        selectors = {name: cfg for name, cfg in selectors.items() if name not in prefill}
    cfg = {
        "pool": list(pool.arms),
        "drafters": plan.named_drafters(pool.drafters),
        "pool_sizes": None if sizes is None else sizes.model_dump() | {"drafters": plan.live_drafters},
        "homes": pool.homes(plan),
        "generalist": pool.generalist,
        "selectors": selectors,
        "few": sorted(plan.study.replay.few),
        "few_seeds": plan.study.replay.few_seeds,
        "streams": streams,
    }
    (costs,) = costs_artefact(plan, make, pool)
    inputs = {
        "acceptance": plan.score.id,
        "costs": costs.id,
        "routes": [artefact.id for artefact in router_artefact(plan, make)],
        "responses": [plan.responses[name, "eval"].id for name in plan.held_out],
    }
    return make(make_id("replay" if pool.name == MAIN else f"replay-{pool.name}", cfg | inputs), cfg, inputs)
