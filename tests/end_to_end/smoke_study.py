"""Snakemake on the smoke study: the real model, small budgets."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
DEFAULT, SMOKE = REPOSITORY / "config/default.yaml", REPOSITORY / "config/smoke.yaml"


def command(folder: Path, *arguments: str, overlays: tuple[Path, ...] = ()) -> list[str]:
    snakefile = ["--snakefile", str(REPOSITORY / "Snakefile"), "--directory", str(folder)]
    configs = ["--configfile", *map(str, (SMOKE, *overlays))]
    return [sys.executable, "-m", "snakemake", *snakefile, *arguments, *configs]


def run(folder: Path, *arguments: str, overlays: tuple[Path, ...] = ()) -> str:
    done = subprocess.run(
        command(folder, *arguments, overlays=overlays),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=1800,
    )
    assert done.returncode == 0, done.stdout[-6000:]
    return done.stdout
