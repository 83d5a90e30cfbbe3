"""Streams: the order in which evaluation prompts meet the selectors."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from draftpool import draws
from draftpool.artefacts import read_jsonl
from draftpool.errors import DraftpoolError


@dataclass(frozen=True)
class StreamItem:
    """One prompt of a stream with its token ids and its place."""

    prompt_id: str
    domain: str
    ids: list[int]
    index: int


Item = TypeVar("Item")


def ordered(items: list[Item], order: str, seed: int) -> list[Item]:
    """Items that come domain after domain (`blocks`), or the same `shuffled` by a seed."""
    if order != "shuffled":
        return items
    return [items[place] for place in draws.generator("stream", seed).permutation(len(items))]


def build_stream(
    prompts: list[Path],
    tokenise,
    max_prompt_tokens: int,
    prompts_per_domain: int,
    order: str = "blocks",
    seed: int = 0,
) -> list[StreamItem]:
    """Take the first held-out prompts of every domain and put them in order.

    Args:
        prompts: Prompt folders, one a domain.
        tokenise: Maps chat messages to token ids.
        max_prompt_tokens: Longer prompts are passed over, as they are in the acceptance table.
        prompts_per_domain: Prompts of each domain.
        order: `blocks` (domain after domain) or `shuffled`.
        seed: Seed of the order.

    Raises:
        DraftpoolError: If a domain has too few prompts.
    """
    items = []
    for folder in prompts:
        taken = []
        for row in read_jsonl(folder / "eval.jsonl"):
            ids = tokenise(row["prompt"])
            if len(ids) <= max_prompt_tokens:
                taken.append((row["id"], row["domain"], ids))
            if len(taken) == prompts_per_domain:
                break
        if len(taken) < prompts_per_domain:
            raise DraftpoolError(
                f"only {len(taken)} held-out prompts of at most {max_prompt_tokens} tokens, "
                f"{prompts_per_domain} wanted",
                str(folder),
                "lower prompts_per_domain or raise the domain's `eval`",
            )
        items += taken
    items = ordered(items, order, seed)
    return [StreamItem(prompt_id, domain, ids, index) for index, (prompt_id, domain, ids) in enumerate(items)]
