"""`draftpool plan`: read configurations, estimate, print."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from draftpool.config.load import merge, read_yaml, resolve
from draftpool.config.models import Study
from draftpool.config.plan import Plan
from draftpool.config.stages import check_kinds
from draftpool.errors import DraftpoolError
from draftpool.estimate.machines import published
from draftpool.estimate.shapes import target_model
from draftpool.estimate.table import (
    Estimate,
    as_json,
    by_stage,
    by_study,
    estimate,
    estimate_text,
    machine_of,
    sources_lines,
    table_text,
    total_of,
)
from draftpool.estimate.world import World

DEFAULT = Path("config/default.yaml")
# What grows with `--times`: prompts, and steps on them.
PROMPTS = ("train", "eval", "prompts_per_domain")


def whole_study(files: list[Path]) -> list[Path]:
    """The files of a study: as given, or laid over the default study where the first is an overlay.

    Raises:
        DraftpoolError: If the first is an overlay and the default study is not found.
    """
    needed = {name for name, option in Study.model_fields.items() if option.is_required()}
    if needed <= read_yaml(files[0]).keys():
        return files
    beside = [folder / DEFAULT for folder in [Path(), *files[0].resolve().parents]]
    found = next((path for path in beside if path.is_file()), None)
    if found is None:
        raise DraftpoolError(
            "is an overlay, and config/default.yaml is not here",
            str(files[0]),
            "name the file that it is laid over first: --config BASE.yaml OVERLAY.yaml",
        )
    return [found, *files]


def grown(raw: Any, times: int, key: str = "") -> Any:
    """A configuration with so many times the prompts, and training steps on them."""
    if isinstance(raw, dict):
        return {name: grown(value, times, name) for name, value in raw.items()}
    if isinstance(raw, int) and not isinstance(raw, bool) and (key in PROMPTS or key == "steps"):
        return raw * times
    return raw


def read_study(files: list[Path], times: int = 1) -> Plan:
    """The plan of a study from its files.

    Raises:
        DraftpoolError: If the configuration is wrong.
    """
    raw: dict = {}
    for path in whole_study(files):
        raw = merge(raw, read_yaml(path))
    plan = Plan(resolve(grown(raw, times) if times != 1 else raw))
    check_kinds(plan)
    return plan


def given_shapes(wanted: list[str]) -> dict[str, Path]:
    """`NAME=FILE` of `--shape`.

    Raises:
        DraftpoolError: If one is not of this form.
    """
    shapes = {}
    for one in wanted:
        name, equals, path = one.partition("=")
        if not (name and equals and path):
            raise DraftpoolError(
                f"{one!r} is not NAME=FILE", "flag --shape", "give a model and its config.json"
            )
        shapes[name] = Path(path)
    return shapes


def estimate_study(
    files: list[Path],
    gpu: str = "h200",
    answer_tokens: float | None = None,
    prompt_tokens: float | None = None,
    times: int = 1,
    shapes: dict[str, Path] | None = None,
) -> Estimate:
    """Estimate one study.

    Args:
        files: Configuration files, later ones laid over earlier ones.
        gpu: Whose data sheet rooflines rest on.
        answer_tokens: Mean length of an answer; None: as published or measured.
        prompt_tokens: Mean length of a prompt; None: as published or measured.
        times: So many times the prompts and training steps.
        shapes: `config.json` of models that are not in the table, by name.

    Raises:
        DraftpoolError: If the configuration is wrong, or a model's shape or the GPU is not known.
    """
    if gpu not in published()["gpus"]:
        raise DraftpoolError(
            f"unknown GPU `{gpu}`", "flag --gpu", f"known: {', '.join(sorted(published()['gpus']))}"
        )
    plan = read_study(files, times)
    machine = machine_of(plan.study.device, gpu)
    lengths = machine.lengths
    if answer_tokens is not None:
        lengths = replace(lengths, answer_share=1.0, answer=answer_tokens)
    if prompt_tokens is not None:
        lengths = replace(lengths, prompt_share=1.0, prompt=prompt_tokens)
    world = World(plan, lengths, machine.tau(target_model(plan.study.target)), shapes or {})
    return estimate(world, machine)


def plan_text(estimates: list[Estimate], brief: bool = False) -> str:
    """What is printed of several studies; brief: only their totals, and the stages of all together."""
    if brief:
        parts = [table_text(by_study(estimates), total_of(estimates)).replace("stage", "study", 1)]
    else:
        parts = [estimate_text(one) for one in estimates]
    if brief or len(estimates) > 1:
        parts.append("all studies\n\n" + table_text(by_stage(estimates), total_of(estimates)))
        parts[-1] += "\n".join(["", *sources_lines(estimates)]) if brief else ""
    return "\n\n\n".join(parts)


def print_plan(
    studies: list[list[Path]], as_data: bool, brief: bool, shapes: list[str], **options: Any
) -> None:
    """Print the estimates of studies as text or JSON.

    Raises:
        DraftpoolError: As `estimate_study`.
    """
    given = given_shapes(shapes)
    estimates = [estimate_study(files, shapes=given, **options) for files in studies]
    print(
        json.dumps(as_json(estimates), indent=2, sort_keys=True) if as_data else plan_text(estimates, brief)
    )
