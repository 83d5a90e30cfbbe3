"""Load the target with its drafters, ready to decode."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from draftpool.data.streams import StreamItem, build_stream
from draftpool.drafters.base import Drafter
from draftpool.drafters.load import load_drafter
from draftpool.drafters.offload import offloaded
from draftpool.errors import DraftpoolError
from draftpool.targets.base import TargetModel
from draftpool.targets.load import end_ids, load_target, load_tokenizer, prompt_ids, resolve_device


@dataclass
class Workbench:
    """A loaded target, its tokenizer, the ids that end a text, and drafters by name."""

    target: TargetModel
    tokenizer: object
    ends: list[int]
    drafters: dict[str, Drafter]

    @property
    def draft_lengths(self) -> dict[str, int]:
        """Tokens that each drafter drafts."""
        return {name: drafter.k for name, drafter in self.drafters.items()}

    def stream(
        self,
        prompts: list[Path],
        max_prompt_tokens: int,
        prompts_per_domain: int | None,
        order: str,
        seed: int,
        answered: set[str] | None = None,
    ) -> list[StreamItem]:
        """Build a stream (see :func:`draftpool.data.streams.build_stream`)."""
        return build_stream(
            prompts,
            lambda messages: prompt_ids(self.tokenizer, messages),
            max_prompt_tokens,
            prompts_per_domain,
            order,
            seed,
            answered,
        )


def named_folders(cfg: dict, folders: list[Path]) -> dict[str, Path]:
    """Pair the drafters of a configuration with their folders.

    Raises:
        DraftpoolError: If their numbers differ.
    """
    names = [drafter["name"] for drafter in cfg["drafters"]]
    if len(names) != len(folders):
        raise DraftpoolError(
            f"{len(folders)} folders for {len(names)} drafters",
            "flag --drafters",
            "give one folder per drafter, in order",
        )
    return dict(zip(names, folders, strict=True))


def load_workbench(cfg: dict, target: Path, drafters: dict[str, Path], dtype: torch.dtype) -> Workbench:
    """Load everything on `cfg["device"]` in one dtype.

    Raises:
        DraftpoolError: If the target or a drafter cannot be loaded or does not fit.
    """
    model = load_target(
        target, cfg["taps"], resolve_device(cfg["device"]), dtype, cfg["backend"], cfg.get("device_map")
    )
    tokenizer = load_tokenizer(target)
    loaded = {name: load_drafter(name, folder, model) for name, folder in drafters.items()}
    if cfg.get("offload") == "cpu" and model.device.type != "cpu":
        loaded = offloaded(loaded, model.device)
    return Workbench(model, tokenizer, end_ids(tokenizer, model.hf_config), loaded)
