"""The target's own answers, written in batches, together with the taps that drafters are trained on."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pandas as pd
import torch

from draftpool.artefacts import atomic_dir, read_jsonl, write_provenance, write_table
from draftpool.data.generation import Answer, Text, answer_prompts
from draftpool.data.streams import conversation, turn_id, turns_of
from draftpool.data.taps import TapWriter
from draftpool.errors import DraftpoolError
from draftpool.progress import bar
from draftpool.targets.load import end_ids, load_target, load_tokenizer, prompt_ids, resolve_device
from draftpool.targets.memory import check_batch


def repetition(ids: list[int], n: int = 4) -> float:
    """Share of n-grams that occurred before in the same text (loops are easy to draft)."""
    grams = [tuple(ids[start : start + n]) for start in range(len(ids) - n + 1)]
    return 0.0 if not grams else 1.0 - len(Counter(grams)) / len(grams)


def generate_responses(cfg: dict, target: Path, prompts: Path, out: Path) -> None:
    """Write `responses.parquet` and shards of taps for one domain and split, or for one prompt set.

    Taps are written as answers end (:mod:`draftpool.data.taps`), so memory does not grow with their number. Answers lie
    in the order in which they ended, the table's rows in the prompts' order. In a session every turn is a row, whose
    prompt holds the turns and the answers before it; if a later turn becomes too long, no row leads to the taps of the
    session's earlier turns.

    Args:
        cfg: `domain` (or the set's name), `split`, `max_new_tokens`, `max_prompt_tokens`, `batch_sequences`, `taps`,
            `backend` (`device_map`), `device`; for sampled sets also `temperature`, `repeats` and, below 1, `top_p`.
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
    model = load_target(target, cfg["taps"], device, dtype, cfg["backend"], cfg.get("device_map"))
    tokenizer = load_tokenizer(target)
    rows = read_jsonl(prompts / f"{cfg['split']}.jsonl")
    asked = [
        _Asked(row["id"], sample, turns_of(row), "turns" in row)
        for row in rows
        for sample in range(cfg.get("repeats", 1))
    ]
    with atomic_dir(out) as folder:
        writer = TapWriter(folder)
        with bar(
            sum(one.turns for one in asked), f"answers {cfg['domain']} {cfg['split']}", "answer"
        ) as shown:
            for turn in range(max(one.turns for one in asked)):
                going_on = [one for one in asked if one.goes_on(turn)]
                _answer_turn(cfg, model, tokenizer, going_on, turn, writer, shown)
        kept = [one for one in asked if not one.too_long]
        if not kept:
            block = f"prompt_sets.{cfg['domain']}" if asked[0].in_session else "responses"
            raise DraftpoolError(
                f"none of {len(rows)} {cfg['split']} prompts of `{cfg['domain']}` has at most "
                f"{cfg['max_prompt_tokens']} tokens",
                f"config key `{block}.max_prompt_tokens`",
                "raise it or choose shorter prompts",
            )
        table = [row for one in kept for row in one.rows(cfg)]
        shards = writer.close()
        write_table(folder / "responses.parquet", pd.DataFrame(table))
        extra = {
            "device": str(device),
            "dtype": str(dtype),
            "answers": len(table),
            "tokens": sum(len(row["response_ids"]) for row in table),
            "too_long": len(asked) - len(kept),
            "shards": shards,
        }
        write_provenance(folder, cfg, extra)


class _Asked:
    """One text to be written: a prompt and a sample of it, or a session and the answers so far."""

    def __init__(self, prompt_id: str, sample: int, messages: list[list[dict]], in_session: bool):
        self.prompt_id, self.sample = prompt_id, sample
        self.messages, self.in_session = messages, in_session
        self.answers: list[Answer] = []
        # Of every answer: shard of its taps, and row they begin at.
        self.places: list[tuple[int, int]] = []
        self.too_long = False

    @property
    def turns(self) -> int:
        return len(self.messages)

    def turn_id(self, turn: int) -> str:
        return turn_id(self.prompt_id, turn) if self.in_session else self.prompt_id

    def goes_on(self, turn: int) -> bool:
        return not self.too_long and turn < self.turns

    def keep(self, answer: Answer, writer: TapWriter) -> None:
        self.places.append(writer.add(answer.taps))
        answer.taps = None
        self.answers.append(answer)

    def rows(self, cfg: dict) -> list[dict]:
        """Rows of the table, one a turn."""
        return [
            {
                "prompt_id": self.turn_id(turn),
                "domain": cfg["domain"],
                "split": cfg["split"],
                "sample": self.sample,
                "prompt_ids": answer.prompt,
                "response_ids": answer.ids,
                "finish": answer.finish,
                "repetition": repetition(answer.ids),
                "taps_shard": shard,
                "prompt_offset": offset,
                "response_offset": offset + len(answer.prompt),
            }
            for turn, (answer, (shard, offset)) in enumerate(zip(self.answers, self.places, strict=True))
        ]


def _answer_turn(
    cfg: dict, model, tokenizer, asked: list[_Asked], turn: int, writer: TapWriter, shown
) -> None:
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
        asked[kept[position]].keep(answer, writer)
        shown.update(1)
