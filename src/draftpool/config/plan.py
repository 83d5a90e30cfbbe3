"""From a study to its artefacts: which stage reads which part of the configuration, kept under which id.

Snakemake rules only look things up here. A stage's ``cfg`` holds exactly the fields that change its result,
so that a label, the order of keys or an unrelated option reruns nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from draftpool.artefacts import sha256_file
from draftpool.config import hardware
from draftpool.config.ids import make_id
from draftpool.config.models import Study
from draftpool.config.plan_decode import decode_artefacts, lossless_artefact, profile_artefact
from draftpool.config.plan_drafters import DrafterRun, drafter_artefact, runs_of, told_of_drafters
from draftpool.config.plan_pools import PoolPlan, check_pools, main_pool, pools_of
from draftpool.config.plan_prompts import (
    check_domains,
    check_sets,
    known_names,
    model_artefact,
    response_artefacts,
    rewording_models,
    set_artefacts,
    temperature_of,
)
from draftpool.config.plan_replay import costs_artefact, replay_artefacts, replayed_streams, router_artefact
from draftpool.config.plan_score import score_artefact
from draftpool.data.streams import MAIN
from draftpool.errors import DraftpoolError


@dataclass(frozen=True)
class Artefact:
    """One cached result: its id, the configuration of its stage and the drafters or upstream ids it reads.

    ``threads`` are the cores of its job (None: those of the study), ``processes`` those that share its work, and
    ``accumulate`` the parts that each does one after the other; they are no part of the id.
    """

    id: str
    cfg: dict
    inputs: dict[str, Any] = field(default_factory=dict)
    threads: int | None = None
    processes: int = 1
    accumulate: int = 1


class Plan:
    """All artefacts of a study.

    Raises:
        DraftpoolError: If names do not fit together (unknown drafter, domain, archive, circular start).
    """

    def __init__(self, study: Study):
        self.study = study
        self.runs: dict[str, DrafterRun] = {}
        for run in runs_of(self):
            if run.name in self.runs:
                raise DraftpoolError(
                    f"drafter `{run.name}` is already made by `{self.runs[run.name].where}`",
                    f"config key `{run.where}`",
                    "rename one of the two",
                )
            self.runs[run.name] = run
        self._drafters: dict[str, Artefact] = {}
        self._check()

    # -- domains ------------------------------------------------------------------------------------------

    @cached_property
    def trained_domains(self) -> list[str]:
        """Domains with training prompts: `all` of recipes."""
        return [name for name, domain in self.study.domains.items() if domain.train > 0]

    @cached_property
    def evaluation_domains(self) -> list[str]:
        """Domains that drafters are compared on; the others are met in streams that name them only."""
        named = self.study.evaluation_domains
        return self.trained_domains if named is None else sorted(named)

    def domain_names(self, wanted: list[str] | str, where: str) -> list[str]:
        """Domains that a recipe is trained on."""
        return known_names(wanted, list(self.study.domains), self.trained_domains, where)

    def set_domains(self, wanted: list[str] | str, where: str) -> list[str]:
        """Domains whose held-out prompts a prompt set takes."""
        return known_names(wanted, list(self.prompts_held_out), self.evaluation_domains, where)

    def stream_names(self, wanted: list[str] | str, where: str) -> list[str]:
        """Domains and prompt sets that a stream mixes."""
        known = [*self.prompts_held_out, *self.study.prompt_sets]
        return known_names(wanted, known, self.evaluation_domains, where)

    # -- drafters -----------------------------------------------------------------------------------------

    def _known_drafter(self, name: str, where: str) -> None:
        if name not in self.runs:
            raise DraftpoolError(
                f"unknown drafter `{name}`",
                f"config key `{where}`",
                f"known drafters: {', '.join(self.runs)}",
            )

    def _check(self) -> None:
        for name in self.study.pool:
            self._known_drafter(name, "pool")
        self._known_drafter(self.study.generalist, "generalist")
        if self.study.pool and self.study.generalist not in self.study.pool:
            raise DraftpoolError(
                "the generalist is not in the pool", "config key `pool`", f"add `{self.study.generalist}`"
            )
        recipes = {run.recipe_name for run in self.runs.values()}
        for compare in self.study.compare:
            for name in (compare.a, compare.b):
                if name not in recipes:
                    raise DraftpoolError(
                        f"unknown recipe `{name}`",
                        "config key `compare`",
                        f"known: {', '.join(sorted(recipes))}",
                    )
        for run in self.runs.values():
            seen, at = {run.name}, run
            while at.init_from is not None:
                self._known_drafter(at.init_from, f"{at.where}.init")
                at = self.runs[at.init_from]
                if at.name in seen:
                    raise DraftpoolError(
                        "drafters start from each other in a circle",
                        f"config key `{run.where}.init`",
                        "start one from `target_layers`",
                    )
                seen.add(at.name)
        for name, domain in self.study.domains.items():
            for source in domain.sources:
                if source.source == "archive" and source.archive not in self.study.archives:
                    raise DraftpoolError(
                        f"unknown archive `{source.archive}`",
                        f"config key `domains.{name}.sources`",
                        f"known: {', '.join(self.study.archives)}",
                    )
        if self.study.decode.streams and not self.study.pool:
            raise DraftpoolError(
                "live decoding needs a pool", "config key `pool`", "list drafters, or empty `decode.streams`"
            )
        check_domains(self)
        check_pools(self)
        check_sets(self)

    # -- artefacts ----------------------------------------------------------------------------------------

    @cached_property
    def target(self) -> Artefact:
        """The target folder."""
        return model_artefact(self.study.target, Artefact)

    @cached_property
    def prompts(self) -> dict[str, Artefact]:
        """The prompt folder of each domain."""
        made = {}
        for name, domain in self.study.domains.items():
            used = sorted({source.archive for source in domain.sources if source.archive})
            cfg = {"domain": name, "seed": self.study.seed} | domain.model_dump()
            cfg["archives"] = {archive: self.study.archives[archive].model_dump() for archive in used}
            local = sorted({Path(source.path) for source in domain.sources if source.path})
            if local:
                cfg["content"] = {str(path): sha256_file(path) for path in local if path.is_file()}
            made[name] = Artefact(make_id(name, cfg), cfg)
        return made

    @property
    def prompts_held_out(self) -> dict[str, Artefact]:
        """The prompt folders of domains with held-out prompts."""
        return {name: made for name, made in self.prompts.items() if self.study.domains[name].eval > 0}

    @cached_property
    def prompt_sets(self) -> dict[str, Artefact]:
        """The prompt folder of each prompt set."""
        return set_artefacts(self, Artefact)

    @cached_property
    def held_out(self) -> dict[str, Artefact]:
        """Prompt folders with held-out prompts: of the domains, then of the prompt sets."""
        return self.prompts_held_out | self.prompt_sets

    @cached_property
    def responses(self) -> dict[tuple[str, str], Artefact]:
        """The target's answers per (domain, split); those of prompt sets count as `eval`."""
        return response_artefacts(self, Artefact)

    def drafter(self, name: str) -> Artefact:
        """The folder of one drafter run."""
        if name not in self._drafters:
            self._drafters[name] = drafter_artefact(self, self.runs[name], Artefact)
        return self._drafters[name]

    def named_drafters(self, names) -> list[dict]:
        """Names, kinds and ids of drafters, as stages are told them."""
        return [{"name": name, "kind": self.runs[name].kind, "id": self.drafter(name).id} for name in names]

    @cached_property
    def score(self) -> Artefact:
        """The acceptance table of all drafters."""
        return score_artefact(self, Artefact)

    @cached_property
    def pools(self) -> dict[str, PoolPlan]:
        """All pools by name, the main one first."""
        return pools_of(self)

    @cached_property
    def live_drafters(self) -> list[str]:
        """Drafters that decode live on the main pool's streams: the pool, then every other drafter of the main pool's
        kinds that is not a sweep's.
        """
        kinds = {self.runs[name].kind for name in self.study.pool}
        others = [
            name
            for name, run in self.runs.items()
            if run.recipe.role != "sweep" and name not in self.study.pool and run.kind in kinds
        ]
        return [*self.study.pool, *others]

    @cached_property
    def checked_drafters(self) -> list[str]:
        """Drafters that the losslessness gate runs: all that decode live on some stream, or are of a further pool."""
        pooled = [name for pool in self.pools.values() for name in pool.drafters]
        return list(dict.fromkeys([*self.live_drafters, *pooled]))

    @property
    def homes(self) -> dict[str, str]:
        """Domain of every specialist of the main pool."""
        return main_pool(self).homes(self)

    @cached_property
    def lossless(self) -> Artefact:
        """The losslessness report of the live drafters."""
        return lossless_artefact(self, Artefact)

    def pool_of_stream(self, name: str) -> str:
        """Pool that decodes a live stream."""
        return self.study.decode.streams[name].pool or MAIN

    @cached_property
    def exact_streams(self) -> list[str]:
        """Live streams whose text does not depend on what is drafted."""
        return [
            name
            for (name, dtype), made in self.decodes.items()
            if dtype == self.dtypes[0]
            and (made.cfg["temperature"] == 0.0 or made.cfg["verification"] == "match")
        ]

    @cached_property
    def replayed_live(self) -> list[str]:
        """Live streams that are replayed too."""
        streams = {} if self.study.replay is None else replayed_streams(self)
        return [name for name in self.study.decode.streams if name in streams]

    @cached_property
    def dtypes(self) -> list[str]:
        """Dtypes of live decoding."""
        wanted = self.study.decode.dtypes
        return hardware.native_dtypes(self.study.device) if wanted == "auto" else list(wanted)

    @cached_property
    def decodes(self) -> dict[tuple[str, str], Artefact]:
        """Live decoding per (stream, dtype)."""
        return decode_artefacts(self, Artefact)

    @cached_property
    def profiles(self) -> list[Artefact]:
        """The profile of the first stream in the first dtype, if one is wanted."""
        return profile_artefact(self, Artefact)

    @cached_property
    def stats_cfg(self) -> dict:
        """Configuration of compute_stats."""
        return {
            "study": self.study.experiment,
            "domains": self.evaluation_domains,
            "drafters": told_of_drafters(self),
            "pool": list(self.study.pool),
            "pools": [
                {"name": pool.name, "arms": list(pool.arms), "generalist": pool.generalist}
                for pool in self.pools.values()
            ],
            "stream_pools": {name: self.pool_of_stream(name) for name in self.study.decode.streams},
            "generalist": self.study.generalist,
            "temperature": self.study.decode.temperature,
            "sampled": [name for name in self.prompt_sets if temperature_of(self.study, name) > 0.0],
            "costs_dtype": self.dtypes[-1],
            "compare": [compare.model_dump() for compare in self.study.compare],
            "bootstrap": self.study.bootstrap.model_dump(),
        }

    def by_stage(self) -> dict[str, dict[str, Artefact]]:
        """All artefacts of the study by stage and id (statistics, figures and tables have no id)."""
        found = {
            "fetch_target": [self.target, *rewording_models(self)],
            "prepare_prompts": self.prompts.values(),
            "prepare_set": self.prompt_sets.values(),
            "generate_responses": self.responses.values(),
            **{
                stage: [self.drafter(name) for name, run in self.runs.items() if run.stage == stage]
                for stage in ("train_drafter", "make_drafter", "fetch_drafter")
            },
            "check_lossless": [self.lossless] if self.decodes else [],
            "score_pool": [self.score],
            "decode_live": self.decodes.values(),
            "profile_decode": self.profiles,
            "profile_costs": [
                made for pool in self.pools.values() for made in costs_artefact(self, Artefact, pool)
            ],
            "train_router": router_artefact(self, Artefact),
            "replay_selectors": replay_artefacts(self, Artefact),
        }
        return {stage: {artefact.id: artefact for artefact in made} for stage, made in found.items()}
