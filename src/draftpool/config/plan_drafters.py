"""Artefacts of drafters: trained, fetched from where they are published, or made of a few options."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import TypeAdapter, ValidationError

from draftpool.config.ids import make_id
from draftpool.config.load import explain, overlay_recipe
from draftpool.config.recipes import CheckpointRecipe, Recipe, SuffixRecipe
from draftpool.errors import DraftpoolError

if TYPE_CHECKING:
    from draftpool.config.plan import Artefact, Plan

# `init` of a trained drafter that is no name of another one.
FIRST_WEIGHTS = ("target_layers", "random")
# How a training is split over cores, processes and micro-batches: no part of what it is.
SPLIT = ("threads", "processes", "accumulate")
LAYOUT_KINDS = {"dflash": "block", "eagle3": "eagle", "causal_lm": "independent"}


@dataclass(frozen=True)
class DrafterRun:
    """A recipe at one training seed; ``where`` is the recipe's place in the configuration, for messages."""

    name: str
    recipe_name: str
    recipe: Recipe
    seed: int
    domains: list[str]
    home: str | None
    init_from: str | None
    where: str

    @property
    def kind(self) -> str:
        """Kind of drafter that it becomes."""
        recipe = self.recipe
        return LAYOUT_KINDS[recipe.layout] if isinstance(recipe, CheckpointRecipe) else recipe.kind

    @property
    def stage(self) -> str:
        """The stage that makes it."""
        if isinstance(self.recipe, CheckpointRecipe):
            return "fetch_drafter"
        return "train_drafter" if self.recipe.trained else "make_drafter"


def checked_recipe(raw: dict, where: str) -> Recipe:
    """A recipe of any kind.

    Raises:
        DraftpoolError: If a key is wrong.
    """
    try:
        return TypeAdapter(Recipe).validate_python(raw)
    except ValidationError as error:
        raise DraftpoolError(str(explain(error)), f"config key `{where}`") from error


def recipes_of(plan: Plan) -> Iterator[tuple[str, str, Recipe]]:
    """Every recipe, sweeps included: its name, its place in the configuration, itself."""
    study = plan.study
    for name, recipe in study.drafters.items():
        yield name, f"drafters.{name}", recipe
    for sweep_name, sweep in study.sweeps.items():
        where = f"config key `sweeps.{sweep_name}.base`"
        if sweep.base not in study.drafters:
            raise DraftpoolError(
                f"unknown recipe `{sweep.base}`", where, f"known: {', '.join(study.drafters)}"
            )
        base = study.drafters[sweep.base].model_dump()
        for variant, override in sweep.over.items():
            changed = overlay_recipe(base, override) | {"role": "sweep", "group": sweep.group}
            if sweep.seeds is not None:
                changed["seeds"] = sweep.seeds
            place = f"sweeps.{sweep_name}.over.{variant}"
            yield f"{sweep_name}_{variant}", place, checked_recipe(changed, place)


def runs_of(plan: Plan) -> Iterator[DrafterRun]:
    """Every drafter of the study: recipes by domain and seed; what is not trained has neither."""
    for name, where, recipe in recipes_of(plan):
        if not recipe.trained:
            stores = isinstance(recipe, SuffixRecipe) and recipe.store == "training"
            domains = plan.domain_names(recipe.domains, f"{where}.domains") if stores else []
            yield DrafterRun(name, name, recipe, 0, domains, None, None, where)
            continue
        domains = plan.domain_names(recipe.domains, f"{where}.domains")
        if not domains:
            raise DraftpoolError(
                "no training prompts",
                f"config key `domains.{next(iter(plan.study.domains))}.train`",
                "set it above 0",
            )
        targets = (
            [(f"{name}_{domain}", [domain], domain) for domain in domains]
            if recipe.per_domain
            else [(name, domains, None)]
        )
        init_from = None if recipe.init in FIRST_WEIGHTS else recipe.init
        for run_name, trained_on, home in targets:
            for seed in recipe.seeds:
                yield DrafterRun(
                    f"{run_name}-s{seed}", run_name, recipe, seed, trained_on, home, init_from, where
                )


def drafter_artefact(plan: Plan, run: DrafterRun, make: type[Artefact]) -> Artefact:
    """The folder of one drafter."""
    if run.stage == "train_drafter":
        return _trained(plan, run, make)
    if run.stage == "fetch_drafter":
        cfg = run.recipe.model_dump(exclude={"role", "group", "kind"}) | {"taps": plan.study.target.taps}
        if run.recipe.path:
            # Sizes tell most changes of weights and cost nothing at every parse.
            files = sorted(Path(run.recipe.path).glob("*.*"))
            cfg["content"] = {file.name: file.stat().st_size for file in files if file.is_file()}
        inputs = {"target": plan.target.id}
        return make(make_id(run.name, cfg | inputs), cfg, inputs)
    cfg = run.recipe.model_dump(exclude={"role", "group", "domains"})
    if not run.domains:
        cfg.pop("prompts_per_domain", None)
    inputs = {"responses": [_answers(plan, domain) for domain in run.domains]}
    return make(make_id(run.name, cfg | inputs), cfg, inputs)


def _answers(plan: Plan, domain: str) -> str:
    if (domain, "train") not in plan.responses:
        raise DraftpoolError("no training prompts", f"config key `domains.{domain}.train`", "set it above 0")
    return plan.responses[domain, "train"].id


def _trained(plan: Plan, run: DrafterRun, make: type[Artefact]) -> Artefact:
    recipe = run.recipe
    training = recipe.training.model_dump(exclude=set(SPLIT))
    if training["precision"] == "auto":
        # Told where it is fixed only, so that ids of trainings that leave it to the machine stay what they were.
        del training["precision"]
    cfg = {
        "kind": recipe.kind,
        "domains": run.domains,
        "prompts_per_domain": recipe.prompts_per_domain,
        "seed": run.seed,
        "init": "drafter" if run.init_from else recipe.init,
        "objective": recipe.objective.model_dump(),
        "model": recipe.model.model_dump(),
        "training": training,
        "taps": plan.study.target.taps,
        "device": plan.study.device,
    }
    inputs = {
        "target": plan.target.id,
        "responses": [_answers(plan, domain) for domain in run.domains],
        "init": plan.drafter(run.init_from).id if run.init_from else None,
    }
    kind = "" if recipe.kind == "block" else f"{recipe.kind}-"
    slug = f"{kind}{recipe.objective.kind}-{run.home or 'mixed'}-s{run.seed}"
    split = {name: getattr(recipe.training, name) for name in SPLIT}
    return make(make_id(slug, cfg | inputs), cfg, inputs, **split)


def told_of_drafters(plan: Plan) -> list[dict]:
    """What statistics are told of every drafter; nothing of training where there was none."""
    told = []
    for run in plan.runs.values():
        recipe = run.recipe
        shape = recipe.model.model_dump() if recipe.trained else recipe.model_dump()
        told.append(
            {
                "name": run.name,
                "kind": run.kind,
                "recipe": run.recipe_name,
                "seed": run.seed,
                "role": recipe.role,
                "home": run.home,
                "objective": recipe.objective.model_dump() if recipe.trained else None,
                # A published block drafter has its own block, which stands in its folder.
                "block_size": None if run.kind == "block" and not recipe.trained else recipe.draft_tokens + 1,
                "n_layers": shape.get("n_layers"),
                "steps": recipe.training.steps if recipe.trained else None,
                "clip": recipe.training.clip if recipe.trained else None,
                "group": recipe.group,
            }
        )
    return told
