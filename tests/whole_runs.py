"""Snakemake runs that must succeed."""

from __future__ import annotations

import subprocess


def finish(command: list[str]) -> str:
    """Run a command to its end and return what it prints."""
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=1800)
    assert done.returncode == 0, done.stdout[-6000:]
    return done.stdout
