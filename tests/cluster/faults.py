"""Faults for a running study: which process is hit, how, and what of two studies must be equal."""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable
from contextlib import contextmanager, suppress
from pathlib import Path

import pandas as pd
import psutil

from draftpool.cli import STAGES

COMMANDS = {*STAGES, "draw_figure", "write_table"}
# A hit comes up to this long after its stage was seen: while it imports, loads, works or writes.
DELAY_SECONDS = 5.0
# Stages that are over in a second or two.
LIGHT = {"prepare_prompts", "make_drafter", "train_router", "replay_selectors", "judge_claims", "write_table"}
LIGHT_DELAY_SECONDS = 0.5


def running_stages(snakemake: psutil.Process) -> dict[str, psutil.Process]:
    """The jobs of a running Snakemake: stage -> the process of its `draftpool` command."""
    found = {}
    with suppress(psutil.NoSuchProcess):
        for process in snakemake.children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                command = process.cmdline()
                if "python" in process.name() or "draftpool" in process.name():
                    found |= {part: process for part in command[1:4] if part in COMMANDS}
    return found


def _kill_all(snakemake: psutil.Process, job: psutil.Process) -> None:
    """The machine is gone."""
    for process in [snakemake, *snakemake.children(recursive=True)]:
        with suppress(psutil.NoSuchProcess):
            process.kill()


def _kill_job(snakemake: psutil.Process, job: psutil.Process) -> None:
    """The kernel ran out of memory."""
    job.kill()


def _end_job(snakemake: psutil.Process, job: psutil.Process) -> None:
    """A job's time is over: a signal to end, and five seconds later the end."""
    job.terminate()
    with suppress(psutil.TimeoutExpired):
        job.wait(5)
    with suppress(psutil.NoSuchProcess):
        job.kill()


def _end_snakemake(snakemake: psutil.Process, job: psutil.Process) -> None:
    """A login node shuts down."""
    snakemake.terminate()


def _interrupt(snakemake: psutil.Process, job: psutil.Process) -> None:
    """Ctrl-C, which a terminal sends to all of its processes."""
    os.killpg(snakemake.pid, signal.SIGINT)


FAULTS: dict[str, Callable[[psutil.Process, psutil.Process], None]] = {
    "machine gone": _kill_all,
    "job killed": _kill_job,
    "job out of time": _end_job,
    "snakemake ended": _end_snakemake,
    "Ctrl-C": _interrupt,
}


