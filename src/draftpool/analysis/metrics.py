"""Named metrics of speculative decoding, each defined once (docs/metrics.md), and checks of their tables.

Everything derives from two tables: the step table (what a decoder did) and the acceptance table (what every
drafter would have done at every anchor of the target's own answer).
"""

from __future__ import annotations

import numpy as np
import pandas as pd

from draftpool.errors import DraftpoolError

SEQUENCE_KEY = ["run_id", "dtype", "stream", "selector", "selector_seed", "repeat", "prompt_id"]
ANSWER_KEY = ["drafter", "prompt_id", "domain", "repeat"]


def tau_micro(steps: pd.DataFrame) -> float:
    """tau (MAT): committed tokens per target call, bonus included, after trimming, over all rounds."""
    return float(steps["n_committed"].sum() / len(steps))


def tau_macro(steps: pd.DataFrame) -> float:
    """Mean over sequences of each sequence's own tau."""
    return float(steps.groupby(SEQUENCE_KEY, observed=True)["n_committed"].mean().mean())


def counts(steps: pd.DataFrame) -> dict[str, int]:
    """Count drafted, accepted and rejected tokens, committed tokens and rounds (target calls).

    Rejected counts the draft tokens that were thrown away, those after the first mismatch or the end
    included.
    """
    drafted, accepted = int(steps["n_drafted"].sum()), int(steps["n_accepted"].sum())
    return {
        "drafted": drafted,
        "accepted": accepted,
        "rejected": drafted - accepted,
        "committed": int(steps["n_committed"].sum()),
        "rounds": len(steps),
    }


def marginal_rates(accepted: np.ndarray, k: int) -> np.ndarray:
    """Share of rounds that accept at least slot j, j = 1..k: [rounds] -> [k].

    Raises:
        DraftpoolError: If a round accepts more than ``k`` tokens.
    """
    accepted = np.asarray(accepted)
    if accepted.size and accepted.max() > k:
        raise DraftpoolError(f"a round accepts {accepted.max()} of {k} drafted tokens", "n_accepted")
    return (accepted[:, None] >= np.arange(1, k + 1)).mean(axis=0)


def conditional_rates(accepted: np.ndarray, k: int) -> np.ndarray:
    """Share of rounds accepting slot j among those that accepted slots 1..j-1: [rounds] -> [k], else NaN."""
    marginal = marginal_rates(accepted, k)
    before = np.concatenate([[1.0], marginal[:-1]])
    return np.divide(marginal, before, out=np.full(k, np.nan), where=before > 0)


def check_length_identity(committed: np.ndarray, marginal: np.ndarray) -> None:
    """Check mean committed = 1 + sum of marginal rates, and that these do not increase, on untrimmed rounds.

    Raises:
        DraftpoolError: If either fails.
    """
    if np.any(np.diff(marginal) > 1e-12):
        raise DraftpoolError("marginal acceptance rates increase with the slot", "n_accepted", "decode again")
    length, rates = float(np.mean(committed)), 1 + float(np.sum(marginal))
    if abs(length - rates) > 1e-9 * max(1.0, rates):
        raise DraftpoolError(
            f"acceptance length {length:.6f} is not 1 + sum of marginal rates = {rates:.6f}",
            "step table",
            "decode again: rounds that neither met the end nor the limit must commit n_accepted + 1 tokens",
        )


