"""The losslessness gate: float32 tokens must equal plain decoding; in bfloat16 the differences are measured."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from draftpool.artefacts import write_json
from draftpool.decoding.engine import decode, top2_margin
from draftpool.decoding.pool import Workbench, load_workbench, named_folders
from draftpool.decoding.sequence import Sampling, prefill
from draftpool.drafters.base import learns
from draftpool.errors import DraftpoolError
from draftpool.progress import progress
from draftpool.selectors.base import make_selector
from draftpool.targets.base import TargetModel

# A flip between block widths is a tie of half precision up to this many 99th percentiles of its logit error.
MARGIN_FACTOR = 4.0
# Drafters that take turns on one prompt.
GROUP = 5


def first_difference(a: list[int], b: list[int]) -> int:
    """Index of the first difference of two token lists, -1 if they are equal."""
    for place, (left, right) in enumerate(zip(a, b, strict=False)):
        if left != right:
            return place
    return -1 if len(a) == len(b) else min(len(a), len(b))


def gate_groups(names: list[str], prompts: int) -> list[list[str]]:
    """Drafters that take turns on each prompt: few enough to come again and again, another group on every prompt.

    Each drafter is in as many groups as the others, but for one.
    """
    size = min(GROUP, len(names))
    turning = names * (1 + prompts * size // len(names))
    return [turning[prompt * size : (prompt + 1) * size] for prompt in range(prompts)]


def _float32_report(bench: Workbench, items: list, max_new_tokens: int) -> tuple[dict, dict[str, list[int]]]:
    """Decode every prompt plainly and with drafters in turn, so that each drafts, idles and catches up."""
    groups = gate_groups(list(bench.drafters), len(items))
    k_pool = max(drafter.k for drafter in bench.drafters.values())
    sampling = Sampling(max_new_tokens, bench.ends)
    report = {"prompts": len(items), "tokens": 0, "drafted": 0, "accepted": 0, "rejected": 0, "mismatches": 0}
    report["rounds"] = dict.fromkeys(bench.drafters, 0)
    texts = {}
    for item, names in zip(progress(items, len(items), "lossless float32", "prompt"), groups, strict=True):
        start = prefill(bench.target, item.ids, max_new_tokens, k_pool)
        plain = decode(
            bench.target,
            start,
            {"plain": None},
            make_selector({"kind": "plain"}, ["plain"]),
            sampling,
            k_pool,
            item.prompt_id,
        )
        mixed = decode(
            bench.target,
            start,
            {name: bench.drafters[name] for name in names},
            make_selector({"kind": "round_robin"}, names),
            sampling,
            k_pool,
            item.prompt_id,
        )
        texts[item.prompt_id] = plain.tokens
        for drafter in bench.drafters.values():
            if learns(drafter):
                drafter.remember(plain.tokens)
        drafted, accepted = (sum(row[name] for row in mixed.rounds) for name in ("n_drafted", "n_accepted"))
        report["tokens"] += len(plain.tokens)
        for row in mixed.rounds:
            report["rounds"][row["arm"]] += 1
        report["drafted"] += drafted
        report["accepted"] += accepted
        report["rejected"] += drafted - accepted
        place = first_difference(plain.tokens, mixed.tokens)
        if place >= 0:
            report["mismatches"] += 1
            print(f"prompt {item.prompt_id} differs from plain decoding at token {place}", flush=True)
    return report, texts


def _widths(target: TargetModel, prompt: list[int], answer: list[int], width: int) -> torch.Tensor:
    """Logits [n, vocabulary] of an answer's positions 1 .. n, read in blocks of ``width`` tokens."""
    cache = target.new_cache(len(prompt) + len(answer))
    target.forward(torch.tensor([prompt], device=target.device), cache, "none")
    ids = torch.tensor([answer], device=target.device)
    parts = [
        target.forward(ids[:, place : place + width], cache).logits[0].float()
        for place in range(0, len(answer), width)
    ]
    return torch.cat(parts)


