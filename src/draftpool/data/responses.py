"""The target's own answers, written in batches, together with the taps that drafters are trained on."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pandas as pd
import torch
from safetensors.torch import save_file

from draftpool.artefacts import atomic_dir, read_jsonl, write_provenance, write_table
from draftpool.data.generation import Answer, Text, answer_prompts
from draftpool.data.streams import conversation, turn_id, turns_of
from draftpool.errors import DraftpoolError
from draftpool.progress import bar
from draftpool.targets.load import end_ids, load_target, load_tokenizer, prompt_ids, resolve_device
from draftpool.targets.memory import check_batch


def repetition(ids: list[int], n: int = 4) -> float:
    """Share of n-grams that occurred before in the same text (loops are easy to draft)."""
    grams = [tuple(ids[start : start + n]) for start in range(len(ids) - n + 1)]
    return 0.0 if not grams else 1.0 - len(Counter(grams)) / len(grams)


def generate_responses(cfg: dict, target: Path, prompts: Path, out: Path) -> None:
    """Write `responses.parquet` and `taps.safetensors` for one domain and split, or for one prompt set.

    `taps.safetensors` holds one tensor `taps` [tokens, taps x hidden] in bfloat16; a response's rows begin at its
    `prompt_offset` (prompt) and `response_offset` (answer, last token left out). In a session every turn is a row,
    whose prompt holds the turns and the answers before it.

    Args:
        cfg: `domain` (or the set's name), `split`, `max_new_tokens`, `max_prompt_tokens`, `batch_sequences`, `taps`,
            `backend`, `device`; for sampled sets also `temperature`, `repeats` and, below 1, `top_p`.
        target: Target folder.
        prompts: Prompt folder.
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
    rows = read_jsonl(prompts / f"{cfg['split']}.jsonl")
    asked = [
        _Asked(row["id"], sample, turns_of(row), "turns" in row)
        for row in rows
        for sample in range(cfg.get("repeats", 1))
    ]
    with bar(sum(one.turns for one in asked), f"answers {cfg['domain']} {cfg['split']}", "answer") as shown:
        for turn in range(max(one.turns for one in asked)):
            _answer_turn(cfg, model, tokenizer, [one for one in asked if one.goes_on(turn)], turn, shown)
    kept = [one for one in asked if not one.too_long]
    if not kept:
        raise DraftpoolError(
            f"none of {len(rows)} {cfg['split']} prompts of `{cfg['domain']}` has at most "
            f"{cfg['max_prompt_tokens']} tokens",
            f"config key `{'prompt_sets.' + cfg['domain'] if asked[0].in_session else 'responses'}.max_prompt_tokens`",
            "raise it or choose shorter prompts",
        )
    table, taps, offset = [], [], 0
    for one in kept:
        for turn, answer in enumerate(one.answers):
            table.append(
                {
                    "prompt_id": one.turn_id(turn),
                    "domain": cfg["domain"],
                    "split": cfg["split"],
                    "sample": one.sample,
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
            "too_long": len(asked) - len(kept),
        }
        write_provenance(folder, cfg, extra)


class _Asked:
    """One text to be written: a prompt and a sample of it, or a session and the answers so far."""

    def __init__(self, prompt_id: str, sample: int, messages: list[list[dict]], in_session: bool):
        self.prompt_id, self.sample = prompt_id, sample
        self.messages, self.in_session = messages, in_session
        self.answers: list[Answer] = []
        self.too_long = False

    @property
    def turns(self) -> int:
        return len(self.messages)

    def turn_id(self, turn: int) -> str:
        return turn_id(self.prompt_id, turn) if self.in_session else self.prompt_id

    def goes_on(self, turn: int) -> bool:
        return not self.too_long and turn < self.turns


def _answer_turn(cfg: dict, model, tokenizer, asked: list[_Asked], turn: int, shown) -> None:
    """Write one turn's answers, and note what has become too long."""
    prompts = []
    for one in asked:
        said = [answer.ids for answer in one.answers]
        prompts.append(prompt_ids(tokenizer, conversation(tokenizer, one.messages[: turn + 1], said)))
        one.too_long = len(prompts[-1]) > cfg["max_prompt_tokens"]
    kept = [index for index, one in enumerate(asked) if not one.too_long]
    if not kept:
        return
    longest = max(len(prompts[index]) for index in kept)
    if model.supports_batches:
        check_batch(
            model,
            min(cfg["batch_sequences"], len(kept)),
            longest + cfg["max_new_tokens"],
            longest,
            "config key `responses.batch_sequences`",
        )
    for position, answer in answer_prompts(
        model,
        [prompts[index] for index in kept],
        end_ids(tokenizer, model.hf_config),
        cfg["max_new_tokens"],
        cfg["batch_sequences"],
        True,
        cfg.get("temperature", 0.0),
        [Text(asked[index].turn_id(turn), asked[index].sample) for index in kept],
        cfg.get("top_p", 1.0),
    ):
        asked[kept[position]].answers.append(answer)
        shown.update(1)
