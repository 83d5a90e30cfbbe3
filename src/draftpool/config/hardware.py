"""What the machine can do, found without importing torch."""

from __future__ import annotations

import os
from functools import cache
from importlib import metadata
from pathlib import Path

# Set by the Snakemake that started the study, read by that of each job.
DTYPES_VARIABLE = "DRAFTPOOL_DTYPES"
BFLOAT16_FLAGS = {"avx512_bf16", "amx_bf16", "bf16"}


@cache
def has_gpu() -> bool:
    """Whether an NVIDIA device node is there and torch is not a build for the CPU only."""
    try:
        cpu_build = metadata.version("torch").endswith("+cpu")
    except metadata.PackageNotFoundError:
        cpu_build = True
    return not cpu_build and any(Path("/dev").glob("nvidia[0-9]*"))


@cache
def cpu_multiplies_bfloat16() -> bool:
    """Whether the processor multiplies bfloat16 natively (else a block costs more than its tokens)."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return False
    flags = {
        flag for line in text.splitlines() if line.startswith(("flags", "Features")) for flag in line.split()
    }
    return bool(flags & BFLOAT16_FLAGS)


def uses_gpu(device: str) -> bool:
    """Resolve `device: auto | cpu | cuda` to whether jobs ask for a GPU."""
    return device == "cuda" or (device == "auto" and has_gpu())


def native_dtypes(device: str) -> list[str]:
    """Dtypes worth decoding in: float32 always, bfloat16 where it is native; in a job, what its study decided."""
    if os.environ.get(DTYPES_VARIABLE):
        return os.environ[DTYPES_VARIABLE].split(",")
    return ["float32", "bfloat16"] if uses_gpu(device) or cpu_multiplies_bfloat16() else ["float32"]
