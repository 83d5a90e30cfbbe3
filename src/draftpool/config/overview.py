"""What a run leaves for the reader: a banner, `results/index.csv` and the study's resolved configuration."""

from __future__ import annotations

import csv
import hashlib
from pathlib import Path

import yaml

from draftpool.artefacts import atomic_path, canonical_json
from draftpool.config.hardware import uses_gpu
from draftpool.config.models import Study
from draftpool.config.plan import Plan

COLUMNS = ("id", "stage", "parameters")


def config_hash(study: Study) -> str:
    """Return 12 hex digits over the whole configuration, defaults filled in."""
    return hashlib.sha256(canonical_json(study.model_dump()).encode()).hexdigest()[:12]


def banner(plan: Plan, results: Path) -> str:
    """Return the lines that Snakemake prints when it starts."""
    study = plan.study
    device = f"{study.device} ({'GPU' if uses_gpu(study.device) else 'CPU'})"
    streams = f"{', '.join(study.decode.streams)} in {', '.join(plan.dtypes)}" if plan.decodes else "none"
    rows = {
        "study": study.experiment,
        "config": config_hash(study),
        "target": plan.target.id,
        "device": device,
        "live streams": streams,
        "drafters": f"{len(plan.runs)}, {len(study.pool)} of them in the pool",
        "selectors": len(study.selectors),
        "artefacts": f"{results}/ (what each id means: {results}/index.csv)",
        "figures, tables": f"{results}/{study.experiment}/",
    }
    return "\n".join(["draftpool", *(f"  {name + ':':<17}{value}" for name, value in rows.items())])


def write_overview(plan: Plan, results: Path) -> None:
    """Add the study's ids to ``index.csv``, whose other rows stay, and write ``<study>/resolved.yaml``.

    The latter is the whole configuration, defaults filled in, and works as a ``--configfile``.
    """
    index = results / "index.csv"
    rows = {}
    if index.is_file():
        with index.open(newline="", encoding="utf-8") as handle:
            rows = {row["id"]: row for row in csv.DictReader(handle)}
    for stage, artefacts in plan.by_stage().items():
        for id, artefact in artefacts.items():
            rows[id] = {"id": id, "stage": stage, "parameters": canonical_json(artefact.cfg)}
    with atomic_path(index) as temporary, temporary.open("w", newline="", encoding="utf-8") as handle:
        writer = csv.DictWriter(handle, COLUMNS)
        writer.writeheader()
        writer.writerows(sorted(rows.values(), key=lambda row: (row["stage"], row["id"])))
    with atomic_path(results / plan.study.experiment / "resolved.yaml") as temporary:
        temporary.write_text(yaml.safe_dump(plan.study.model_dump(), sort_keys=False), encoding="utf-8")
