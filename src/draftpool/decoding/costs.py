"""Stage profile_costs: seconds of every part of a round, measured once and frozen, so that replay can price rounds."""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from draftpool.artefacts import atomic_dir, read_table, write_json, write_provenance
from draftpool.decoding.clock import interleave
from draftpool.decoding.evaluation import PoolEvaluation
from draftpool.decoding.pool import named_folders
from draftpool.decoding.sequence import Sampling, Sequence, prefill
from draftpool.drafters.base import Drafter
from draftpool.drafters.block_live import LiveBlocks
from draftpool.drafters.load import draft_everywhere, load_drafter
from draftpool.errors import DraftpoolError
from draftpool.progress import bar
from draftpool.selectors.base import Completed, Context, Feedback, FirstSlots, make_selector
from draftpool.targets.load import load_target, resolve_device

# Tokens of the two catch-ups that a line is laid through (of a shorter prompt, all of it).
FEW, MANY = 2, 64
# Rounds that selection is timed over.
ROUNDS = 40
# Tokens of a sequence that no model has positions for.
NO_BOUND = 2**24
# Whose selection time stands for learners from the arm played and from all arms.
SELECTION = {"bandit": {"kind": "metasd_ucb"}, "full": {"kind": "hedgespec"}}


def _median_answer(responses: list[Path], longest: int) -> tuple[list[int], list[int]]:
    """Prompt and answer of median prompt length among the held-out answers of at least `longest` tokens."""
    rows = [
        (list(map(int, row.prompt_ids)), list(map(int, row.response_ids)))
        for folder in responses
        for row in read_table(folder / "responses.parquet").itertuples()
        if len(row.response_ids) >= longest and len(row.prompt_ids) > 2 * FEW
    ]
    if not rows:
        raise DraftpoolError(
            f"no held-out answer has {longest} tokens, as many as a block",
            "profile_costs",
            "raise responses.max_new_tokens or lower block_size",
        )
    return sorted(rows, key=lambda row: len(row[0]))[len(rows) // 2]


def selection_seconds(cfg: dict, arms: list[str], lengths: np.ndarray, repeats: int) -> float:
    """Median seconds of `select` and `update` in one round of one episode, on random feedback."""
    rng = np.random.default_rng(0)
    k_pool, n_arms = int(lengths.max()), len(arms)
    context = Context(np.ones(n_arms), {"tfidf": np.zeros(1, int), "hidden": np.zeros(1, int)})
    selector = make_selector(cfg, arms)
    available, flag, times = np.ones((1, n_arms), bool), np.array([True]), []
    for _ in range(max(1, repeats // 5)):
        selector.reset(n_arms, lengths, 1, context)
        for t in range(ROUNDS):
            noise, accepted = rng.random((1, n_arms + 1)), rng.integers(0, lengths + 1)
            gamma = rng.random((1, n_arms, k_pool))
            begin = time.perf_counter()
            chosen, _ = selector.select(t, available, noise)
            full = bool(selector.evaluates(t)[0])
            elapsed = time.perf_counter() - begin
            own = accepted[chosen]
            losses = 1.0 - (accepted[None] + 1) / (k_pool + 1)
            done = Completed(np.zeros(1, int), np.array([t]), losses, gamma) if full else None
            first = FirstSlots(flag, accepted[None] > 0, gamma[:, :, 0]) if full else None
            reward = own / k_pool
            feedback = Feedback(own, lengths[chosen], own + 1, reward, reward, flag, done, first)
            begin = time.perf_counter()
            selector.update(chosen, feedback)
            times.append(elapsed + time.perf_counter() - begin)
    return statistics.median(times)


def longest_fit(drafter: Drafter) -> int | None:
    """Longest sequence that a drafter can draft to its end; None if there is no bound."""
    if drafter.fits(NO_BOUND):
        return None
    low, high = 0, NO_BOUND
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if drafter.fits(middle) else (low, middle)
    return low


def mean_drafted(drafter: Drafter, prompt: list[int], answer: list[int], taps: Tensor) -> float:
    """Tokens that a drafter proposes at an anchor of one answer, on average."""
    if drafter.modelled:
        return float(drafter.k)
    drafter.reset(len(prompt) + len(answer))
    made = draft_everywhere(drafter, prompt, answer, taps)
    return float(made.drafted.double().mean())


@torch.inference_mode()
def profile_costs(cfg: dict, target: Path, responses: list[Path], drafters: list[Path], out: Path) -> None:
    """Write `costs.json`: seconds per part of a round, medians of interleaved repeats, and `spread` (quartiles).

    Args:
        cfg: `drafters` (of the pool), `repeats`, `dtype`, `taps`, `backend` (`device_map`), `device`.
        target: Target folder.
        responses: Held-out response folders; the answer of median prompt length is the context.
        drafters: Drafter folders in the order of `cfg["drafters"]`.
        out: Folder to write. `verify` maps a number of tokens to seconds (its product with the host included),
            `draft` a drafter; `catch_up` a drafter to a line (`fixed` + `per_token`); `evaluate` is all drafters at
            one anchor without their catch-up, `evaluate_catch_up` theirs; `select` is the time of selecting and
            learning in a round, for `bandit` and for `full` information; `alone` lists drafters that are evaluated one
            by one, each with its own catch-up; `ahead` those that keep what they read while drafting; `positions` is
            the longest sequence that each can draft to its end (null: any), `drafted` the mean length of its drafts;
            `memory` holds the bytes of every drafter: `weights` of its own (what it shares with the target left out)
            and `state` per token of the sequence.

    Raises:
        DraftpoolError: If a drafter does not fit, or no answer is long enough.
    """
    device, dtype = resolve_device(cfg["device"]), getattr(torch, cfg["dtype"])
    model = load_target(target, cfg["taps"], device, dtype, cfg["backend"], cfg.get("device_map"))
    pool = {name: load_drafter(name, folder, model) for name, folder in named_folders(cfg, drafters).items()}
    k_pool = max(drafter.k for drafter in pool.values())
    prompt, answer = _median_answer(responses, k_pool + 1)
    many = min(MANY, len(prompt))
    sequence = Sequence(prefill(model, prompt, len(answer), k_pool), model, pool, Sampling(len(answer), ()))
    sequence.answer = [answer[0]]
    sequence.verify(torch.tensor(answer[1:], device=device))
    sequence.commit(answer[1:], len(answer) - 1)
    ids, taps = sequence.unread(0)
    for drafter in pool.values():
        drafter.reset(len(ids))
        drafter.prefill(ids, taps)
    evaluation = PoolEvaluation(pool, model.head_weight)
    evaluation.reset(len(prompt) + len(answer))
    evaluation.evaluate(answer[-1], len(ids), sequence.unread, sequence.catch_up)

    def verify(width: int) -> Callable[[], None]:
        block = torch.tensor(answer[:width], device=device)

        def run() -> None:
            model.forward(block[None], sequence.start.cache).logits[0].argmax(dim=-1).tolist()
            sequence.start.cache.rollback(width)

        return run

    def catch_up(reader, count: int) -> Callable[[], None]:
        def again() -> None:
            reader.length -= count
            reader.catch_up(ids[-count:], taps[-count:])

        # Not every kind can go back: a copy reads the text's beginning, which costs as much per token. Asked for more
        # room than there is, it makes a state of its own.
        fresh = copy.copy(reader)
        fresh.reset(len(prompt) + len(answer) + 1)

        def afresh() -> None:
            fresh.prefill(ids[:count], taps[:count])

        return again if isinstance(reader, LiveBlocks) else afresh

    def evaluate() -> None:
        evaluation.evaluate(answer[-1], len(ids), sequence.unread, sequence.catch_up)

    # A model-free drafter proposes as much as it finds.
    shortest = 1 if all(drafter.modelled for drafter in pool.values()) else 0
    widths = set(range(2, k_pool + 2)) if not shortest else {drafter.k + 1 for drafter in pool.values()}
    widths = sorted({1, *widths})
    parts: dict[str, Callable[[], object]] = {f"verify {width}": verify(width) for width in widths}
    parts["evaluate"] = evaluate
    readers = dict(pool) | ({} if evaluation.stacked is None else {"evaluate": evaluation.stacked})
    for name, reader in readers.items():
        if name in pool:
            parts[f"draft {name}"] = lambda reader=reader: reader.draft(answer[-1]).ids.tolist()
        for count in (FEW, many):
            parts[f"catch_up {count} {name}"] = catch_up(reader, count)
    warm_up = max(1, cfg["repeats"] // 5)
    with bar(warm_up + cfg["repeats"], "costs", "repeat") as shown:
        times = interleave(parts, cfg["repeats"], device, warm_up, lambda: shown.update(1))
    median = {name: statistics.median(values) for name, values in times.items()}
    lines = {}
    for name in readers:
        few, slow = (median[f"catch_up {count} {name}"] for count in (FEW, many))
        per_token = max(0.0, (slow - few) / (many - FEW))
        lines[name] = {"fixed": max(0.0, few - FEW * per_token), "per_token": per_token}
    memory = {
        name: {
            "weights": sum(tensor.numel() * tensor.element_size() for tensor in drafter.weights()),
            "state": drafter.state_bytes() / len(ids),
        }
        for name, drafter in pool.items()
    }
    lengths = np.array([drafter.k for drafter in pool.values()])
    costs = {
        "context": len(prompt) + len(answer),
        "verify": {str(width): median[f"verify {width}"] for width in widths},
        "draft": {name: median[f"draft {name}"] for name in pool},
        "evaluate": median["evaluate"],
        "alone": evaluation.alone,
        "ahead": [name for name, drafter in pool.items() if getattr(drafter, "reads_ahead", False)],
        "positions": {name: longest_fit(drafter) for name, drafter in pool.items()},
        "drafted": {name: mean_drafted(drafter, prompt, answer, taps) for name, drafter in pool.items()},
        "evaluate_catch_up": lines.pop("evaluate", None),
        "catch_up": lines,
        "memory": memory,
        "select": {
            name: selection_seconds(selector, list(pool), lengths, cfg["repeats"])
            for name, selector in SELECTION.items()
        },
        "spread": {
            name: [float(value) for value in np.quantile(values, [0.25, 0.75])]
            for name, values in times.items()
        },
    }
    with atomic_dir(out) as folder:
        write_json(folder / "costs.json", costs)
        write_provenance(folder, cfg, {"device": str(device), "threads": torch.get_num_threads()})
