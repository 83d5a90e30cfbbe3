"""Streams: the order in which evaluation prompts meet the selectors."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from draftpool import draws
from draftpool.artefacts import read_jsonl
from draftpool.errors import DraftpoolError

if TYPE_CHECKING:
    import pandas as pd

# The stream of all held-out answers of the domains that are trained on, at full length; every replay has it.
HELD_OUT = "heldout"
# The study's own pool, beside which further ones are replayed.
MAIN = "main"


@dataclass(frozen=True)
class StreamItem:
    """One prompt of a stream with its token ids and its place; a session has the messages of all its turns.

    Attributes:
        prompt_id: Of the prompt or session.
        domain: Domain or prompt set.
        ids: Of the (first) prompt.
        index: Place in the stream.
        turns: Messages of every turn; None for a prompt that is no session.
    """

    prompt_id: str
    domain: str
    ids: list[int]
    index: int
    turns: list[list[dict]] | None = None


def session_of(prompt_id: str) -> tuple[str, int]:
    """Session and turn of a prompt; a prompt outside sessions is its own session."""
    session, _, turn = prompt_id.partition(".")
    return session, int(turn or 0)


def turn_id(session: str, turn: int) -> str:
    """Name of a turn."""
    return f"{session}.{turn}"


def turns_of(row: dict) -> list[list[dict]]:
    """Messages of every turn of a prompt's row: one turn, unless it is a session."""
    if "turns" in row:
        return [[{"role": "user", "content": turn["content"]}] for turn in row["turns"]]
    return [row["prompt"]]


def conversation(tokenizer, turns: list[list[dict]], answers: list[list[int]]) -> list[dict]:
    """Messages up to the last of these turns, the target's own answers to the earlier ones between them."""
    messages: list[dict] = []
    for place, spoken in enumerate(turns):
        messages += spoken
        if place < len(turns) - 1:
            said = tokenizer.decode(answers[place], skip_special_tokens=True)
            messages.append({"role": "assistant", "content": said})
    return messages


Item = TypeVar("Item")


def ordered(items: list[Item], order: str, seed: int) -> list[Item]:
    """Items that come domain after domain (`blocks`), or the same `shuffled` by a seed."""
    if order != "shuffled":
        return items
    return [items[place] for place in draws.generator("stream", seed).permutation(len(items))]


def stream_prompts(table: pd.DataFrame, stream: dict) -> list[str]:
    """Prompts (or sessions) of a stream of answered prompts, in its order.

    Args:
        table: Columns domain, session; every domain's held-out prompts in their order.
        stream: `domains`, `prompts_per_domain`, `order`, `seed`.

    Raises:
        DraftpoolError: If a domain has too few scored prompts.
    """
    taken = []
    for domain in stream["domains"]:
        own = table.loc[table["domain"] == domain, "session"].drop_duplicates().tolist()
        wanted = stream["prompts_per_domain"] or max(1, len(own))
        if len(own) < wanted:
            raise DraftpoolError(
                f"only {len(own)} scored prompts of {domain}, {wanted} wanted",
                "stream",
                "raise score.prompts_per_domain or lower the stream's prompts_per_domain",
            )
        taken += own[:wanted]
    return ordered(taken, stream["order"], stream["seed"])


def build_stream(
    prompts: list[Path],
    tokenise,
    max_prompt_tokens: int,
    prompts_per_domain: int | None,
    order: str = "blocks",
    seed: int = 0,
    answered: set[str] | None = None,
) -> list[StreamItem]:
    """Take the first held-out prompts of every domain and put them in order.

    Args:
        prompts: Prompt folders, one a domain.
        tokenise: Maps chat messages to token ids.
        max_prompt_tokens: Longer prompts are passed over, as they are in the acceptance table.
        prompts_per_domain: Prompts (or sessions) of each domain or prompt set; None: all.
        order: `blocks` (domain after domain) or `shuffled`.
        seed: Seed of the order.
        answered: Sessions that were answered to their end; others, whose later turns are too long, are passed over.

    Raises:
        DraftpoolError: If a domain has too few prompts.
    """
    items = []
    for folder in prompts:
        taken = []
        for row in read_jsonl(folder / "eval.jsonl"):
            ids, session = tokenise(row["prompt"]), "turns" in row
            whole = not session or answered is None or row["id"] in answered
            if whole and len(ids) <= max_prompt_tokens:
                taken.append((row["id"], row["domain"], ids, turns_of(row) if session else None))
            if len(taken) == prompts_per_domain:
                break
        if len(taken) < (prompts_per_domain or 1):
            raise DraftpoolError(
                f"only {len(taken)} held-out prompts of at most {max_prompt_tokens} tokens, "
                f"{prompts_per_domain or 1} wanted",
                str(folder),
                "lower prompts_per_domain or raise the domain's `eval`",
            )
        items += taken
    items = ordered(items, order, seed)
    return [
        StreamItem(prompt_id, domain, ids, index, turns)
        for index, (prompt_id, domain, ids, turns) in enumerate(items)
    ]
