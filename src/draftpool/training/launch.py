"""Several processes for one training, started by torch's launcher and ended together.

The launcher is the `draftpool` command itself: it starts one process of the same command for each rank, watches them,
and turns what went wrong into one line. Ranks leave what they have to say in a file.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import tempfile
import threading
import time
from pathlib import Path
from signal import SIGINT, SIGTERM, Signals

from draftpool.errors import DraftpoolError

INTERRUPTED = 130
# Seconds that ranks have to end their step and save it when they are told to stop.
GRACE = 120
ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
LAUNCHER = "DRAFTPOOL_LAUNCHER"
# Which of several reports names the cause: a peer's end is a consequence, a clear error more telling than a traceback.
ORDER = ("error", "crash", "peer")


def is_rank() -> bool:
    """Whether a launcher started this process and will report for it."""
    return ERROR_FILE in os.environ


def report(kind: str, message: str) -> None:
    """Leave a message for the launcher.

    Args:
        kind: `error` (clear, status 2), `crash` (its traceback was printed) or `peer` (another rank has gone).
        message: One line.
    """
    path = Path(os.environ[ERROR_FILE])
    path.parent.mkdir(parents=True, exist_ok=True)
    told = {"message": message, "timestamp": int(time.time()), "kind": kind, "rank": int(os.environ["RANK"])}
    # torch's own launcher reads message and timestamp.
    path.write_text(json.dumps(told), encoding="utf-8")


def end_with_parent() -> None:
    """End this process at once when the launcher has gone without a word (SIGKILL), so that no rank stays behind."""
    parent = int(os.environ.get(LAUNCHER) or os.getppid())

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _reports(folder: Path) -> list[dict]:
    return [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.rglob("error.json"))]


def _cause(reports: list[dict], failures: dict, processes: int) -> tuple[str, int]:
    """The one line that names the cause, and the exit status.

    Args:
        reports: What ranks left.
        failures: Of torch's launcher: rank -> exit code (negative: a signal).
        processes: Number of ranks.
    """

    def failed(rank: int, what: str, remedy: str) -> tuple[str, int]:
        error = DraftpoolError(f"process {rank + 1} of {processes} {what}", "train_drafter", remedy)
        return f"error: {error}", 1

    told = min(reports, key=lambda told: (ORDER.index(told["kind"]), told["rank"]), default=None)
    if told is not None and told["kind"] == "error":
        return f"error: {told['message']}", 2
    # Of ranks that were told to stop some may have been too early or too late to do it by themselves.
    stopped = {rank for rank, status in failures.items() if status in (INTERRUPTED, -SIGTERM, -SIGINT)}
    rank, status = min(failures.items(), key=lambda failure: (failure[0] in stopped, failure[1]))
    if status < 0 and rank not in stopped:
        again = "the same command goes on from the last checkpoint; if this comes again, look for too little memory"
        return failed(rank, f"was ended by {Signals(-status).name}", again)
    if told is not None and told["kind"] == "crash":
        return failed(told["rank"], f"failed ({told['message']})", "see the traceback above")
    if stopped:
        return "interrupted; run the same command again to go on", INTERRUPTED
    if told is not None:
        return failed(told["rank"], f"lost the others ({told['message']})", "run the same command again")
    return failed(rank, f"ended with status {status}", "see its messages above")


def launch(command: list[str], processes: int, cores: int) -> int:
    """Run a command of `draftpool` in several processes; returns the exit status when all have ended.

    Args:
        command: Sub-command and flags; later flags replace earlier ones.
        processes: How many.
        cores: Of all together.
    """
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    threads = str(max(1, cores // processes))
    # The one line says what these would say in thirty.
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    os.environ |= {
        LAUNCHER: str(os.getpid()),
        "OMP_NUM_THREADS": threads,
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(GRACE),
    }
    with tempfile.TemporaryDirectory(prefix="draftpool-ranks-") as folder:
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=processes,
            run_id="train_drafter",
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",
            local_addr="localhost",
            max_restarts=0,
            logs_specs=DefaultLogsSpecs(log_dir=folder),
        )
        arguments = ["-m", "draftpool.cli", *command, "--threads", threads]
        try:
            elastic_launch(config, sys.executable)(*arguments)
        except ChildFailedError as error:
            statuses = {rank: failure.exitcode for rank, failure in error.failures.items()}
            line, status = _cause(_reports(Path(folder)), statuses, processes)
            print(f"draftpool: {line}", file=sys.stderr, flush=True)
            return status
        except SignalException as error:
            raise KeyboardInterrupt from error
    return 0
