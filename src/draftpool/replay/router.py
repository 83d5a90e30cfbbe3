"""Stage train_router: classifiers that read a prompt once and name its domain (MetaSD's and HedgeSpec's baseline)."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
from safetensors import safe_open
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import Pipeline, make_pipeline
from sklearn.preprocessing import StandardScaler

from draftpool.artefacts import atomic_dir, read_jsonl, read_table, write_json, write_provenance
from draftpool.errors import DraftpoolError

FEATURES = ("tfidf", "hidden")


def classifier(features: str) -> Pipeline:
    """Logistic regression on TF-IDF of words and word pairs, or on standardised hidden states; untrained."""
    head = LogisticRegression(max_iter=2000)
    if features == "tfidf":
        return make_pipeline(TfidfVectorizer(sublinear_tf=True, ngram_range=(1, 2)), head)
    return make_pipeline(StandardScaler(), head)


def prompt_texts(folder: Path, split: str) -> dict[str, str]:
    """What the user wrote, by prompt id."""
    return {
        row["id"]: "\n".join(message["content"] for message in row["prompt"] if message["role"] == "user")
        for row in read_jsonl(folder / f"{split}.jsonl")
    }


def mean_hidden(folder: Path, n_taps: int) -> dict[str, np.ndarray]:
    """Mean over the prompt's tokens of the target's deepest tap [hidden], by prompt id."""
    table = read_table(folder / "responses.parquet")
    found = {}
    with safe_open(folder / "taps.safetensors", framework="pt") as taps:
        rows = taps.get_slice("taps")
        for row in table.itertuples():
            own = rows[int(row.prompt_offset) : int(row.response_offset)].float().numpy()
            found[row.prompt_id] = own[:, -(own.shape[1] // n_taps) :].mean(axis=0)
    return found


def _stacked(features: str, values: list) -> list | np.ndarray:
    return values if features == "tfidf" else np.stack(values)


def train_router(cfg: dict, prompts: list[Path], train: list[Path], heldout: list[Path], out: Path) -> None:
    """Write `routes.csv` (prompt_id, domain, features, route, probability) and `accuracy.json`.

    Args:
        cfg: `domains` (of the folders, in order), `taps`.
        prompts: Prompt folders.
        train: Response folders of the training prompts; their prompts are what the routers learn from.
        heldout: Response folders of the held-out prompts, which are routed.
        out: Folder to write.

    Raises:
        DraftpoolError: If there are fewer than two domains.
    """
    domains = cfg["domains"]
    if len(domains) < 2:
        raise DraftpoolError("one domain needs no router", "config key `domains`", "leave the router out")
    texts = {split: [prompt_texts(folder, split) for folder in prompts] for split in ("train", "eval")}
    hidden = {
        split: [mean_hidden(folder, len(cfg["taps"])) for folder in folders]
        for split, folders in (("train", train), ("eval", heldout))
    }
    rows, accuracy = [], {}
    for features in FEATURES:
        known: dict[str, list] = {"train": [], "eval": []}
        labels: dict[str, list[str]] = {"train": [], "eval": []}
        names: list[str] = []
        for split in known:
            for domain, words, states in zip(domains, texts[split], hidden[split], strict=True):
                # Both kinds see the same prompts: those that were short enough to be answered.
                for prompt_id, state in states.items():
                    known[split].append(words[prompt_id] if features == "tfidf" else state)
                    labels[split].append(domain)
                    names += [prompt_id] if split == "eval" else []
        model = classifier(features).fit(_stacked(features, known["train"]), labels["train"])
        chances = model.predict_proba(_stacked(features, known["eval"]))
        route = model.classes_[chances.argmax(axis=1)]
        rows.append(
            pd.DataFrame(
                {
                    "prompt_id": names,
                    "domain": labels["eval"],
                    "features": features,
                    "route": route,
                    "probability": chances.max(axis=1),
                }
            )
        )
        right = int((route == np.array(labels["eval"])).sum())
        accuracy[features] = {"right": right, "n": len(route), "trained_on": len(labels["train"])}
        print(f"router by {features}: {right} of {len(route)} held-out prompts to their domain", flush=True)
    with atomic_dir(out) as folder:
        pd.concat(rows).to_csv(folder / "routes.csv", index=False)
        write_json(folder / "accuracy.json", accuracy)
        write_provenance(folder, cfg)


def load_routes(folder: Path, homes: dict[str, str], arms: tuple[str, ...], generalist: str) -> pd.DataFrame:
    """Arm of every routed prompt: index prompt_id, one column per kind of features.

    Args:
        folder: Written by :func:`train_router`.
        homes: Domain of every specialist.
        arms: The pool.
        generalist: Takes prompts of domains without a specialist in the pool.
    """
    arm_of = {domain: arms.index(name) for name, domain in homes.items() if name in arms}
    fallback = arms.index(generalist) if generalist in arms else 0
    routes = pd.read_csv(folder / "routes.csv")
    routes["arm"] = routes["route"].map(arm_of).fillna(fallback).astype(int)
    return routes.pivot(index="prompt_id", columns="features", values="arm")
