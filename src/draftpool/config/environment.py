"""What Snakemake hands down to the jobs it starts, and the lock that keeps a second one away."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from filelock import FileLock, Timeout

from draftpool.config.hardware import DTYPES_VARIABLE
from draftpool.errors import DraftpoolError

if TYPE_CHECKING:
    from draftpool.config.plan import Plan

# Holds a JSON object: artefact id -> [processes, accumulate], for jobs that are split at all.
SPLITS = "DRAFTPOOL_SPLITS"


def prepare_jobs(plan: Plan) -> None:
    """Tell jobs what is decided where the study is started, and let them find the `draftpool` command.

    A job's output goes through a pipe to terminal and log file, so it cannot see by itself whether Snakemake runs on a
    terminal. On a cluster it reads the configuration again on its own node, where `dtypes: auto` may mean something
    else. How a job is split over processes is no part of its command: another split makes the same artefact and must
    not run it again.
    """
    os.environ[DTYPES_VARIABLE] = ",".join(plan.dtypes)
    if shutil.which("draftpool") is None:
        # Snakemake was called by its path, without activating its environment.
        os.environ["PATH"] = os.pathsep.join([os.environ.get("PATH", ""), str(Path(sys.executable).parent)])
    if sys.stderr.isatty():
        os.environ["DRAFTPOOL_PROGRESS"] = "bar"
    trained = plan.by_stage()["train_drafter"].values()
    splits = {made.id: [made.processes, made.accumulate] for made in trained}
    os.environ[SPLITS] = json.dumps({id: split for id, split in splits.items() if split != [1, 1]})


def split_of(artefact: str) -> tuple[int, int]:
    """Processes of an artefact's job, and micro-batches of each; one of each where Snakemake did not say otherwise."""
    processes, accumulate = json.loads(os.environ.get(SPLITS) or "{}").get(artefact, (1, 1))
    return processes, accumulate


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
