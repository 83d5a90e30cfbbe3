"""Make the acceptance table: one pass over the target's own answers, all anchors at once, with the training mask.

A caught-up block drafter's proposal depends on the prefix alone, so what it would have had accepted at every anchor
of the target's text, greedy or sampled, is known without decoding.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pandas as pd
import torch
from torch import Tensor

from draftpool.artefacts import content_hash, read_table, write_table
from draftpool.config.digest import code_digest
from draftpool.config.ids import make_key
from draftpool.decoding.pool import named_folders
from draftpool.decoding.verification import overlap, target_choices, target_probabilities
from draftpool.drafters.block import BlockDrafterModel
from draftpool.drafters.block_live import load_model
from draftpool.errors import DraftpoolError
from draftpool.progress import bar
from draftpool.targets.base import TargetModel
from draftpool.targets.load import load_target, resolve_device
from draftpool.training.batches import context_bias

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


@torch.inference_mode()
def score_answer(
    model: BlockDrafterModel,
    prompt_length: int,
    answer: list[int],
    taps: Tensor,
    p: Tensor,
    read: Callable[[Tensor], Tensor] | None = None,
) -> list[dict]:
    """Acceptance of one drafter at every anchor of one answer.

    Args:
        model: The drafter.
        prompt_length: Tokens of the prompt.
        answer: The target's own ids [n].
        taps: [prompt + n - 1, taps x hidden].
        p: The target's probabilities [n, draft vocabulary] at every answer token, columns as the drafter's.
        read: The target's probabilities [anchors * k, draft vocabulary] at the slots of drafts [anchors, k], each slot
            given the draft before it; without it `reward_bd_full` is not known.

    Returns:
        One row per anchor position 0 .. n - 2: position, left, k, accepted, committed, censored, gamma, reward_bd,
        reward_bd_full.
    """
    n, k, device = len(answer), model.config.block_size - 1, taps.device
    places = torch.arange(n - 1, device=device)
    positions = (prompt_length + places)[None]
    context = model.context(taps[None], torch.arange(taps.shape[0], device=device)[None])
    ids = torch.tensor(answer, device=device)
    hidden = model.blocks(
        ids[None, :-1], positions, context, context_bias(positions, taps.shape[0]).to(taps.dtype)
    )[0]
    log_q = model.logits(hidden).float().log_softmax(dim=-1)
    # Index of the answer token that slot j of anchor t proposes: t + 1 + j; slots behind the end are left out.
    index = places[:, None] + 1 + torch.arange(k, device=device)
    inside = index < n
    proposed = model.vocabulary[log_q.argmax(dim=-1)]
    full = [float("nan")] * (n - 1)
    if read is not None:
        full = overlap(log_q.flatten(0, 1), read(proposed)).reshape(n - 1, k).mean(dim=1).tolist()
    agree = (proposed == ids[index.clamp(max=n - 1)]) & inside
    matched = agree.long().cumprod(dim=1).sum(dim=1).tolist()
    gamma = torch.zeros(index.shape, device=device)
    gamma[inside] = overlap(log_q[inside], p[index[inside]])
    gamma = gamma.cpu().numpy()
    rows = []
    for place in range(n - 1):
        left = n - 1 - place
        accepted = matched[place]
        slots = min(accepted + 1, k, left)
        rows.append(
            {
                "position": place,
                "left": left,
                "k": k,
                "accepted": accepted,
                "committed": min(accepted + 1, left),
                "censored": accepted == min(k, left),
                "gamma": gamma[place, : min(k, left)],
                "reward_bd": float(gamma[place, :slots].mean()),
                "reward_bd_full": full[place],
            }
        )
    return rows


@torch.inference_mode()
def read_drafts(
    target: TargetModel, prompt: list[int], answer: list[int], vocabulary: Tensor
) -> Callable[[Tensor], Tensor]:
    """Make the function that lets the target read drafts [anchors, k] at every anchor of its answer.

    What it says behind a rejected token stands on the drafter's own wrong token, as in live decoding (MetaSD's BD of
    all slots); the answer alone does not show it. Returned are probabilities [anchors * k, draft vocabulary].

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
            found.append(target_probabilities(output.logits[:, :-1].flatten(0, 1), vocabulary))
        return torch.cat(found[::-1])

    return read