def _bfloat16_report(
    exact: TargetModel, half: TargetModel, items: list, texts: dict[str, list[int]], width: int
) -> dict:
    """Compare one-token with block reading in bfloat16, and both with float32, on float32's own answers."""
    flips, margins, differences, all_margins, positions = 0, [], [], [], 0
    for item in progress(items, len(items), "bfloat16", "prompt"):
        answer = texts[item.prompt_id]
        single, block = (_widths(half, item.ids, answer, size) for size in (1, width))
        reference = _widths(exact, item.ids, answer, width)
        differences.append((block - reference).abs().flatten()[::17])
        changed = single.argmax(dim=-1) != block.argmax(dim=-1)
        margin = top2_margin(single)
        flips += int(changed.sum())
        margins += margin[changed].tolist()
        all_margins.append(margin)
        positions += len(answer)
    p99 = float(np.quantile(torch.cat(differences).cpu().numpy(), 0.99))
    return {
        "positions": positions,
        "flips": flips,
        "rate": flips / positions,
        "logit_diff_p99": p99,
        "margin_bound": MARGIN_FACTOR * p99,
        "max_flip_margin": max(margins, default=0.0),
        "flip_margins": margins,
        "median_top2_margin": float(torch.cat(all_margins).median()),
    }


def check_lossless(cfg: dict, target: Path, prompts: list[Path], drafters: list[Path], out: Path) -> None:
    """Write `lossless.json`, or fail.

    Args:
        cfg: `prompts_per_domain`, `max_new_tokens`, `max_prompt_tokens`, `bfloat16_prompts`, `drafters`,
            `taps`, `backend` (`device_map`), `device`, `seed`.
        target: Target folder.
        prompts: Prompt folders, one a domain.
        drafters: Drafter folders in the order of `cfg["drafters"]`.
        out: File to write.

    Raises:
        DraftpoolError: If a float32 text differs from plain decoding, nothing was drafted, accepted or rejected or a
            drafter had no second turn (the check would be empty), or a bfloat16 flip is larger than rounding explains.
    """
    folders = named_folders(cfg, drafters)
    bench = load_workbench(cfg, target, folders, torch.float32)
    items = bench.stream(prompts, cfg["max_prompt_tokens"], cfg["prompts_per_domain"], "blocks", cfg["seed"])
    report, texts = _float32_report(bench, items, cfg["max_new_tokens"])
    if report["mismatches"]:
        raise DraftpoolError(
            f"{report['mismatches']} of {report['prompts']} float32 texts differ from plain decoding",
            "check_lossless",
            "this is a bug: please report it with the log",
        )
    idle = [name for name, rounds in report["rounds"].items() if rounds < 2]
    if idle:
        raise DraftpoolError(
            f"{', '.join(idle)} had no second turn, so the check says nothing of it",
            "check_lossless",
            "raise lossless.prompts_per_domain or lossless.max_new_tokens",
        )
    empty = [name for name in ("drafted", "accepted", "rejected") if report[name] == 0]
    if empty:
        raise DraftpoolError(
            f"nothing was {empty[0]}, so the check shows nothing",
            "check_lossless",
            "train the drafters longer or use more prompts",
        )
    half_report = None
    if cfg["bfloat16_prompts"]:
        width = max(drafter.k for drafter in bench.drafters.values()) + 1
        half = load_workbench(cfg, target, {}, torch.bfloat16).target
        step = max(1, len(items) // cfg["bfloat16_prompts"])
        half_report = _bfloat16_report(
            bench.target, half, items[::step][: cfg["bfloat16_prompts"]], texts, width
        )
        if half_report["max_flip_margin"] > half_report["margin_bound"]:
            raise DraftpoolError(
                f"bfloat16 changed a token whose margin is {half_report['max_flip_margin']:.3f}, "
                f"more than {half_report['margin_bound']:.3f}",
                "check_lossless",
                "this is more than rounding: please report it with the log",
            )
    write_json(out, {"float32": report, "bfloat16": half_report})
