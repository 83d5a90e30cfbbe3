"""Drafts of drafters that remember their stream, at every anchor of every stream.

What such a drafter proposes depends on what was written before in the stream, whichever arm drafted it; its memory is
empty where a selector, seed or repeat begins. Under `match` the texts are the target's own, so one walk along each
stream is what every selector would see.
"""

from __future__ import annotations

from collections.abc import Iterable

import pandas as pd
import torch

from draftpool.analysis.sessions import with_sessions
from draftpool.data.streams import stream_prompts
from draftpool.drafters.base import Drafter, Everywhere
from draftpool.drafters.load import draft_everywhere

# Drafter -> (prompt, repeat) -> stream -> drafts.
Remembered = dict[str, dict[tuple[str, int], dict[str, Everywhere]]]


def remembered_drafts(
    drafters: list[Drafter], tables: Iterable[tuple[dict, pd.DataFrame]], streams: dict[str, dict]
) -> Remembered:
    """Walk along every stream.

    Args:
        drafters: Drafters that learn and read no taps.
        tables: Answers of every domain and prompt set.
        streams: Name -> domains, prompts_per_domain, order, seed, limit.
    """
    found: Remembered = {drafter.name: {} for drafter in drafters}
    if not drafters:
        return found
    answers = with_sessions(pd.concat([table for _, table in tables], ignore_index=True))
    for name, options in streams.items():
        # Prompts with an anchor, as the replay takes them from the acceptance table.
        prompts = stream_prompts(answers[answers["response_ids"].map(len) > 1], options)
        own = answers[answers["session"].isin(prompts)]
        place = {prompt: index for index, prompt in enumerate(prompts)}
        own = own.assign(place=own["session"].map(place)).sort_values(
            ["sample", "place", "turn"], kind="stable"
        )
        for drafter in drafters:
            for repeat, written in own.groupby("sample", sort=True):
                drafter.memory = drafter.new_memory()
                for row in written.itertuples():
                    prompt = [int(token) for token in row.prompt_ids]
                    answer = [int(token) for token in row.response_ids][: options["limit"]]
                    if len(answer) > 1:
                        drafter.reset(len(prompt) + len(answer))
                        taps = torch.zeros(len(prompt) + len(answer) - 1, 0)
                        made = draft_everywhere(drafter, prompt, answer, taps)
                        found[drafter.name].setdefault((row.prompt_id, int(repeat)), {})[name] = made
                    drafter.remember(answer)
    return found
