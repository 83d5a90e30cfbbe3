"""Snakemake on the smoke study: the real model, small budgets."""

from __future__ import annotations

import sys
from pathlib import Path

from whole_runs import finish

REPOSITORY = Path(__file__).resolve().parents[2]
DEFAULT, SMOKE = REPOSITORY / "config/default.yaml", REPOSITORY / "config/smoke.yaml"


def command(folder: Path, *arguments: str, overlays: tuple[Path, ...] = ()) -> list[str]:
    snakefile = ["--snakefile", str(REPOSITORY / "Snakefile"), "--directory", str(folder)]
    configs = ["--configfile", *map(str, (SMOKE, *overlays))]
    return [sys.executable, "-m", "snakemake", *snakefile, *arguments, *configs]


def run(folder: Path, *arguments: str, overlays: tuple[Path, ...] = ()) -> str:
    return finish(command(folder, *arguments, overlays=overlays))
