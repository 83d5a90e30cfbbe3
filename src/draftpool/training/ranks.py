"""The processes that share one training: what they add up, tell each other and agree on.

Every process holds all weights and takes its share of every step's sequences. Gradients of the summed loss are added
up once a step and divided by the divisor of the whole step, so that all take the same optimiser step. Processes are
started by torch's launcher (:mod:`draftpool.training.launch`, or `torchrun`), which tells each its rank.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from draftpool.errors import DraftpoolError, PeerLostError

T = TypeVar("T")

# The first process may read terabytes of taps for a checkpoint's key while the others wait; that a process has gone
# the launcher notices at once.
TIMEOUT = timedelta(hours=2)


@contextmanager
def _collective() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        # Gloo and NCCL report a peer that has gone, a timeout and a network that is not there by this type.
        raise PeerLostError(str(error).splitlines()[0]) from error


class Ranks:
    """One process among those of a training.

    Attributes:
        rank: Number of this process, from 0.
        size: How many there are.
        device: Where this process computes.
    """

    def __init__(self, rank: int, size: int, device: torch.device):
        self.rank, self.size, self.device = rank, size, device

    @property
    def first(self) -> bool:
        """Whether this is the process that writes."""
        return self.rank == 0

    def add_up(self, values: Tensor) -> None:
        """Replace values by their sum over all processes, in place; on `device`, the same shape everywhere."""
        if self.size > 1:
            with _collective():
                dist.all_reduce(values)

    def from_first(self, make: Callable[[], T]) -> T:
        """What `make` returns on the first process, which alone calls it; made of what JSON holds."""
        made = [json.dumps(make())] if self.first else [None]
        if self.size > 1:
            with _collective():
                dist.broadcast_object_list(made, src=0, device=self.device)
        return json.loads(made[0])

    def agree(self, what: str, make: Callable[[], object]) -> None:
        """Check that `make` returns the same on all processes, made of what JSON holds; a single one calls nothing.

        Raises:
            DraftpoolError: If they do not; on every process.
        """
        values: list[object] = [None] * self.size
        if self.size > 1:
            own = json.dumps(make())
            with _collective():
                dist.all_gather_object(values, own)
            if len(set(values)) > 1:
                raise DraftpoolError(
                    f"processes of one training differ in {what}",
                    "train_drafter",
                    "run the same command again; if it stays, set `training.processes` to 1",
                )

    def wait(self) -> None:
        """Wait until all processes are here."""
        self.from_first(lambda: None)


def started_in_group() -> bool:
    """Whether torch's launcher started this process."""
    return "TORCHELASTIC_RUN_ID" in os.environ


@contextmanager
def joined(device: torch.device) -> Iterator[Ranks]:
    """Join the processes of this training; a process that no launcher started is the only one.

    Args:
        device: `cpu` or `cuda`; on CUDA every process takes the device of its number on the machine.

    Raises:
        DraftpoolError: If the machine has fewer CUDA devices than processes.
        PeerLostError: If the others are not reached.
    """
    if not started_in_group():
        yield Ranks(0, 1, device)
        return
    if device.type == "cuda":
        local, wanted = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
        if torch.cuda.device_count() < wanted:
            raise DraftpoolError(
                f"{wanted} processes on {torch.cuda.device_count()} CUDA devices",
                "config key `training.processes`",
                "give the job a device for each process",
            )
        device = torch.device("cuda", local)
        torch.cuda.set_device(device)
    with _collective():
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=TIMEOUT)
    yield Ranks(dist.get_rank(), dist.get_world_size(), device)
    # Not after an error: the others would notice the closed connections before the launcher notices the error.
    dist.destroy_process_group()