def _score_answers(
    target: TargetModel,
    models: dict[str, BlockDrafterModel],
    table: pd.DataFrame,
    options: dict,
    pool: list[str],
    shown,
) -> dict[str, pd.DataFrame]:
    rows: dict[str, list[dict]] = {name: [] for name in models}
    tokens = disagreeing = 0
    # An answer of one token has no anchor.
    answered = table[table["response_ids"].map(len) > 1]
    for number, row in enumerate(answered.itertuples()):
        answer = [int(token) for token in row.response_ids]
        prompt = [int(token) for token in row.prompt_ids]
        taps, logits = read_answer(target, prompt, answer)
        tokens += len(answer)
        choices = target_choices(logits, options["temperature"], int(row.sample), row.prompt_id, 0)
        disagreeing += int((choices.cpu() != torch.tensor(answer)).sum())
        # Drafters trained on the same answers have the same vocabulary, so its columns are taken once.
        columns: dict[bytes, Tensor] = {}
        readers: dict[bytes, Callable[[Tensor], Tensor]] = {}
        for name, model in models.items():
            key = model.vocabulary.cpu().numpy().tobytes()
            if key not in columns:
                columns[key] = target_probabilities(logits, model.vocabulary)
                if number < options["bd_full"]:
                    readers[key] = read_drafts(target, prompt, answer, model.vocabulary)
            common = {"prompt_id": row.prompt_id, "domain": row.domain, "repeat": int(row.sample)}
            read = readers.get(key) if name in pool else None
            scored = score_answer(model, len(prompt), answer, taps, columns[key], read)
            rows[name] += [common | one for one in scored]
            shown.update(1)
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
        cfg: `answers` (of every response folder: `name`; `temperature`; `prompts`, how many are scored, None for all;
            `drafters`, by name, None for all; `bd_full`, answers in which the target reads every draft of the `pool`),
            `pool`, `drafters`, `taps`, `backend`, `device`.
        target: Target folder.
        responses: Response folders of held-out prompts and prompt sets, in the order of `cfg["answers"]`.
        drafters: Drafter folders in the order of `cfg["drafters"]`.
        state: Scratch folder; a drafter that was scored on a domain is not scored again.
        out: File to write.

    Raises:
        DraftpoolError: If a drafter does not fit, or the answers are not the target's own.
    """
    folders = named_folders(cfg, drafters)
    code = code_digest("draftpool.replay.score")
    device = resolve_device(cfg["device"])
    model = load_target(target, cfg["taps"], device, torch.float32, cfg["backend"])
    parts, loaded = [], {}
    tables = {
        folder: (answers, read_table(folder / "responses.parquet").head(answers["prompts"]))
        for folder, answers in zip(responses, cfg["answers"], strict=True)
    }
    work = sum(len(table) * len(answers["drafters"] or folders) for answers, table in tables.values())
    with bar(work, "score", "answer") as shown:
        for folder, (answers, table) in tables.items():
            scored = [answers["prompts"], answers["temperature"], answers["bd_full"]]
            key = make_key([scored, cfg["taps"], cfg["backend"], content_hash(target, folder), code])
            cells = {
                name: state.parent
                / f"score-{key}"
                / f"{content_hash(folders[name])}{'-full' * (answers['bd_full'] > 0 and name in cfg['pool'])}.parquet"
                for name in answers["drafters"] or folders
            }
            missing = [name for name, cell in cells.items() if not cell.exists()]
            shown.update(len(table) * (len(cells) - len(missing)))
            for name in missing:
                if name not in loaded:
                    loaded[name] = load_model(folders[name], model)
            for name, made in (
                _score_answers(
                    model, {name: loaded[name] for name in missing}, table, answers, cfg["pool"], shown
                )
                if missing
                else {}
            ).items():
                write_table(cells[name], made)
            parts += [read_table(cell).assign(drafter=name) for name, cell in cells.items()]
    acceptance = pd.concat(parts, ignore_index=True)
    k_pool = int(acceptance.k.max())
    write_table(out, acceptance.assign(reward_be=acceptance.accepted / k_pool))
