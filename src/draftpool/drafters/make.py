"""Stage make_drafter: the folder of a drafter that is not trained."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import save_file

from draftpool.artefacts import atomic_dir, read_table, write_json, write_provenance
from draftpool.drafters.early_exit import EarlyExitConfig
from draftpool.drafters.ngram import NgramConfig
from draftpool.drafters.suffix import SuffixConfig
from draftpool.errors import DraftpoolError

CONFIGS = {"ngram": NgramConfig, "suffix": SuffixConfig, "early_exit": EarlyExitConfig}


def make_drafter(cfg: dict, responses: list[Path], out: Path) -> None:
    """Write `config.json`, and `store.safetensors` of a frozen store.

    Args:
        cfg: `kind` and its options (of a kind of one's own under `options`); `prompts_per_domain` of a store of
            training answers.
        responses: Folders of the training answers, if they are stored.
        out: Folder to write.

    Raises:
        DraftpoolError: If the training answers are more than the store may hold.
    """
    options = {name: value for name, value in cfg.items() if name not in ("prompts_per_domain", "options")}
    options |= cfg.get("options", {})
    if cfg["kind"] in CONFIGS:
        options = CONFIGS[cfg["kind"]].model_validate(options).model_dump()
    outputs = [
        torch.tensor(ids, dtype=torch.int64)
        for folder in responses
        for ids in read_table(folder / "responses.parquet").head(cfg["prompts_per_domain"])["response_ids"]
    ]
    stored = sum(map(len, outputs))
    if responses and stored > cfg["store_tokens"]:
        raise DraftpoolError(
            f"{stored} tokens of training answers for a store of {cfg['store_tokens']}",
            "config key `store_tokens`",
            "raise it or lower prompts_per_domain",
        )
    with atomic_dir(out) as folder:
        write_json(folder / "config.json", options)
        if responses:
            lengths = torch.tensor([len(ids) for ids in outputs])
            save_file({"tokens": torch.cat(outputs), "lengths": lengths}, folder / "store.safetensors")
        write_provenance(folder, cfg)
