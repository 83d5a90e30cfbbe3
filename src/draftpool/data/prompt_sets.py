"""Stage prepare_set: held-out prompts of several domains, reworded, to be sampled, or joined to sessions."""

from __future__ import annotations

import hashlib
from pathlib import Path

import torch

from draftpool import draws
from draftpool.artefacts import atomic_dir, canonical_json, read_jsonl, write_jsonl, write_provenance
from draftpool.data.reword import REASONING, TEMPLATES, framed, reworded_by_model, typos
from draftpool.errors import DraftpoolError
from draftpool.targets.load import load_target, load_tokenizer, resolve_device


def prepare_set(cfg: dict, prompts: list[Path], model: Path | None, out: Path) -> None:
    """Write `eval.jsonl` of a prompt set: the domains' rows with their own `id`, `domain` (the set's name),
    `base_domain`, `base_id` and the new `prompt`; sessions have `turns` (each content, base_domain, base_id).

    Args:
        cfg: `name`, `kind`, `domains`, `prompts_per_domain`, `seed` and the options of the kind; `how: llm` also
            `backend` (`device_map`), `device` and `batch_sequences`.
        prompts: Prompt folders of the domains.
        model: Folder of the rewording model, for `how: llm`.
        out: Folder to write.

    Raises:
        DraftpoolError: If a domain has too few held-out prompts, or sessions have more turns than there are domains.
    """
    rows = _base_rows(cfg, prompts)
    if cfg["kind"] == "sessions":
        made = _sessions(cfg, rows)
    else:
        texts = [row["prompt"][0]["content"] for row in rows]
        made = [
            row | _named(cfg, row) | {"prompt": [{"role": "user", "content": text}]}
            for row, text in zip(rows, _texts(cfg, rows, texts, model), strict=True)
        ]
    with atomic_dir(out) as folder:
        write_jsonl(folder / "eval.jsonl", made)
        write_provenance(folder, cfg)


def _base_rows(cfg: dict, prompts: list[Path]) -> list[dict]:
    rows = []
    for domain, folder in zip(cfg["domains"], prompts, strict=True):
        own = read_jsonl(folder / "eval.jsonl")[: cfg["prompts_per_domain"]]
        if len(own) < cfg["prompts_per_domain"]:
            raise DraftpoolError(
                f"{domain} has {len(own)} held-out prompts, {cfg['prompts_per_domain']} wanted",
                f"config key `prompt_sets.{cfg['name']}.prompts_per_domain`",
                "lower it or raise the domain's `eval`",
            )
        rows += own
    return rows


def _id(cfg: dict, base: list[str]) -> str:
    digest = hashlib.sha256(canonical_json([cfg["seed"], base]).encode()).hexdigest()
    return f"{cfg['name']}-{digest[:12]}"


def _named(cfg: dict, row: dict) -> dict:
    return {
        "id": _id(cfg, [row["id"]]),
        "domain": cfg["name"],
        "base_domain": row["domain"],
        "base_id": row["id"],
    }


def _texts(cfg: dict, rows: list[dict], texts: list[str], model: Path | None) -> list[str]:
    """What the user writes now."""
    if cfg["kind"] == "sampled":
        return texts
    how = cfg["how"]
    if how == "llm":
        device = resolve_device(cfg["device"])
        rewording = load_target(model, None, device, torch.float32, cfg["backend"], cfg.get("device_map"))
        return reworded_by_model(texts, rewording, load_tokenizer(model), cfg["batch_sequences"])
    keys = [(cfg["seed"], row["id"]) for row in rows]
    if how == "typos":
        return [typos(text, cfg["rate"], *key) for text, key in zip(texts, keys, strict=True)]
    frames = REASONING if how == "reasoning" else TEMPLATES
    return [framed(text, frames, *key) for text, key in zip(texts, keys, strict=True)]


def _sessions(cfg: dict, rows: list[dict]) -> list[dict]:
    """Sessions of turns from different domains; every prompt is used once, but for a rest of the domains."""
    domains, turns = cfg["domains"], cfg["turns"]
    if turns > len(domains):
        raise DraftpoolError(
            f"{turns} turns from {len(domains)} domains",
            f"config key `prompt_sets.{cfg['name']}.turns`",
            "every turn comes from another domain: lower it or name more",
        )
    by_domain = {domain: [row for row in rows if row["domain"] == domain] for domain in domains}
    made = []
    for place in range(cfg["prompts_per_domain"]):
        order = draws.generator("sessions", cfg["seed"], place).permutation(len(domains))
        for first in range(0, len(domains) - turns + 1, turns):
            own = [by_domain[domains[index]][place] for index in order[first : first + turns]]
            session = _id(cfg, [row["id"] for row in own])
            spoken = [
                {"content": row["prompt"][0]["content"], "base_domain": row["domain"], "base_id": row["id"]}
                for row in own
            ]
            made.append(
                {
                    "id": session,
                    "domain": cfg["name"],
                    "split": "eval",
                    "prompt": own[0]["prompt"],
                    "turns": spoken,
                }
            )
    return made