class SmallDisk:
    """A memory file system that can be made full."""

    def __init__(self, folder: Path):
        self.folder = folder

    def resize(self, megabytes: int) -> None:
        subprocess.run(["mount", "-o", f"remount,size={megabytes}m", str(self.folder)], check=True)

    def fill(self, snakemake: psutil.Process, job: psutil.Process) -> None:
        """No byte more can be written until the run has ended."""
        usage = os.statvfs(self.folder)
        used = (usage.f_blocks - usage.f_bfree) * usage.f_frsize
        self.resize(used // 2**20 + 1)

    @classmethod
    @contextmanager
    def mounted(cls, folder: Path, megabytes: int = 4096):
        """Mount it, if this machine lets us; else yield None."""
        command = ["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", str(folder)]
        if os.getuid() != 0 or subprocess.run(command, capture_output=True).returncode:
            yield None
            return
        try:
            yield cls(folder)
        finally:
            subprocess.run(["umount", "--lazy", str(folder)], check=True)


def start(command: list[str], log: Path) -> subprocess.Popen:
    """Start Snakemake as the leader of its own process group."""
    with log.open("a", encoding="utf-8") as handle:
        return subprocess.Popen(command, stdout=handle, stderr=subprocess.STDOUT, start_new_session=True)


def disturb(
    command: list[str], wanted: Counter[str], rng: random.Random, log: Path, disk: SmallDisk | None
) -> list[tuple[str, str, float]]:
    """Run a study to its end, hitting every stage up to as often as ``wanted`` says, at random moments.

    Returns the faults: (stage, fault, seconds after the stage was seen).
    """
    left, made = Counter(wanted), []
    faults = dict(FAULTS) | ({} if disk is None else {"disk full": disk.fill})
    order: list[str] = []
    while True:
        snakemake = start(command, log)
        process = psutil.Process(snakemake.pid)
        hit = False
        while not hit and snakemake.poll() is None:
            due = {stage: job for stage, job in running_stages(process).items() if left[stage] > 0}
            if not due:
                time.sleep(0.02)
                continue
            stage = sorted(due)[0]
            delay = rng.uniform(0, LIGHT_DELAY_SECONDS if stage in LIGHT else DELAY_SECONDS)
            with suppress(psutil.TimeoutExpired):
                due[stage].wait(delay)
            if not due[stage].is_running() or snakemake.poll() is not None:
                # It was over sooner; the next job of this stage is hit.
                continue
            # Every fault once before any comes again.
            order = order or rng.sample(sorted(faults), len(faults))
            name = order.pop()
            try:
                faults[name](process, due[stage])
            except psutil.NoSuchProcess:
                order.append(name)
                continue
            hit = True
            left[stage] -= 1
            made.append((stage, name, round(delay, 2)))
        status = snakemake.wait(timeout=300)
        if disk is not None:
            disk.resize(4096)
        if not hit:
            assert status == 0, f"after {made}:\n" + log.read_text()[-4000:]
            return made


# -- what must be equal --------------------------------------------------------------------------------

# Measured in seconds, or chosen by what was: columns, files, and learners that read measured costs.
TIMED = re.compile(r"^t_|time|seconds|tokens_per_s|speed|s/step|evaluation free|^p$|holm", re.IGNORECASE)
TIMED_FILES = {"overhead.csv", "profile.csv", "parts.csv", "time_split.csv", "times.csv", "prediction.csv"}
# Speed-ups in every row, and selectors in their order.
TIMED_FILES |= {"gap.csv", "metasd_table.csv", "pools_table.csv", "provenance.html"}
UNTIMED_FILES = {"config.json", "resolved.yaml", "lossless.json"}
TIMED_VALUES = re.compile(r"fastest_fixed|speed|seconds|time|^s$|^x$|s/query|tokens/s|cost_", re.IGNORECASE)


def untimed(frame: pd.DataFrame) -> pd.DataFrame:
    """Leave out the columns and rows that hold, or follow from, measured seconds."""
    frame = frame.drop(columns=[name for name in frame.columns if TIMED.search(str(name))])
    timed = pd.Series(False, index=frame.index)
    for name in {"selector", "metric", "measure", "unit", "oracle", "method"} & set(frame.columns):
        timed |= frame[name].astype(str).map(lambda text: bool(TIMED_VALUES.search(text)))
    return frame[~timed].reset_index(drop=True)


def contents(results: Path) -> dict[str, bytes]:
    """Every file of a study that must not depend on how often it was interrupted, times left out."""
    found = {}
    for path in sorted(results.rglob("*")):
        name = str(path.relative_to(results))
        parts = path.relative_to(results).parts
        if not path.is_file() or parts[0] in ("logs", "benchmarks", "state", "costs", "profiles"):
            continue
        if "provenance" in parts:
            continue
        if path.name in TIMED_FILES:
            continue
        if path.suffix == ".parquet":
            found[name] = untimed(pd.read_parquet(path)).to_json(orient="split", double_precision=15).encode()
        elif path.suffix == ".csv":
            frame = untimed(pd.read_csv(path))
            # Tables for people stand in the order of their speed-ups.
            found[name] = frame.sort_values(list(frame.columns)).to_csv(index=False).encode()
        elif path.suffix in (".safetensors", ".jsonl") or path.name in UNTIMED_FILES:
            found[name] = path.read_bytes()
    return found
