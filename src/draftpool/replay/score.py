"""Make the acceptance table: what every drafter would have had accepted at every anchor of the target's own answers.

A caught-up drafter's proposal depends on the prefix alone (one that remembers a stream: on the stream before it, too),
so this is known without decoding, of greedy and of sampled text.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pandas as pd
import torch
from torch import Tensor

from draftpool.artefacts import append_tables, content_hash, read_table, write_table
from draftpool.config.digest import code_digest
from draftpool.config.ids import make_key
from draftpool.decoding.pool import named_folders
from draftpool.decoding.verification import overlap, target_choices
from draftpool.drafters.base import Drafter, Everywhere, learns
from draftpool.drafters.kinds import modules_of
from draftpool.drafters.load import draft_everywhere, load_drafter
from draftpool.errors import DraftpoolError
from draftpool.progress import bar
from draftpool.replay.remembered import Remembered, remembered_drafts
from draftpool.replay.scored_rows import rows_of_draft, rows_without_draft
from draftpool.targets.base import TargetModel
from draftpool.targets.load import load_target, resolve_device

# Answers were written in batches, whose rounding may turn an exact tie; more than that is another model's text.
MAX_DISAGREEMENT = 0.01
# Anchors whose drafts the target reads at the same time.
READ_TOGETHER = 16


@torch.inference_mode()
def read_answer(target: TargetModel, prompt: list[int], answer: list[int]) -> tuple[Tensor, Tensor]:
    """Let the target read its own answer.

    Returns:
        Taps [prompt + n - 1, taps x hidden] and logits [n, vocabulary] of every answer token.
    """
    ids = prompt + answer[:-1]
    output = target.forward(torch.tensor([ids], device=target.device), target.new_cache(len(ids)))
    return output.taps[0], output.logits[0, len(prompt) - 1 :]


def read_drafts(target: TargetModel, prompt: list[int], answer: list[int]) -> Callable[[Tensor], Tensor]:
    """Prepare the target to read drafts at every anchor of an answer.

    Returns:
        A function from drafts [n - 1, k] to the target's logits [n - 1, k, vocabulary] at their slots, each given the
        draft before it.

    Raises:
        DraftpoolError: If the target reads one sequence at a time only.
    """
    if not target.supports_batches:
        raise DraftpoolError(
            "the target reads one sequence at a time", "config key `score.bd_full_prompts`", "set it to 0"
        )
    ids = torch.tensor(prompt + answer[:-1], device=target.device)
    whole = target.new_cache(len(ids))
    target.forward(ids[None], whole, "none")

    @torch.inference_mode()
    def read(drafts: Tensor) -> Tensor:
        anchors, k = drafts.shape
        together = min(READ_TOGETHER, anchors)
        cache = target.new_cache(len(ids) + k + 1, together)
        for row in range(together):
            cache.place([row], whole)
        blocks = torch.cat((ids[len(prompt) :, None], drafts), dim=1)
        found = []
        # From the back: a block overwrites what lies behind its anchor, which earlier anchors never read.
        for last in range(anchors, 0, -together):
            chosen = blocks[max(0, last - together) : last]
            if len(chosen) < together:
                cache.keep(list(range(len(chosen))))
            cache.lengths = [len(prompt) + last - len(chosen) + row for row in range(len(chosen))]
            output = target.forward(chosen, cache, counts=[0] * len(chosen))
            found.append(output.logits[:, :-1])
        return torch.cat(found[::-1])

    return read


def mean_overlap(made: Everywhere, logits: Tensor) -> list[float]:
    """BD over all slots of every draft: mean 1 - TV, logits [n - 1, k, vocabulary] given the draft before each slot."""
    # Anchor by anchor: probabilities of all tokens take many times the room of logits.
    return [
        float(overlap(log_q, p.float().softmax(dim=-1)[:, made.vocabulary]).mean())
        for log_q, p in zip(made.log_q, logits, strict=True)
    ]


def _score_answers(
    target: TargetModel,
    drafters: dict[str, Drafter],
    table: pd.DataFrame,
    options: dict,
    pool: list[str],
    remembered: Remembered,
    shown,
) -> dict[str, pd.DataFrame]:
    rows: dict[str, list[dict]] = {name: [] for name in [*drafters, *remembered]}
    tokens = disagreeing = 0
    # An answer of one token has no anchor.
    answered = table[table["response_ids"].map(len) > 1]
    for number, row in enumerate(answered.itertuples()):
        answer = [int(token) for token in row.response_ids]
        prompt = [int(token) for token in row.prompt_ids]
        taps, logits = read_answer(target, prompt, answer)
        tokens += len(answer)
        choices = target_choices(
            logits, options["temperature"], int(row.sample), row.prompt_id, 0, options.get("top_p", 1.0)
        )
        disagreeing += int((choices.cpu() != torch.tensor(answer)).sum())
        p = logits.float().softmax(dim=-1)
        # Drafters trained on the same answers have the same vocabulary, so its columns are taken once.
        columns: dict[bytes, Tensor] = {}
        read = read_drafts(target, prompt, answer) if number < options["bd_full"] else None
        common = {"prompt_id": row.prompt_id, "domain": row.domain, "repeat": int(row.sample)}
        for name, drafter in drafters.items():
            shown.update(1)
            if not drafter.fits(len(prompt) + len(answer)):
                rows[name] += [common | one for one in rows_without_draft(len(answer), drafter.k)]
                continue
            drafter.reset(len(prompt) + len(answer))
            made = draft_everywhere(drafter, prompt, answer, taps)
            own, full = p, None
            if made.log_q is not None:
                key = made.vocabulary.cpu().numpy().tobytes()
                if key not in columns:
                    columns[key] = p[:, made.vocabulary]
                own = columns[key]
                if read is not None and name in pool:
                    full = mean_overlap(made, read(made.ids))
            rows[name] += [common | one for one in rows_of_draft(made, answer, p, own, full)]
        for name, by_answer in remembered.items():
            for stream, made in by_answer.get((row.prompt_id, int(row.sample)), {}).items():
                cut = answer[: len(made.ids) + 1]
                rows[name] += [
                    common | one | {"stream": stream} for one in rows_of_draft(made, cut, p, p, None)
                ]
    print(
        f"{disagreeing} of {tokens} answer tokens are not the target's choice when read at once", flush=True
    )
    if disagreeing > MAX_DISAGREEMENT * tokens:
        raise DraftpoolError(
            f"{disagreeing} of {tokens} tokens are not the target's own",
            "responses",
            "delete the response folders and run snakemake again",
        )
    return {name: pd.DataFrame(made) for name, made in rows.items()}


def score_pool(
    cfg: dict, target: Path, responses: list[Path], drafters: list[Path], state: Path, out: Path
) -> None:
    """Write the acceptance table `acceptance.parquet` (columns in `docs/metrics.md`).

    Args:
        cfg: `answers` (of every response folder: `name`; `temperature`, `top_p`; `prompts`, how many are scored, None
            for all; `drafters`, by name, None for all; `bd_full`, answers in which the target reads every draft of the
            `pool`), `pool`, `drafters` (`learns`: it remembers streams), `streams` (that those are scored along),
            `taps`, `backend` (`device_map`), `device`.
        target: Target folder.
        responses: Response folders of held-out prompts and prompt sets, in the order of `cfg["answers"]`.
        drafters: Drafter folders in the order of `cfg["drafters"]`.
        state: Scratch folder; a drafter that was scored on a domain is not scored again.
        out: File to write.

    Raises:
        DraftpoolError: If a drafter does not fit, or the answers are not the target's own.
    """
    folders = named_folders(cfg, drafters)
    told = {drafter["name"]: drafter for drafter in cfg["drafters"]}
    code = code_digest("draftpool.replay.score")
    device = resolve_device(cfg["device"])
    model = load_target(target, cfg["taps"], device, torch.float32, cfg["backend"], cfg.get("device_map"))
    loaded: dict[str, Drafter] = {}

    def drafter_of(name: str) -> Drafter:
        if name not in loaded:
            loaded[name] = load_drafter(name, folders[name], model)
            if learns(loaded[name]) and not told[name].get("learns"):
                raise DraftpoolError(
                    "it remembers its stream, which its recipe does not say",
                    f"config key `drafters.{name}`",
                    "set `learns: true`",
                )
        return loaded[name]

    tables = {
        folder: (answers, read_table(folder / "responses.parquet").head(answers["prompts"]))
        for folder, answers in zip(responses, cfg["answers"], strict=True)
    }
    learning = [name for name, drafter in told.items() if drafter.get("learns")]
    streams = cfg.get("streams", {}) if learning else {}
    along = make_key([streams, [content_hash(folder) for folder in responses]])
    drafted = None
    work = sum(
        len(table) * len(set(answers["drafters"] or folders) - set(learning))
        for answers, table in tables.values()
    )
    parts: list[tuple[str, Path]] = []
    with bar(work, "score", "answer") as shown:
        for folder, (answers, table) in tables.items():
            scored = [
                answers["prompts"],
                answers["temperature"],
                answers.get("top_p", 1.0),
                answers["bd_full"],
            ]
            key = make_key([scored, cfg["taps"], cfg["backend"], content_hash(target, folder), code])
            cells = {}
            for name in answers["drafters"] or folders:
                end = "-full" if answers["bd_full"] > 0 and name in cfg["pool"] else ""
                end += f"-{along}" if name in learning else ""
                own = code_digest(*modules_of([told[name]["kind"]]))
                cells[name] = (
                    state.parent / f"score-{key}" / f"{content_hash(folders[name])}-{own}{end}.parquet"
                )
            missing = [name for name, cell in cells.items() if not cell.exists()]
            frozen = [name for name in missing if name not in learning]
            shown.update(len(table) * (len(set(cells) - set(learning)) - len(frozen)))
            if missing:
                if drafted is None:
                    drafted = remembered_drafts(
                        [drafter_of(name) for name in learning], tables.values(), streams
                    )
                found = _score_answers(
                    model,
                    {name: drafter_of(name) for name in frozen},
                    table,
                    answers,
                    cfg["pool"],
                    {name: drafted[name] for name in missing if name in learning},
                    shown,
                )
                for name, made in found.items():
                    write_table(cells[name], made)
            parts += [(name, cell) for name, cell in cells.items()]
    append_tables(out, [(cell, {"drafter": name}) for name, cell in parts])
