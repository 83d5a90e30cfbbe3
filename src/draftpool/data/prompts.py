"""The prompts of one domain: read its sources, deduplicate, split, sample, write."""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path

from draftpool.artefacts import atomic_dir, canonical_json, write_json, write_jsonl, write_provenance
from draftpool.data.near_duplicates import near_duplicates
from draftpool.data.sources import Candidate, read_candidates
from draftpool.errors import DraftpoolError

# Few groups (20 databases) must feed both sides: eval takes at most this share of those that train could use.
HELD_OUT_SHARE = 0.25
SPLIT_ORDER = ("eval", "both", "train")


def prepare_prompts(cfg: dict, out: Path) -> None:
    """Write ``train.jsonl``, ``eval.jsonl``, ``counts.json`` and provenance of one domain.

    Args:
        cfg: ``domain``, ``seed``, ``train`` and ``eval`` (prompts wanted), ``sources``, ``archives``,
            ``split_by`` (null or ``group``), ``max_prompt_chars`` (null or int), ``near_duplicate_jaccard``.
        out: Folder that appears when everything is written.

    Raises:
        DraftpoolError: If a source cannot be read, or a split that was asked for has no prompt.
    """
    train, held_out, counts = choose_prompts(cfg)
    with atomic_dir(out) as folder:
        write_jsonl(folder / "train.jsonl", [_row(c, cfg["domain"], "train") for c in train])
        write_jsonl(folder / "eval.jsonl", [_row(c, cfg["domain"], "eval") for c in held_out])
        write_json(folder / "counts.json", counts)
        write_provenance(folder, cfg)


def choose_prompts(cfg: dict) -> tuple[list[Candidate], list[Candidate], dict]:
    """Return the training prompts, the held-out prompts, and the counts of what was found and dropped.

    Raises:
        DraftpoolError: As `prepare_prompts`.
    """
    dropped: Counter = Counter()
    found: Counter = Counter()
    candidates: list[Candidate] = []
    for position, source in enumerate(cfg["sources"]):
        rows, n_rows = read_candidates(cfg, position, dropped)
        candidates += rows
        found[source["subset"]] += n_rows
    unique, groups = merge_duplicates(candidates)
    dropped["duplicate"] = len(candidates) - len(unique)
    unique.sort(key=lambda c: _sampling_key(cfg["seed"], c.id))
    held_out, rest = hold_out(unique, groups, cfg["eval"])
    taken = {groups[c.id] for c in held_out}
    free = [c for c in rest if c.split != "eval" and groups[c.id] not in taken]
    dropped["held_out_group"] = sum(groups[c.id] in taken for c in rest)
    alike = near_duplicates([c.text for c in free], [c.text for c in held_out], cfg["near_duplicate_jaccard"])
    dropped["near_duplicate"] = int(alike.sum())
    available = [c for c, near in zip(free, alike, strict=True) if not near]
    train = available[: cfg["train"]]
    for split, rows in (("train", train), ("eval", held_out)):
        if cfg[split] > 0 and not rows:
            raise DraftpoolError(
                f"domain with no prompts: none left for {split}",
                f"domains.{cfg['domain']}.{split}",
                f"loosen its filters or add a source (found {found.total()} rows, dropped {dict(dropped)})",
            )
    counts = {
        "domain": cfg["domain"],
        "found": found.total(),
        "dropped": dict(dropped),
        "train": {"wanted": cfg["train"], "available": len(available), "written": len(train)},
        "eval": {"wanted": cfg["eval"], "written": len(held_out)},
        "subsets": {
            subset: {
                "found": n,
                "train": sum(c.subset == subset for c in train),
                "eval": sum(c.subset == subset for c in held_out),
            }
            for subset, n in found.items()
        },
    }
    return train, held_out, counts


def merge_duplicates(candidates: Sequence[Candidate]) -> tuple[list[Candidate], dict[str, str]]:
    """Keep one candidate per text, and label each with its group.

    Groups that share a row or a key are one group (two sets of claims with a claim in common, say).

    Returns:
        The kept candidates, and id -> label; neither depends on the order of the input.
    """
    parent: dict[tuple[str, str], tuple[str, str]] = {}

    def root(node):
        while parent.setdefault(node, node) != node:
            parent[node] = parent[parent[node]]
            node = parent[node]
        return node

    best: dict[str, Candidate] = {}
    for candidate in candidates:
        for key in candidate.groups:
            # The smaller root wins, so that a label is the least member of its component.
            a, b = sorted((root(("id", candidate.id)), root(("key", key))))
            parent[b] = a
        if candidate.id not in best or _preference(candidate) < _preference(best[candidate.id]):
            best[candidate.id] = candidate
    return list(best.values()), {key: root(("id", key))[1] for key in best}


def hold_out(
    ordered: Sequence[Candidate], groups: dict[str, str], wanted: int
) -> tuple[list[Candidate], list[Candidate]]:
    """Choose the held-out rows from whole groups, as many distinct ones as `HELD_OUT_SHARE` allows.

    Args:
        ordered: Candidates in sampling order.
        groups: id -> group label.
        wanted: Held-out rows wanted.

    Returns:
        The held-out rows, and all other rows (those of held-out groups included), both in sampling order.
    """
    members: dict[str, list[Candidate]] = defaultdict(list)
    for candidate in ordered:
        if candidate.split != "train":
            members[groups[candidate.id]].append(candidate)
    shared = {groups[c.id] for c in ordered if c.split != "eval"} & members.keys()
    budget = max(1, int(HELD_OUT_SHARE * len(shared)))
    chosen: dict[str, None] = {}
    for label in members:
        if len(chosen) == wanted:
            break
        if label in shared:
            if budget == 0:
                continue
            budget -= 1
        chosen[label] = None
    n_rows = sum(len(members[label]) for label in chosen)
    for label in members:
        if n_rows >= wanted:
            break
        if label not in chosen:
            chosen[label] = None
            n_rows += len(members[label])
    # Row by row over the groups, so that a large group does not crowd out the others.
    turns = sorted(
        (turn, place, c.id) for place, label in enumerate(chosen) for turn, c in enumerate(members[label])
    )
    picked = {key for _, _, key in turns[:wanted]}
    return [c for c in ordered if c.id in picked], [c for c in ordered if c.id not in picked]


def _preference(candidate: Candidate) -> tuple:
    # A prompt found twice goes to the stricter side, then to the first by content, never by file order.
    content = canonical_json([candidate.subset, candidate.source, candidate.reference, candidate.groups])
    return SPLIT_ORDER.index(candidate.split), content


def _sampling_key(seed: int, row_id: str) -> str:
    return hashlib.sha256(canonical_json([seed, row_id]).encode()).hexdigest()


def _row(candidate: Candidate, domain: str, split: str) -> dict:
    return {
        "id": candidate.id,
        "domain": domain,
        "subset": candidate.subset,
        "split": split,
        "prompt": [{"role": "user", "content": candidate.text}],
        "reference": candidate.reference,
        "source": candidate.source,
        "licence": candidate.licence,
    }
