"""Stage train_router: classifiers that read a prompt once and name its domain (MetaSD's and HedgeSpec's baseline)."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import Pipeline, make_pipeline
from sklearn.preprocessing import StandardScaler

from draftpool.artefacts import atomic_dir, read_jsonl, read_table, write_json, write_provenance
from draftpool.data.streams import session_of
from draftpool.data.taps import Taps
from draftpool.errors import DraftpoolError

FEATURES = ("tfidf", "hidden")


def classifier(features: str) -> Pipeline:
    """Logistic regression on TF-IDF of words and word pairs, or on standardised hidden states; untrained."""
    head = LogisticRegression(max_iter=2000)
    if features == "tfidf":
        return make_pipeline(TfidfVectorizer(sublinear_tf=True, ngram_range=(1, 2)), head)
    return make_pipeline(StandardScaler(), head)


def prompt_texts(folder: Path, split: str) -> dict[str, str]:
    """What the user wrote (in a session's first turn), by prompt or session."""
    return {
        row["id"]: "\n".join(message["content"] for message in row["prompt"] if message["role"] == "user")
        for row in read_jsonl(folder / f"{split}.jsonl")
    }


def base_domains(folder: Path) -> dict[str, str]:
    """Domain that a held-out prompt was written for, by prompt or session (a session's first turn)."""
    found = {}
    for row in read_jsonl(folder / "eval.jsonl"):
        first = row["turns"][0] if "turns" in row else row
        found[row["id"]] = first.get("base_domain", row["domain"])
    return found


def mean_hidden(folder: Path, n_taps: int) -> dict[str, np.ndarray]:
    """Mean over the prompt's tokens of the target's deepest tap [hidden], by prompt or session (its first turn)."""
    table = read_table(folder / "responses.parquet").drop_duplicates("prompt_id")
    taps, found = Taps(folder), {}
    for row in table.itertuples():
        session, turn = session_of(row.prompt_id)
        if turn > 0:
            continue
        own = taps.rows(int(row.taps_shard), int(row.prompt_offset), int(row.response_offset)).float().numpy()
        found[session] = own[:, -(own.shape[1] // n_taps) :].mean(axis=0)
    return found


def _prompts(domain: str, folder: Path, split: str, answers: Path, n_taps: int) -> pd.DataFrame:
    """Prompts of a folder with both kinds of features; those that were short enough to be answered."""
    words, states = prompt_texts(folder, split), mean_hidden(answers, n_taps)
    return pd.DataFrame(
        {
            "prompt_id": list(states),
            "domain": domain,
            "tfidf": [words[prompt] for prompt in states],
            "hidden": list(states.values()),
        }
    )


def _stacked(values: pd.Series) -> list | np.ndarray:
    return values.tolist() if values.name == "tfidf" else np.stack(values.to_list())


def train_router(
    cfg: dict,
    prompts: list[Path],
    train: list[Path],
    heldout_prompts: list[Path],
    heldout: list[Path],
    out: Path,
) -> None:
    """Write `routes.csv` (prompt_id, domain, features, route, probability) and `accuracy.json`.

    Routes are for whole queries: a session goes where its first turn points. `accuracy.json` counts, per kind of
    features and domain or prompt set, how many went to the domain they were written for.

    Args:
        cfg: `domains` (trained on, in the order of `prompts` and `train`), `routed` (domains and prompt sets, in the
            order of the held-out folders), `taps`.
        prompts: Prompt folders of the domains.
        train: Response folders of the training prompts; their prompts are what the routers learn from.
        heldout_prompts: Prompt folders of what is routed.
        heldout: Response folders of the same.
        out: Folder to write.

    Raises:
        DraftpoolError: If there are fewer than two domains.
    """
    domains = cfg["domains"]
    if len(domains) < 2:
        raise DraftpoolError("one domain needs no router", "config key `domains`", "leave the router out")
    n_taps = len(cfg["taps"])
    known = [
        _prompts(domain, folder, "train", answers, n_taps)
        for domain, folder, answers in zip(domains, prompts, train, strict=True)
    ]
    asked = [
        _prompts(name, folder, "eval", answers, n_taps)
        for name, folder, answers in zip(cfg["routed"], heldout_prompts, heldout, strict=True)
    ]
    written_for = {
        prompt: domain for folder in heldout_prompts for prompt, domain in base_domains(folder).items()
    }
    learnt, routed = pd.concat(known, ignore_index=True), pd.concat(asked, ignore_index=True)
    right = routed["prompt_id"].map(written_for)
    rows, accuracy = [], {}
    for features in FEATURES:
        model = classifier(features).fit(_stacked(learnt[features]), learnt["domain"])
        chances = model.predict_proba(_stacked(routed[features]))
        route = model.classes_[chances.argmax(axis=1)]
        head = routed[["prompt_id", "domain"]]
        rows.append(head.assign(features=features, route=route, probability=chances.max(axis=1)))
        hits = pd.Series(route == right).groupby(routed["domain"])
        accuracy[features] = {
            name: {"right": int(own.sum()), "n": len(own)}
            for name, own in hits
            if right[own.index].isin(domains).all()
        }
        counted = accuracy[features].values()
        print(
            f"router by {features}, trained on {len(learnt)} prompts: {sum(c['right'] for c in counted)} of "
            f"{sum(c['n'] for c in counted)} held-out prompts to the domain they were written for",
            flush=True,
        )
    with atomic_dir(out) as folder:
        pd.concat(rows).to_csv(folder / "routes.csv", index=False)
        write_json(folder / "accuracy.json", accuracy)
        write_provenance(folder, cfg)
