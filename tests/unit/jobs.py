"""Trainings as jobs run them: the real command in a real process, with real signals."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import psutil

INTERRUPTED = "draftpool: interrupted; run the same command again to go on"


def command(world, root: Path, name: str, cfg: dict, *flags: str) -> list[str]:
    """The command of `train_drafter` that writes to `root / name`."""
    return [
        *(sys.executable, "-m", "draftpool.cli", "train_drafter"),
        *("--cfg", json.dumps(cfg)),
        *("--target", str(world.target)),
        *("--responses", *map(str, world.train)),
        *("--state", str(root / "state" / name)),
        *("--threads", "1"),
        *("--out", str(root / name)),
        *flags,
    ]


def start(world, root: Path, name: str, cfg: dict, *flags: str, patch: str = "", **environment: str):
    """Start a job whose processes run `patch`, Python text, before anything else."""
    (root / name).parent.mkdir(parents=True, exist_ok=True)
    patches = root / f"patch-{name}"
    patches.mkdir(parents=True, exist_ok=True)
    (patches / "sitecustomize.py").write_text(patch)
    path = os.pathsep.join([str(patches), os.environ["PYTHONPATH"]])
    return subprocess.Popen(
        command(world, root, name, cfg, *flags),
        env=os.environ | {"PYTHONPATH": path} | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finish(job, timeout: float = 60.0) -> tuple[int, str]:
    """Exit status and everything that was printed; no process may be left."""
    family = children(job)
    printed, _ = job.communicate(timeout=timeout)
    gone(family)
    return job.returncode, printed


def children(job) -> list[psutil.Process]:
    """Processes that a job started."""
    try:
        return psutil.Process(job.pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def gone(family: list[psutil.Process], timeout: float = 10.0) -> None:
    """Wait until none of them runs."""
    _, alive = psutil.wait_procs(family, timeout=timeout)
    assert not [one for one in alive if one.status() != psutil.STATUS_ZOMBIE]


def wait_for(path: Path, job, timeout: float = 40.0) -> None:
    """Wait for a file that the job writes."""
    limit = time.monotonic() + timeout
    while not path.exists():
        assert job.poll() is None, job.communicate()[0]
        assert time.monotonic() < limit, "the job is too slow"
        time.sleep(0.02)


def rank_of(process: psutil.Process) -> int:
    """Number of a process among those of its training."""
    return int(process.environ()["RANK"])


def at_step(step: int, action: str, rank: int | None = None) -> str:
    """A patch: on one rank (None: every process), `action` runs when a step begins; `signal`, `os` are imported."""
    where = "True" if rank is None else f"os.environ.get('RANK') == '{rank}'"
    return f"""
import importlib.abc, importlib.machinery, os, signal, sys, time

class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name != "draftpool.training.train":
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        run = spec.loader.exec_module
        def exec_module(module):
            run(module)
            make = module.make_batch
            def patched(responses, at, *rest):
                if at == {step} and {where}:
                    {action}
                return make(responses, at, *rest)
            module.make_batch = patched
        spec.loader.exec_module = exec_module
        return spec

sys.meta_path.insert(0, Finder())
"""


def errors_in(printed: str) -> list[str]:
    """Lines that tell of an error, a traceback or torch's own report among what was printed."""
    return [line for line in printed.splitlines() if re.search(r"rror|Traceback|FAILED|interrupted", line)]


TERMINATE = "os.kill(os.getpid(), signal.SIGTERM)"
KILL = "os.kill(os.getpid(), signal.SIGKILL)"
