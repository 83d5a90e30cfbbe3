"""What Snakemake hands down to the jobs it starts."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

from draftpool.config.hardware import DTYPES_VARIABLE


def prepare_jobs(dtypes: list[str]) -> None:
    """Let jobs find the `draftpool` command, draw progress bars on a terminal, and plan the same study everywhere.

    A job's output goes through a pipe to terminal and log file, so it cannot see the terminal by itself. On a cluster a
    job reads the configuration again on its own node, where `dtypes: auto` may mean something else than where the study
    was started.

    Args:
        dtypes: Dtypes of live decoding, as found where the study was started.
    """
    os.environ.setdefault(DTYPES_VARIABLE, ",".join(dtypes))
    if shutil.which("draftpool") is None:
        # Snakemake was called by its path, without activating its environment.
        os.environ["PATH"] = os.pathsep.join([os.environ.get("PATH", ""), str(Path(sys.executable).parent)])
    if sys.stderr.isatty():
        os.environ["DRAFTPOOL_PROGRESS"] = "bar"
