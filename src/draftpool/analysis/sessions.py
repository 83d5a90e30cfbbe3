"""Sessions in tables of live decoding: the turns of one conversation are one query of the selector."""

from __future__ import annotations

import pandas as pd

from draftpool.analysis.metrics import SEQUENCE_KEY
from draftpool.data.streams import session_of


def with_sessions(table: pd.DataFrame) -> pd.DataFrame:
    """The table with the `session` that each prompt belongs to (itself, outside sessions) and its `turn`."""
    named = {prompt: session_of(prompt) for prompt in table["prompt_id"].unique()}
    prompts = table["prompt_id"].astype(str)
    return table.assign(
        session=prompts.map({prompt: session for prompt, (session, _) in named.items()}),
        turn=prompts.map({prompt: turn for prompt, (_, turn) in named.items()}),
    )


def join_turns(steps: pd.DataFrame, sequences: pd.DataFrame) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Step and sequence tables in which a session is one sequence: its rounds numbered on, its times added up.

    Tokens of the prefill are counted once, as in an answer that is no session.
    """
    numbered = with_sessions(sequences)
    if (numbered["turn"] == 0).all() and (numbered["session"] == numbered["prompt_id"]).all():
        return steps, sequences
    counts = ["n_tokens", "plain_n_tokens"]
    sums = ["rounds", "wall_time", "t_prefill", "plain_wall_time"]
    numbered = numbered.assign(**{name: numbered[name] - 1 for name in counts}, prompt_id=numbered["session"])
    numbered = numbered.sort_values([*SEQUENCE_KEY, "turn"], kind="stable").drop(columns=["session", "turn"])
    how = {name: "sum" if name in counts + sums else "first" for name in numbered if name not in SEQUENCE_KEY}
    joined = numbered.groupby(SEQUENCE_KEY, observed=True, as_index=False).agg(how | {"matches_plain": "all"})
    joined = joined.assign(**{name: joined[name] + 1 for name in counts})
    played = with_sessions(steps)
    played = played.assign(prompt_id=played["session"])
    played = played.sort_values([*SEQUENCE_KEY, "turn", "round"], kind="stable")
    number = played.groupby(SEQUENCE_KEY, observed=True).cumcount()
    return played.assign(round=number).drop(columns=["session", "turn"]), joined
