"""What a round costs: one target token, a block of n tokens, and a draft, per dtype; the last line is JSON.

    python bench/bench_verify.py --target results/targets/ID --drafter results/drafters/ID

A drafter pays only if tau exceeds (block + draft) / one token, printed as the break-even tau.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch

from draftpool.drafters.block_config import read_drafter
from draftpool.drafters.block_live import BlockDrafter, load_model
from draftpool.targets.load import load_target, resolve_device, synchronise

PROMPT = 150


def measure(actions: dict[str, Callable[[], None]], device: torch.device, repeats: int) -> dict[str, float]:
    """Median milliseconds of every action, interleaved; the first tenth of the repeats warms up."""
    times: dict[str, list[float]] = {name: [] for name in actions}
    warmup = max(1, repeats // 10)
    for repeat in range(warmup + repeats):
        for name, action in actions.items():
            synchronise(device)
            started = time.perf_counter()
            action()
            synchronise(device)
            if repeat >= warmup:
                times[name].append(1000 * (time.perf_counter() - started))
    return {name: statistics.median(values) for name, values in times.items()}


def costs(
    target_folder: Path, drafter_folder: Path, device: torch.device, dtype: torch.dtype, repeats: int
) -> dict:
    """Milliseconds of one token, blocks and a draft after a prompt of 150 tokens."""
    taps = read_drafter(drafter_folder)[0].taps
    target = load_target(target_folder, taps, device, dtype)
    drafter = BlockDrafter("drafter", load_model(drafter_folder, target))
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(100, target.hf_config.vocab_size, (1, PROMPT), generator=generator).to(device)
    cache = target.new_cache(PROMPT + 64)
    drafter.reset(PROMPT + 64)
    drafter.prefill(ids[0], target.forward(ids, cache, "none").taps[0])

    def block(n: int) -> Callable[[], None]:
        def run() -> None:
            target.forward(ids[:, :n], cache)
            cache.rollback(n)

        return run

    width = drafter.k + 1
    actions = {f"block_{n}": block(n) for n in sorted({1, 2, width, 8, 16})}
    found = measure(actions | {"draft": lambda: drafter.draft(5)}, device, repeats)
    found["break_even_tau"] = (found[f"block_{width}"] + found["draft"]) / found["block_1"]
    return found


def main() -> None:
    """Print a table for people and one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--drafter", type=Path, required=True)
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
    parser.add_argument("--repeats", type=int, default=30)
    options = parser.parse_args()
    device = resolve_device(options.device)
    result = {"benchmark": "verify", "device": str(device), "threads": torch.get_num_threads()}
    for dtype in (torch.float32, torch.bfloat16):
        name = str(dtype).removeprefix("torch.")
        result[name] = costs(options.target, options.drafter, device, dtype, options.repeats)
        print(name, "  ".join(f"{key} {value:.2f}" for key, value in result[name].items()))
    print(json.dumps(result))


if __name__ == "__main__":
    main()
