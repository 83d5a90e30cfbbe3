"""What Snakemake hands down to the jobs it starts, and the lock that keeps a second one away."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

from filelock import FileLock, Timeout

from draftpool.config.hardware import DTYPES_VARIABLE
from draftpool.errors import DraftpoolError


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


# A lock is given back when nothing refers to it any more.
_HELD: list[FileLock] = []


def lock_results(results: Path) -> None:
    """Keep other runs out of a results folder until this process ends, however it ends.

    Snakemake's own lock outlives a process that was killed, and then has to be removed by hand; the profiles turn it
    off (`nolock`).

    Raises:
        DraftpoolError: If another run works in the folder.
    """
    results.mkdir(parents=True, exist_ok=True)
    lock = FileLock(results / ".running.lock")
    try:
        lock.acquire(timeout=0)
    except Timeout as error:
        raise DraftpoolError(
            "another snakemake is working here",
            str(results),
            "wait for it or stop it, then run the same command again",
        ) from error
    _HELD.append(lock)
