"""The target's own greedy answers, written in batches, together with the taps that drafters are trained on."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
import torch
from safetensors.torch import save_file
from torch import Tensor

from draftpool.artefacts import atomic_dir, read_jsonl, write_provenance, write_table
from draftpool.errors import DraftpoolError
from draftpool.progress import bar
from draftpool.targets.base import TargetModel
from draftpool.targets.load import end_ids, load_target, load_tokenizer, prompt_ids, resolve_device

# Taking finished sequences out of the batch copies the cache, so it waits until it saves a quarter of the work.
COMPACT_BELOW = 0.75


@dataclass
class Answer:
    """One answer: ids, taps [prompt + answer - 1, taps x hidden] and why it ended."""

    prompt: list[int]
    ids: list[int]
    finish: str
    taps: list[Tensor]


def repetition(ids: list[int], n: int = 4) -> float:
    """Share of n-grams that occurred before in the same text (loops are easy to draft)."""
    grams = [tuple(ids[start : start + n]) for start in range(len(ids) - n + 1)]
    return 0.0 if not grams else 1.0 - len(Counter(grams)) / len(grams)


def batches_by_length(lengths: list[int], batch: int) -> list[list[int]]:
    """Group indices so that prompts of near-equal length go together (little padding)."""
    order = sorted(range(len(lengths)), key=lambda index: (-lengths[index], index))
    return [order[start : start + batch] for start in range(0, len(order), batch)]


def answer_batch(
    target: TargetModel, prompts: list[list[int]], ends: list[int], max_new_tokens: int, with_taps: bool
) -> list[Answer]:
    """Decode greedily (first index on ties) for several prompts at once; finished sequences leave the batch in groups.

    Args:
        target: The model.
        prompts: Token ids of each prompt.
        ends: Ids that end an answer (they are kept as its last token).
        max_new_tokens: Longest answer.
        with_taps: Keep taps of every position but the last (which no drafter sees).
    """
    answers = [Answer(prompt, [], "limit", []) for prompt in prompts]
    counts = [len(prompt) for prompt in prompts]
    cache = target.new_cache(max(counts) + max_new_tokens, len(prompts))
    padded = torch.tensor(
        [prompt + [0] * (max(counts) - len(prompt)) for prompt in prompts], device=target.device
    )
    output = target.forward(padded, cache, "last", counts)
    active = list(range(len(prompts)))
    if with_taps:
        for row, index in enumerate(active):
            answers[index].taps.append(output.taps[row, : counts[row]].to("cpu", torch.bfloat16))
    done: set[int] = set()
    while True:
        tokens = output.logits[:, -1].argmax(dim=-1).tolist()
        for row, index in enumerate(active):
            if index not in done:
                answers[index].ids.append(tokens[row])
                if tokens[row] in ends:
                    answers[index].finish = "eos"
                if tokens[row] in ends or len(answers[index].ids) >= max_new_tokens:
                    done.add(index)
        going = [row for row, index in enumerate(active) if index not in done]
        if not going:
            return answers
        if len(going) <= COMPACT_BELOW * len(active):
            cache.keep(going)
            active = [active[row] for row in going]
            tokens = [tokens[row] for row in going]
        output = target.forward(torch.tensor(tokens, device=target.device)[:, None], cache, "last")
        if with_taps:
            taps = output.taps.to("cpu", torch.bfloat16)
            for row, index in enumerate(active):
                if index not in done:
                    answers[index].taps.append(taps[row])


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
        DraftpoolError: If no prompt is short enough.
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
    answers: dict[int, Answer] = {}
    size = cfg["batch_sequences"] if model.supports_batches else 1
    with bar(len(kept), f"answers {cfg['domain']} {cfg['split']}", "answer") as shown:
        for group in batches_by_length([len(ids[index]) for index in kept], size):
            indices = [kept[position] for position in group]
            made = answer_batch(
                model, [ids[index] for index in indices], ends, cfg["max_new_tokens"], with_taps=True
            )
            for answer in made:
                answer.taps = [torch.cat(answer.taps)]
            answers.update(zip(indices, made, strict=True))
            shown.update(len(indices))
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
        taps.append(answer.taps.pop())
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
