"""The target's own greedy answers, written in batches, together with the taps that drafters are trained on."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pandas as pd
import torch
from safetensors.torch import save_file

from draftpool.artefacts import atomic_dir, read_jsonl, write_provenance, write_table
from draftpool.data.generation import Answer, answer_prompts
from draftpool.errors import DraftpoolError
from draftpool.progress import bar
from draftpool.targets.load import end_ids, load_target, load_tokenizer, prompt_ids, resolve_device
from draftpool.targets.memory import check_batch


def repetition(ids: list[int], n: int = 4) -> float:
    """Share of n-grams that occurred before in the same text (loops are easy to draft)."""
    grams = [tuple(ids[start : start + n]) for start in range(len(ids) - n + 1)]
    return 0.0 if not grams else 1.0 - len(Counter(grams)) / len(grams)


def generate_responses(cfg: dict, target: Path, prompts: Path, out: Path) -> None:
    """Write `responses.parquet` and `taps.safetensors` for one domain and split.

    `taps.safetensors` holds one tensor `taps` [tokens, taps x hidden] in bfloat16; a response's rows begin at its
    `prompt_offset` (prompt) and `response_offset` (answer, last token left out).

    Args:
        cfg: `domain`, `split`, `max_new_tokens`, `max_prompt_tokens`, `batch_sequences`, `taps`, `backend`, `device`.
        target: Target folder.
        prompts: Prompt folder of the domain.
        out: Folder to write.

    Raises:
        DraftpoolError: If no prompt is short enough, or the batch does not fit into memory.
    """
    device = resolve_device(cfg["device"])
    # Held-out answers are scored in float32, so they are written in float32 everywhere.
    half = device.type == "cuda" and cfg["split"] == "train"
    dtype = torch.bfloat16 if half else torch.float32
    model = load_target(target, cfg["taps"], device, dtype, cfg["backend"])
    tokenizer = load_tokenizer(target)
    ends = end_ids(tokenizer, model.hf_config)
    rows = read_jsonl(prompts / f"{cfg['split']}.jsonl")
    ids = [prompt_ids(tokenizer, row["prompt"]) for row in rows]
    kept = [index for index, prompt in enumerate(ids) if len(prompt) <= cfg["max_prompt_tokens"]]
    if not kept:
        raise DraftpoolError(
            f"none of {len(rows)} {cfg['split']} prompts of `{cfg['domain']}` has at most "
            f"{cfg['max_prompt_tokens']} tokens",
            "config key `responses.max_prompt_tokens`",
            "raise it or choose shorter prompts",
        )
    longest = max(len(ids[index]) for index in kept)
    if model.supports_batches:
        check_batch(
            model,
            min(cfg["batch_sequences"], len(kept)),
            longest + cfg["max_new_tokens"],
            longest,
            "config key `responses.batch_sequences`",
        )
    answers: dict[int, Answer] = {}
    with bar(len(kept), f"answers {cfg['domain']} {cfg['split']}", "answer") as shown:
        for position, answer in answer_prompts(
            model,
            [ids[index] for index in kept],
            ends,
            cfg["max_new_tokens"],
            cfg["batch_sequences"],
            with_taps=True,
        ):
            answers[kept[position]] = answer
            shown.update(1)
    table, taps, offset = [], [], 0
    for index in kept:
        answer = answers[index]
        table.append(
            {
                "prompt_id": rows[index]["id"],
                "domain": cfg["domain"],
                "split": cfg["split"],
                "sample": 0,
                "prompt_ids": answer.prompt,
                "response_ids": answer.ids,
                "finish": answer.finish,
                "repetition": repetition(answer.ids),
                "prompt_offset": offset,
                "response_offset": offset + len(answer.prompt),
            }
        )
        taps.append(answer.taps)
        answer.taps = None
        offset += len(answer.prompt) + len(answer.ids) - 1
    tokens = sum(len(row["response_ids"]) for row in table)
    with atomic_dir(out) as folder:
        write_table(folder / "responses.parquet", pd.DataFrame(table))
        save_file({"taps": torch.cat(taps)}, folder / "taps.safetensors")
        extra = {
            "device": str(device),
            "dtype": str(dtype),
            "answers": len(table),
            "tokens": tokens,
            "too_long": len(rows) - len(kept),
        }
        write_provenance(folder, cfg, extra)