def check_decoding(steps: pd.DataFrame, sequences: pd.DataFrame) -> None:
    """Check the identities that tie a step table to its sequence table.

    n_tokens = 1 prefill token + sum of committed; rounds = number of rows; rounds count up from 0 without gap
    or repeat and each begins where the last one ended; 1 <= committed <= accepted + 1 <= drafted + 1;
    acceptance length = 1 + sum of marginal rates on rounds that met neither end nor limit. In float32, no
    sequence may differ from plain decoding.

    Raises:
        DraftpoolError: Naming the first sequence at fault.
    """
    if sequences.duplicated(SEQUENCE_KEY).any():
        _fault(
            sequences[sequences.duplicated(SEQUENCE_KEY)],
            "the sequence is there twice",
            "delete the folder, decode again",
        )
    differs = sequences[~sequences["matches_plain"].astype(bool) & (sequences["dtype"] == "float32")]
    if len(differs):
        _fault(
            differs,
            "tokens differ from plain decoding in float32",
            "fix the drafter or the decoder; such rows cannot be used",
        )
    steps = steps.sort_values([*SEQUENCE_KEY, "round"], kind="stable")
    grouped = steps.groupby(SEQUENCE_KEY, observed=True)
    found = grouped.agg(committed=("n_committed", "sum"), rows=("round", "size")).reset_index()
    both = sequences[[*SEQUENCE_KEY, "n_tokens", "rounds"]].merge(
        found, on=SEQUENCE_KEY, how="outer", indicator=True
    )
    stray = both[both["_merge"] == "right_only"]
    if len(stray):
        _fault(stray, "step rows without a sequence row", "decode again")
    both = both.fillna({"committed": 0, "rows": 0})
    wrong = both[(both["committed"] + 1 != both["n_tokens"]) | (both["rows"] != both["rounds"])]
    if len(wrong):
        row = wrong.iloc[0]
        _fault(
            wrong,
            f"{row['n_tokens']:.0f} tokens in {row['rounds']:.0f} rounds, but the steps commit "
            f"{row['committed']:.0f} + 1 prefill token in {row['rows']:.0f} rounds",
            "decode again",
        )
    begins = grouped["n_committed"].cumsum() - steps["n_committed"]
    whole = ~(steps["hit_eos"].astype(bool) | steps["hit_limit"].astype(bool))
    length, accepted = steps["n_committed"], steps["n_accepted"]
    for fault, what in (
        (steps["round"] != grouped.cumcount(), "rounds have a gap or a repeat"),
        (steps["position"] != begins, "a round does not begin where the last one ended"),
        (
            (length < 1) | (length > accepted + 1) | (accepted > steps["n_drafted"]),
            "impossible counts in a round",
        ),
        (
            whole & (length != accepted + 1),
            "a round that met neither end nor limit must commit n_accepted + 1 tokens",
        ),
    ):
        if fault.any():
            _fault(steps[fault], what, "decode again")
    if whole.any():
        accepted = accepted[whole].to_numpy()
        check_length_identity(length[whole].to_numpy(), marginal_rates(accepted, int(accepted.max())))


def position_rates(steps: pd.DataFrame) -> pd.DataFrame:
    """Per-slot acceptance of each cell that drafts: columns slot, marginal, conditional, n (rounds)."""
    frames = []
    for key, group in steps[steps["n_drafted"] > 0].groupby(["dtype", "stream", "selector"], observed=True):
        k = int(group["n_drafted"].max())
        accepted = group["n_accepted"].to_numpy()
        rates = {"marginal": marginal_rates(accepted, k), "conditional": conditional_rates(accepted, k)}
        frames.append(
            pd.DataFrame({"slot": np.arange(1, k + 1), **rates, "n": len(group)}).assign(**_named(key))
        )
    columns = ["dtype", "stream", "selector", "slot", "marginal", "conditional", "n"]
    return pd.concat(frames)[columns] if frames else pd.DataFrame(columns=columns)


def check_acceptance(table: pd.DataFrame) -> None:
    """Check that anchors 0..n-2 of every answer are there once, and committed = min(accepted + 1, left).

    Raises:
        DraftpoolError: Naming the first answer at fault.
    """
    grouped = table.groupby(ANSWER_KEY, observed=True)
    length = grouped["position"].transform("size")
    contiguous = (table["position"] + table["left"] == length) & (table["left"] >= 1)
    bad = ~contiguous | table.duplicated([*ANSWER_KEY, "position"])
    if bad.any():
        _fault(table[bad], "anchors are missing or repeated", "score the pool again", ANSWER_KEY)
    expected = np.minimum(table["accepted"] + 1, table["left"])
    bad = (
        (table["committed"] != expected)
        | (table["accepted"] < 0)
        | (table["accepted"] > table[["k", "left"]].min(axis=1))
    )
    if bad.any():
        _fault(table[bad], "committed is not min(accepted + 1, left)", "score the pool again", ANSWER_KEY)


