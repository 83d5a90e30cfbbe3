"""Counts of every artefact of a study: prompts, tokens, steps, anchors, rounds. Nothing is priced here.

What is counted is what the artefact's stage is told, at the lengths of :mod:`draftpool.estimate.lengths`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from draftpool.config.outputs import figure_names, table_names
from draftpool.estimate.drafters import draft_flops, training_flops
from draftpool.estimate.lengths import Texts, joined, texts_of
from draftpool.estimate.world import World
from draftpool.selectors.base import PLAIN, arms_of, make_selector

if TYPE_CHECKING:
    from draftpool.config.plan import Artefact

# Warm-up of profile_costs, as a share of its repeats.
COSTS_WARM_UP = 5


@dataclass(frozen=True)
class Work:
    """One job.

    Attributes:
        stage: Stage.
        id: Its artefact.
        detail: What tells jobs of a stage apart in price: kind of drafter, dtype.
        counts: Numbers of things done.
        rounds: Rounds by kind of drafter that drafts in them (`plain`: none).
        evaluated: Drafts made for full information, by kind.
        drafts: Mean layers and tokens of a draft, by kind.
    """

    stage: str
    id: str
    detail: str = ""
    counts: dict[str, float] = field(default_factory=dict)
    rounds: Counter = field(default_factory=Counter)
    evaluated: Counter = field(default_factory=Counter)
    drafts: dict[str, dict[str, float]] = field(default_factory=dict)


def _texts(world: World, names: list[str], wanted: int | None = None, limit: int | None = None) -> Texts:
    return joined(texts_of(world.plan, name, "eval", world.lengths, wanted, limit) for name in names)


def _drafts(world: World, names: list[str]) -> dict[str, dict[str, float]]:
    """Mean layers and draft tokens of these drafters by kind."""
    by_kind: dict[str, list] = {}
    for name in names:
        by_kind.setdefault(world.drafters[name].kind, []).append(world.drafters[name])
    return {
        kind: {
            "layers": sum(one.layers for one in own) / len(own),
            "draft_tokens": sum(one.draft_tokens for one in own) / len(own),
        }
        for kind, own in by_kind.items()
    }


def _loaded(world: World, names: list[str]) -> dict[str, float]:
    """What a job that decodes with these drafters loads and reserves."""
    limits = world.plan.study
    weights = 0
    for name in names:
        drafter = world.drafters[name]
        # The rows of the target's head that a trained drafter may propose are copied beside it.
        rows = drafter.draft_vocab if drafter.draft_vocab < world.shape.vocabulary else 0
        weights += drafter.weights + rows * world.shape.hidden
    longest = limits.responses.max_prompt_tokens + max(
        limits.responses.max_new_tokens, limits.decode.max_new_tokens
    )
    return {"drafters": len(names), "drafter_weights": weights, "longest": longest}


def _answers(world: World, name: str, split: str, made: Artefact) -> Work:
    texts = texts_of(world.plan, name, split, world.lengths)
    half = split == "train" and world.plan.study.device == "cuda"
    one_by_one = world.plan.study.target.backend == "transformers"
    counts = {
        "answers": texts.answers,
        "prompt_tokens": texts.prompt_tokens,
        "answer_tokens": texts.answer_tokens,
        "kept_tokens": texts.kept_tokens,
        "length": texts.prompt + texts.answer,
        "longest_prompt": world.plan.study.responses.max_prompt_tokens,
        "longest": world.plan.study.responses.max_prompt_tokens + world.plan.study.responses.max_new_tokens,
        "batch": 1 if one_by_one else min(world.plan.study.responses.batch_sequences, max(1, texts.answers)),
    }
    return Work("generate_responses", made.id, "bfloat16" if half else "float32", counts)


def _training(world: World, name: str, made: Artefact) -> Work:
    plan, drafter = world.plan, world.drafters[name]
    options = plan.runs[name].recipe.training
    prompt = world.lengths.prompt_tokens(plan.study.responses.max_prompt_tokens)
    answer = world.lengths.answer_tokens(plan.study.responses.max_new_tokens)
    anchors = options.anchors_per_sequence
    supervised = min(anchors, max(1.0, answer - 1))
    sequences = options.steps * options.batch_sequences
    each = training_flops(drafter, world.shape, prompt + answer, anchors, supervised)
    counts = {
        "steps": options.steps,
        "sequences": sequences,
        "batch": options.batch_sequences,
        "anchors": sequences * supervised,
        "context": prompt + answer,
        "longest": plan.study.responses.max_prompt_tokens + plan.study.responses.max_new_tokens,
        "slots": options.batch_sequences * anchors * (drafter.draft_tokens + 1),
        "weights": drafter.weights,
        "draft_vocab": drafter.draft_vocab,
        "logged_slots": 1 if drafter.kind == "independent" else drafter.draft_tokens,
        "layers": drafter.layers,
        "flops": sequences * each,
    }
    return Work("train_drafter", made.id, drafter.kind, counts)


def _scoring(world: World, made: Artefact) -> Work:
    plan, told = world.plan, made.cfg
    counts: Counter = Counter()
    learning = {drafter["name"] for drafter in told["drafters"] if drafter.get("learns")}
    for answers in told["answers"]:
        texts = texts_of(plan, answers["name"], "eval", world.lengths, answers["prompts"])
        counts["answers"] += texts.answers
        counts["tokens"] += texts.kept_tokens
        scored = answers["drafters"] or plan.runs
        counts["cells"] += len(scored)
        counts["length"] = max(counts["length"], texts.prompt + texts.answer)
        counts["largest_rows"] = max(counts["largest_rows"], texts.anchors * len(scored))
        for name in scored:
            if name in learning:
                continue
            drafter = world.drafters[name]
            counts["rows"] += texts.anchors
            counts["slots"] += texts.anchors * drafter.draft_tokens
            counts["drafter_flops"] += texts.anchors * draft_flops(drafter, world.shape)
            counts["drafter_flops"] += 2 * texts.kept_tokens * drafter.context
        read = texts_of(plan, answers["name"], "eval", world.lengths, answers["bd_full"])
        if answers["bd_full"]:
            lengths = sum(
                world.drafters[name].draft_tokens + 1 for name in told["pool"] if name in world.drafters
            )
            counts["draft_tokens_read"] += read.anchors * lengths
    for name in learning:
        for stream in told["streams"].values():
            texts = _texts(world, stream["domains"], stream["prompts_per_domain"], stream["limit"])
            counts["rows"] += texts.anchors
            counts["slots"] += texts.anchors * world.drafters[name].draft_tokens
    counts.update(_loaded(world, list(plan.runs)))
    counts["target_tokens"] = counts["tokens"] + counts["draft_tokens_read"]
    return Work("score_pool", made.id, "", dict(counts))


def _decoding(world: World, name: str, dtype: str, made: Artefact) -> Work:
    plan, told = world.plan, made.cfg
    texts = _texts(world, told["domains"], told["prompts_per_domain"], told["max_new_tokens"])
    # Sampled sets have their repeats in their answers already; live ones are the same.
    sampled_live = told["temperature"] > 0.0 and plan.study.decode.temperature > 0.0
    repeats = told["repeats"] if sampled_live else 1
    tokens = texts.answer_tokens * repeats
    pool = [arm for arm in told["pool"] if arm != PLAIN]
    rounds: Counter = Counter({PLAIN: tokens})
    evaluated: Counter = Counter()
    for drafter in told["drafters"]:
        rounds[drafter["kind"]] += tokens / world.tau_of(drafter["kind"])
    for selector in told["selectors"].values():
        arms = arms_of(selector, tuple(told["pool"]))
        full = make_selector(selector, arms).needs == "full"
        for _ in told["selector_seeds"]:
            # An arm of the pool at random stands for what a selector plays.
            for arm in pool:
                kind = plan.runs[arm].kind
                rounds[kind] += tokens / world.tau_of(kind) / len(pool)
            if full:
                mean = sum(tokens / world.tau_of(plan.runs[arm].kind) for arm in pool) / len(pool)
                for arm in pool:
                    evaluated[plan.runs[arm].kind] += mean
    methods = 1 + len(told["drafters"]) + len(told["selectors"]) * len(told["selector_seeds"])
    counts = {
        "queries": texts.queries * repeats,
        "answers": texts.answers * repeats * methods,
        "methods": methods,
        "tokens": tokens * methods,
        "prompt_tokens": texts.prompt_tokens * repeats,
        "calls": sum(rounds.values()),
        "length": texts.prompt + texts.answer,
    } | _loaded(world, names := [drafter["name"] for drafter in told["drafters"]])
    drafts = _drafts(world, names)
    return Work("decode_live", made.id, dtype, counts, rounds, evaluated, drafts)


def _gate(world: World, made: Artefact) -> Work:
    told = made.cfg
    texts = _texts(world, world.plan.evaluation_domains, told["prompts_per_domain"], told["max_new_tokens"])
    rounds: Counter = Counter({PLAIN: texts.answer_tokens})
    kinds = [drafter["kind"] for drafter in told["drafters"]]
    for kind in kinds:
        rounds[kind] += texts.answer_tokens / world.tau_of(kind) / len(kinds)
    compared = min(told["bfloat16_prompts"], texts.answers) * texts.answer
    # bfloat16 one token at a time, and in blocks in both dtypes.
    width = max((world.drafters[one["name"]].draft_tokens for one in told["drafters"]), default=0) + 1
    rounds[PLAIN] += compared * (1 + 2 / width)
    counts = {
        "prompts": texts.answers,
        "tokens": texts.answer_tokens,
        "calls": sum(rounds.values()),
        "length": texts.prompt + texts.answer,
    } | _loaded(world, names := [drafter["name"] for drafter in told["drafters"]])
    drafts = _drafts(world, names)
    return Work("check_lossless", made.id, "", counts, rounds, drafts=drafts)


def _profile(world: World, made: Artefact) -> Work:
    tokens = world.lengths.answer_tokens(made.cfg["max_new_tokens"]) * len(made.cfg["methods"])
    counts = {"methods": len(made.cfg["methods"]), "tokens": tokens, "calls": tokens}
    counts |= _loaded(world, [drafter["name"] for drafter in made.cfg["drafters"]])
    return Work("profile_decode", made.id, made.cfg["dtype"], counts, Counter({PLAIN: tokens}))


def _costs(world: World, made: Artefact) -> Work:
    told, repeats = made.cfg, made.cfg["repeats"]
    widest = max(world.drafters[one["name"]].draft_tokens for one in told["drafters"]) + 1
    # Verification of every width; a draft and two catch-ups of every drafter; evaluation of all with its catch-up.
    drafters = len(told["drafters"])
    parts = (widest + 3 * drafters + 3) * (repeats + max(1, repeats // COSTS_WARM_UP))
    counts = {"parts": parts} | _loaded(world, [drafter["name"] for drafter in told["drafters"]])
    return Work("profile_costs", made.id, told["dtype"], counts, Counter({PLAIN: parts}))


def _replay(world: World, made: Artefact, acceptance_rows: float) -> Work:
    plan, told = world.plan, made.cfg
    kinds = [plan.runs[one["name"]].kind for one in told["drafters"]]
    tau = sum(map(world.tau_of, kinds)) / len(kinds)
    counts: Counter = Counter({"acceptance_rows": acceptance_rows})
    for stream in told["streams"].values():
        texts = _texts(world, stream["domains"], stream["prompts_per_domain"], stream["limit"])
        # Plain decoding and every drafter alone, once each.
        episodes = tau + len(kinds)
        counts["rows"] += texts.answers * (1 + len(kinds))
        read = stream["prompts_per_domain"] or float("inf")
        for name, cfg in told["selectors"].items():
            selector = make_selector(cfg, arms_of(cfg, tuple(told["pool"])))
            if selector.reads_bd_full and read > plan.study.score.bd_full_prompts:
                continue
            few = told["few_seeds"] if name in told["few"] else stream["seeds"]
            episodes += min(few, stream["seeds"])
            counts["rows"] += texts.answers
        counts["rounds"] += episodes * texts.answer_tokens / tau
    sizes = told["pool_sizes"]
    if sizes is not None:
        texts = _texts(world, plan.evaluation_domains)
        pools = len(sizes["sizes"]) * sizes["pools"]
        counts["rounds"] += pools * sizes["seeds"] * len(sizes["selectors"]) * texts.answer_tokens / tau
        counts["rows"] += pools * len(sizes["selectors"]) * texts.answers
    return Work("replay_selectors", made.id, "", dict(counts))


def count_work(world: World) -> Iterator[Work]:
    """Every artefact of the study, each once."""
    plan, seen = world.plan, set()

    def new(work: Work) -> Iterator[Work]:
        if (work.stage, work.id) not in seen:
            seen.add((work.stage, work.id))
            yield work

    stages = plan.by_stage()
    for id in stages["fetch_target"]:
        yield from new(Work("fetch_target", id, counts={"weights": world.shape.parameters}))
    for name, made in plan.prompts.items():
        domain = plan.study.domains[name]
        yield from new(Work("prepare_prompts", made.id, counts={"prompts": domain.train + domain.eval}))
    for name, made in plan.prompt_sets.items():
        texts = texts_of(plan, name, "eval", world.lengths)
        written = texts.prompt_tokens if made.cfg.get("how") == "llm" else 0.0
        counts = {"prompts": texts.queries, "answer_tokens": written, "prompt_tokens": written}
        counts |= {"batch": plan.study.responses.batch_sequences, "length": 2 * texts.prompt}
        counts |= _loaded(world, [])
        yield from new(Work("prepare_set", made.id, "reworded" if written else "", counts))
    for (name, split), made in plan.responses.items():
        yield from new(_answers(world, name, split, made))
    for name, run in plan.runs.items():
        made, drafter = plan.drafter(name), world.drafters[name]
        if run.stage == "train_drafter":
            yield from new(_training(world, name, made))
        elif run.stage == "fetch_drafter":
            yield from new(Work("fetch_drafter", made.id, counts={"weights": drafter.weights}))
        else:
            kept = getattr(run.recipe, "prompts_per_domain", 0) * len(run.domains)
            tokens = kept * world.lengths.answer_tokens(plan.study.responses.max_new_tokens)
            yield from new(Work("make_drafter", made.id, counts={"tokens": tokens}))
    for made in stages["check_lossless"].values():
        yield from new(_gate(world, made))
    scored = _scoring(world, plan.score)
    yield from new(scored)
    for (name, dtype), made in plan.decodes.items():
        yield from new(_decoding(world, name, dtype, made))
    for made in plan.profiles:
        yield from new(_profile(world, made))
    for made in stages["profile_costs"].values():
        yield from new(_costs(world, made))
    for made in stages["train_router"].values():
        routed = _texts(world, made.cfg["routed"]).answers
        known = sum(plan.study.domains[name].train for name in made.cfg["domains"])
        yield from new(Work("train_router", made.id, counts={"prompts": routed + known}))
    for made in stages["replay_selectors"].values():
        yield from new(_replay(world, made, scored.counts["rows"]))
    yield Work("compute_stats", "stats", counts={"jobs": 1, "acceptance_rows": scored.counts["rows"]})
    yield Work("copy_summary", "summary", counts={"jobs": 1})
    yield Work("judge_claims", "claims", counts={"jobs": 1})
    yield Work("draw_figure", "figures", counts={"jobs": len(figure_names(plan))})
    yield Work("write_table", "tables", counts={"jobs": len(table_names(plan))})
    yield Work("trace_provenance", "provenance", counts={"jobs": 1})
