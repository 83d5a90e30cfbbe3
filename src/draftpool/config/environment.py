"""What Snakemake hands down to the jobs it starts."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from draftpool.config.plan import Artefact

# Holds a JSON object: artefact id -> [processes, accumulate], for jobs that are split at all.
SPLITS = "DRAFTPOOL_SPLITS"


def prepare_jobs(artefacts: Iterable[Artefact]) -> None:
    """Let jobs find the `draftpool` command and how they are split, and draw progress bars on Snakemake's terminal.

    A job's output goes through a pipe to terminal and log file, so it cannot see the terminal by itself. How a job is
    split over processes is no part of its command: another split makes the same artefact and must not run it again.

    Args:
        artefacts: What the jobs make.
    """
    if shutil.which("draftpool") is None:
        # Snakemake was called by its path, without activating its environment.
        os.environ["PATH"] = os.pathsep.join([os.environ.get("PATH", ""), str(Path(sys.executable).parent)])
    if sys.stderr.isatty():
        os.environ["DRAFTPOOL_PROGRESS"] = "bar"
    splits = {made.id: [made.processes, made.accumulate] for made in artefacts}
    os.environ[SPLITS] = json.dumps({id: split for id, split in splits.items() if split != [1, 1]})


def split_of(artefact: str) -> tuple[int, int]:
    """Processes of an artefact's job, and micro-batches of each; one of each where Snakemake did not say otherwise."""
    processes, accumulate = json.loads(os.environ.get(SPLITS) or "{}").get(artefact, (1, 1))
    return processes, accumulate
