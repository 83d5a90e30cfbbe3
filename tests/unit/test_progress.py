"""A bar on the terminal, plain lines in the log file."""

from __future__ import annotations

import os
import pty
import sys
from pathlib import Path

from draftpool.progress import progress

SOURCES = Path(__file__).resolve().parents[2] / "src"
JOB = "from draftpool.progress import progress\nlist(progress(range(3), 3, 'training', 'step'))\n"


def run_below_a_terminal(log: Path, **environment: str) -> str:
    """Run JOB with its stderr in a file and a terminal behind it; returns what the terminal shows."""
    child, terminal = pty.fork()
    if child == 0:
        os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT), 2)
        os.execve(
            sys.executable,
            [sys.executable, "-c", JOB],
            os.environ | environment | {"PYTHONPATH": str(SOURCES)},
        )
    shown = b""
    try:
        while chunk := os.read(terminal, 4096):
            shown += chunk
    except OSError:
        pass  # Linux reports the end of a terminal as an error.
    assert os.waitpid(child, 0)[1] == 0
    os.close(terminal)
    return shown.decode()


def test_a_log_file_gets_lines_with_rate_and_no_carriage_returns(capfd):
    assert list(progress(range(3), 3, "training", "step")) == [0, 1, 2]
    lines = capfd.readouterr().err
    assert "\r" not in lines
    assert "training: 100%" in lines and "3/3" in lines and "step/s" in lines


def test_below_snakemake_on_a_terminal_the_bar_is_live_and_the_log_gets_its_last_line(tmp_path):
    shown = run_below_a_terminal(tmp_path / "log", DRAFTPOOL_PROGRESS="bar")
    assert "\rtraining:" in shown and "0/3" in shown
    log = (tmp_path / "log").read_text()
    assert log.count("\n") == 1 and "3/3" in log and "\r" not in log


def test_without_snakemake_on_a_terminal_the_log_gets_the_lines_and_the_terminal_nothing(tmp_path):
    assert run_below_a_terminal(tmp_path / "log", DRAFTPOOL_PROGRESS="") == ""
    assert "3/3" in (tmp_path / "log").read_text()