def without_unused(table: pd.DataFrame) -> pd.DataFrame:
    """Part of a table without the category names that it no longer holds."""
    named = table.select_dtypes("category").columns
    return table.assign(**{name: table[name].cat.remove_unused_categories() for name in named})


def truncate(table: pd.DataFrame, tokens: pd.DataFrame) -> pd.DataFrame:
    """Cut an acceptance table to what a decoder with a shorter limit would have seen.

    Args:
        table: An acceptance table.
        tokens: Columns prompt_id, repeat, n_tokens (response tokens, prefill token included). Other answers
            are left out, and so are answers shorter than asked for.
    """
    own = table.groupby(["prompt_id", "repeat"], observed=True)[["position", "left"]].first().sum(axis=1) + 1
    wanted = tokens.merge(own.rename("own").reset_index(), on=["prompt_id", "repeat"])
    wanted = wanted[wanted["n_tokens"] <= wanted["own"]]
    cut = table.merge(wanted[["prompt_id", "repeat", "n_tokens"]], on=["prompt_id", "repeat"])
    left = cut["n_tokens"] - 1 - cut["position"]
    cut = cut.assign(
        left=left, accepted=np.minimum(cut["accepted"], left), committed=np.minimum(cut["accepted"] + 1, left)
    )
    return cut[left > 0].drop(columns="n_tokens").reset_index(drop=True)


def dense_committed(table: pd.DataFrame) -> tuple[pd.DataFrame, np.ndarray]:
    """Lay an acceptance table out as a row per (drafter, answer), indexed by tokens left after the anchor.

    Returns:
        (answers, committed): answers [G rows] has ``drafter, prompt_id, domain, repeat, tokens`` (tokens
        after the prefill token), sorted; committed is int32 [G, L + 1], committed[g, l] = tokens committed by
        a round with l tokens left. Cells beyond an answer's length hold 1 and are never reached.
    """
    grouped = table.groupby(ANSWER_KEY, observed=True, sort=True)
    answers = grouped["left"].max().rename("tokens").reset_index()
    committed = np.ones(
        (len(answers), int(table["left"].max(skipna=True) if len(table) else 0) + 1), dtype=np.int32
    )
    committed[grouped.ngroup().to_numpy(), table["left"].to_numpy()] = table["committed"].to_numpy()
    return answers, committed


def rounds_to_go(committed: np.ndarray) -> np.ndarray:
    """Rounds that a fixed drafter needs with l tokens left, for every l: [G, L + 1] -> [G, L + 1].

    Round after round the walk moves on by what was committed, exactly as the decoder does: R(l) = 1 + R(l -
    committed(l)).
    """
    rounds = np.zeros_like(committed)
    rows = np.arange(len(committed))
    for left in range(1, committed.shape[1]):
        rounds[:, left] = 1 + rounds[rows, left - committed[:, left]]
    return rounds


def walk(table: pd.DataFrame) -> pd.DataFrame:
    """Decode every answer with every drafter of an acceptance table, by walking from position 0.

    Returns:
        Columns drafter, prompt_id, domain, repeat, tokens (committed after the prefill token), rounds. tau =
        tokens / rounds.
    """
    answers, committed = dense_committed(table)
    rounds = rounds_to_go(committed)[np.arange(len(answers)), answers["tokens"]]
    return answers.assign(rounds=rounds)


def per_prompt(walked: pd.DataFrame) -> pd.DataFrame:
    """Average repeats within a prompt: columns drafter, prompt_id, domain, tokens, rounds (means)."""
    keys = ["drafter", "prompt_id", "domain"]
    return walked.groupby(keys, observed=True)[["tokens", "rounds"]].mean().reset_index()


def _named(key: tuple) -> dict[str, object]:
    return dict(zip(("dtype", "stream", "selector"), key, strict=True))


def _fault(rows: pd.DataFrame, what: str, remedy: str, key: list[str] = SEQUENCE_KEY) -> None:
    row = rows.iloc[0]
    where = ", ".join(f"{column} {row[column]}" for column in key if column != "run_id")
    raise DraftpoolError(f"{what} ({len(rows)} rows)", where, remedy)
