"""Artefacts of prompt sets, their models, and the target's answers; what a stream of sets means for decoding."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from draftpool.config.ids import make_id
from draftpool.config.models import Study
from draftpool.config.prompt_sets import PromptSet, Reworded, Sampled, Sessions
from draftpool.config.target import Target
from draftpool.data.streams import HELD_OUT
from draftpool.errors import DraftpoolError

if TYPE_CHECKING:
    from draftpool.config.plan import Artefact, Plan


def known_names(wanted: list[str] | str, known: list[str], every: list[str], where: str) -> list[str]:
    """Names that a key asks for; `all` stands for `every`.

    Raises:
        DraftpoolError: If a name is not known, comes twice, or there is none.
    """
    if wanted == "all":
        return list(every)
    if not wanted or len(set(wanted)) < len(wanted):
        raise DraftpoolError("no domain, or one named twice", f"config key `{where}`", "name each once")
    for name in wanted:
        if name not in known:
            raise DraftpoolError(
                f"unknown domain `{name}`", f"config key `{where}`", f"known: {', '.join(known)}"
            )
    return list(wanted)


def check_domains(plan: Plan) -> None:
    """Check which domains are compared on.

    Raises:
        DraftpoolError: If one is unknown or has no held-out prompts.
    """
    held_out = [name for name, domain in plan.study.domains.items() if domain.eval > 0]
    if plan.study.evaluation_domains is not None:
        known_names(plan.study.evaluation_domains, list(plan.study.domains), [], "evaluation_domains")
    for name in plan.evaluation_domains:
        if name not in held_out:
            raise DraftpoolError(
                "no held-out prompts, and drafters are compared on it",
                f"config key `domains.{name}.eval`",
                "raise it, or list other domains under `evaluation_domains`",
            )


def model_artefact(target: Target, make: type[Artefact]) -> Artefact:
    """The folder of a model."""
    cfg = target.model_dump(exclude={"taps", "name", "backend", "device_map"})
    if target.chat_options is None:
        # Told where it changes something only, so that ids of other targets stay what they were.
        cfg.pop("chat_options")
    if target.source == "path":
        # Sizes tell most changes of weights and cost nothing at every parse.
        folder = Path(target.path)
        cfg["content"] = {
            file.name: file.stat().st_size for file in sorted(folder.glob("*.*")) if file.is_file()
        }
    return make(make_id(target.name, cfg), cfg)


def _rewording_model(plan: Plan, options: Reworded) -> Artefact:
    return plan.target if options.model is None else model_artefact(options.model, type(plan.target))


def rewording_models(plan: Plan) -> list[Artefact]:
    """Models that reword, beside the study's target."""
    return [
        _rewording_model(plan, options)
        for options in plan.study.prompt_sets.values()
        if isinstance(options, Reworded) and options.model is not None
    ]


def check_sets(plan: Plan) -> None:
    """Check the names that prompt sets and streams use.

    Raises:
        DraftpoolError: If a set is called like a domain, a stream like another one, or a name is unknown.
    """
    study = plan.study
    for name, options in study.prompt_sets.items():
        where = f"config key `prompt_sets.{name}`"
        if name in study.domains:
            raise DraftpoolError(f"`{name}` is a domain already", where, "rename one of the two")
        domains = plan.set_domains(options.domains, f"prompt_sets.{name}.domains")
        if isinstance(options, Sessions) and options.turns > len(domains):
            raise DraftpoolError(
                f"{options.turns} turns from {len(domains)} domains",
                where,
                "every turn comes from another domain",
            )
    if HELD_OUT in study.decode.streams:
        raise DraftpoolError(
            "this stream is there already", f"config key `decode.streams.{HELD_OUT}`", "rename it"
        )
    streams = {f"decode.streams.{name}": stream for name, stream in study.decode.streams.items()}
    if study.replay is not None:
        for name, stream in study.replay.streams.items():
            where = f"replay.streams.{name}"
            if name in study.decode.streams or name == HELD_OUT:
                raise DraftpoolError("this stream is there already", f"config key `{where}`", "rename it")
            streams[where] = stream
    for where, stream in streams.items():
        stream_sampling(study, plan.stream_names(stream.domains, f"{where}.domains"), where)


