"""What Snakemake hands down to the jobs it starts."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path


def prepare_jobs() -> None:
    """Let jobs find the `draftpool` command, and draw progress bars where Snakemake runs on a terminal.

    A job's output goes through a pipe to terminal and log file, so it cannot see the terminal by itself.
    """
    if shutil.which("draftpool") is None:
        # Snakemake was called by its path, without activating its environment.
        os.environ["PATH"] = os.pathsep.join([os.environ.get("PATH", ""), str(Path(sys.executable).parent)])
    if sys.stderr.isatty():
        os.environ["DRAFTPOOL_PROGRESS"] = "bar"
