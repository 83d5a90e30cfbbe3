"""Which GPU a job gets where several share a machine: one file lock per device, held until the job ends.

Snakemake's `gpu` resource limits how many jobs hold a GPU at the same time, but names no device.
"""

from __future__ import annotations

import os
import re
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from draftpool.errors import DraftpoolError

POLL_SECONDS = 0.2


def visible_gpus() -> list[str]:
    """Names of the devices that this process may use, as `CUDA_VISIBLE_DEVICES` writes them."""
    listed = os.environ.get("CUDA_VISIBLE_DEVICES")
    if listed is not None:
        return [name.strip() for name in listed.split(",") if name.strip() not in ("", "-1", "NoDevFiles")]
    # CUDA counts from 0 what it sees, also where a container has only /dev/nvidia3.
    return [str(number) for number in range(len(list(Path("/dev").glob("nvidia[0-9]*"))))]


def _lock_path(device: str) -> Path:
    # On this machine's own disk: device 0 of another node is another device. Inside Slurm a device's number counts
    # within the allocation, so that two allocations on one node may both have a device 0.
    folder = Path(tempfile.gettempdir()) / f"draftpool-gpus-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    allocation = os.environ.get("SLURM_JOB_ID", "machine")
    return folder / (re.sub(r"[^A-Za-z0-9._-]", "_", f"{allocation}-{device}") + ".lock")


@contextmanager
def claim_gpus(n: int) -> Iterator[list[str]]:
    """Hold ``n`` of the visible GPUs, waiting until they are free, and make only these visible meanwhile.

    Must be entered before torch touches CUDA. Yields the devices' names; nothing is held where no GPU is visible.

    Raises:
        DraftpoolError: If fewer GPUs are visible than asked for.
    """
    devices = visible_gpus()
    if not devices or n < 1:
        yield []
        return
    if n > len(devices):
        raise DraftpoolError(
            f"{n} GPUs are needed, {len(devices)} visible ({', '.join(devices)})",
            "config key `training.processes`" if n > 1 else "GPU",
            "lower it, or ask for more GPUs (`set-resources` of the profile)",
        )
    before = os.environ.get("CUDA_VISIBLE_DEVICES")
    with ExitStack() as stack:
        held = _take(devices, n, stack)
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(held)
        try:
            yield held
        finally:
            if before is None:
                del os.environ["CUDA_VISIBLE_DEVICES"]
            else:
                os.environ["CUDA_VISIBLE_DEVICES"] = before


def _take(devices: list[str], n: int, stack: ExitStack) -> list[str]:
    waited = False
    while True:
        held: list[str] = []
        with ExitStack() as attempt:
            for device in devices:
                try:
                    attempt.enter_context(FileLock(_lock_path(device), timeout=0))
                except Timeout:
                    continue
                held.append(device)
                if len(held) == n:
                    # All or none: two jobs that each hold half of what they need would wait for ever.
                    stack.push(attempt.pop_all())
                    return held
        if not waited:
            print(f"waiting for {n} free GPU(s) of {', '.join(devices)}", file=sys.stderr, flush=True)
            waited = True
        time.sleep(POLL_SECONDS)