def set_artefacts(plan: Plan, make: type[Artefact]) -> dict[str, Artefact]:
    """The prompt folder of each prompt set."""
    made = {}
    for name, options in plan.study.prompt_sets.items():
        domains = plan.set_domains(options.domains, f"prompt_sets.{name}.domains")
        cfg: dict[str, Any] = {
            "name": name,
            "kind": options.kind,
            "domains": domains,
            "prompts_per_domain": options.prompts_per_domain,
            "seed": options.seed,
        }
        inputs: dict[str, Any] = {"prompts": [plan.prompts[domain].id for domain in domains], "model": None}
        if isinstance(options, Sessions):
            cfg["turns"] = options.turns
        if isinstance(options, Reworded):
            cfg["how"] = options.how
            if options.how == "typos":
                cfg["rate"] = options.rate
            if options.how == "llm":
                model = _rewording_model(plan, options)
                cfg |= {
                    **(plan.study.target if options.model is None else options.model).loading,
                    "device": plan.study.device,
                    "batch_sequences": plan.study.responses.batch_sequences,
                }
                inputs["model"] = model.id
        made[name] = make(make_id(name, cfg | inputs), cfg, inputs)
    return made


def answer_options(options: PromptSet, study: Study) -> dict[str, Any]:
    """What generate_responses is told about a prompt set, besides what it is told of a domain."""
    if isinstance(options, Sampled):
        # Told where it cuts anything only, so that ids of answers from the whole vocabulary stay what they were.
        cut = {} if options.top_p == 1.0 else {"top_p": options.top_p}
        return {"temperature": options.temperature, "repeats": options.repeats} | cut
    if isinstance(options, Sessions):
        # Later turns hold the answers to earlier ones, so these have the length that live decoding gives them.
        return {
            "max_new_tokens": study.decode.max_new_tokens,
            "max_prompt_tokens": options.max_prompt_tokens,
        }
    return {}


def response_artefacts(plan: Plan, make: type[Artefact]) -> dict[tuple[str, str], Artefact]:
    """The target's answers per (domain, split); those of prompt sets count as `eval`."""
    study, made = plan.study, {}
    for name, prompts in (plan.prompts | plan.prompt_sets).items():
        options = study.prompt_sets.get(name)
        for split in ("train", "eval"):
            if split == "train" and (options is not None or study.domains[name].train == 0):
                continue
            if split == "eval" and name not in plan.held_out:
                continue
            cfg = study.responses.model_dump() | {
                "domain": name,
                "split": split,
                "taps": study.target.taps,
                **study.target.loading,
                "device": study.device,
            }
            cfg |= {} if options is None else answer_options(options, study)
            inputs = {"target": plan.target.id, "prompts": prompts.id}
            made[name, split] = make(make_id(f"{name}-{split}", cfg | inputs), cfg, inputs)
    return made


def temperature_of(study: Study, name: str) -> float:
    """Temperature of the held-out answers of a domain or prompt set."""
    options = study.prompt_sets.get(name)
    return options.temperature if isinstance(options, Sampled) else 0.0


def top_p_of(study: Study, name: str) -> float:
    """Top-p of the held-out answers of a domain or prompt set."""
    options = study.prompt_sets.get(name)
    return options.top_p if isinstance(options, Sampled) else 1.0


def is_session(study: Study, name: str) -> bool:
    """Whether a name stands for a prompt set of sessions."""
    return isinstance(study.prompt_sets.get(name), Sessions)


def stream_sampling(study: Study, names: list[str], where: str) -> dict[str, Any]:
    """What decode_live is told about a stream of prompt sets: `temperature`, `top_p`, `repeats`, `max_prompt_tokens`.

    Raises:
        DraftpoolError: If the stream mixes what cannot be decoded in one go.
    """
    options = [study.prompt_sets.get(name) for name in names]
    sampled = {(one.temperature, one.top_p, one.repeats) for one in options if isinstance(one, Sampled)}
    if sampled and (len(sampled) > 1 or not all(isinstance(one, Sampled) for one in options)):
        raise DraftpoolError(
            "sampled prompt sets are mixed with others",
            f"config key `{where}`",
            "give them a stream of their own",
        )
    found: dict[str, Any] = {}
    if sampled:
        ((temperature, top_p, repeats),) = sampled
        found |= {"temperature": temperature, "top_p": top_p, "repeats": repeats}
    longest = [one.max_prompt_tokens for one in options if isinstance(one, Sessions)]
    if longest:
        if len(set(longest)) > 1 or not all(isinstance(one, Sessions) for one in options):
            raise DraftpoolError(
                "sessions are mixed with others", f"config key `{where}`", "give them a stream of their own"
            )
        found["max_prompt_tokens"] = longest[0]
    return found
