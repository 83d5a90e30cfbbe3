"""D-PACE step against DFlash step: the same batch, interleaved in one process; the last line is JSON.

python bench/bench_objective_step.py --target results/targets/ID --responses results/responses/ID ...
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path

import numpy as np
import torch

from draftpool.training.batches import ResponseSet, make_batch
from draftpool.training.objectives.base import make_objective
from draftpool.training.train import batch_loss, new_model


def main() -> None:
    """Time whole optimiser steps (batch, forward, backward, clip, AdamW) of both objectives."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--responses", type=Path, nargs="+", required=True)
    parser.add_argument("--steps", type=int, default=40, help="pairs of steps")
    parser.add_argument("--warmup", type=int, default=4)
    parser.add_argument("--block-size", type=int, default=4)
    parser.add_argument("--sequences", type=int, default=8)
    parser.add_argument("--anchors", type=int, default=32)
    options = parser.parse_args()
    data = ResponseSet(options.responses, None)
    cfg = {
        "taps": [1, 8, 15, 22, 28],
        "model": {"n_layers": 2, "block_size": options.block_size, "draft_vocab": 8192},
        "init": "target_layers",
        "seed": 0,
    }
    model = new_model(cfg, options.target, data, None, torch.device("cpu"))
    columns = np.full(model.config.target_vocabulary, -1, dtype=np.int64)
    columns[model.vocabulary.numpy()] = np.arange(len(model.vocabulary))
    objectives = {kind: make_objective({"kind": kind}, options.block_size) for kind in ("dpace", "dflash")}
    parameters = list(model.parameters())
    optimiser = torch.optim.AdamW(parameters, lr=1e-5, fused=True)
    times: dict[str, list[float]] = {kind: [] for kind in objectives}
    for step in range(options.warmup + options.steps):
        # Which comes first alternates, so that neither always finds the caches warm.
        order = list(objectives) if step % 2 else list(reversed(objectives))
        for kind in order:
            started = time.perf_counter()
            batch = make_batch(data, step, 0, options.sequences, options.anchors, options.block_size, columns)
            report = batch_loss(model, batch, objectives[kind], autocast=False)
            optimiser.zero_grad(set_to_none=True)
            report.loss.backward()
            torch.nn.utils.clip_grad_norm_(parameters, 1.0)
            optimiser.step()
            if step >= options.warmup:
                times[kind].append(time.perf_counter() - started)
    ratios = sorted(a / b for a, b in zip(times["dpace"], times["dflash"], strict=True))
    median = statistics.median(ratios)
    quartiles = statistics.quantiles(ratios, n=4)
    print(f"{'objective':10s} median step")
    for kind, values in times.items():
        print(f"{kind:10s} {statistics.median(values):.3f} s")
    print(
        f"D-PACE / DFlash: median of {len(ratios)} paired ratios {median:.3f}, "
        f"quartiles {quartiles[0]:.3f} to {quartiles[2]:.3f}"
    )
    result = {
        "benchmark": "objective_step",
        "ratio": median,
        "low": quartiles[0],
        "high": quartiles[2],
        "n": len(ratios),
    }
    print(json.dumps(result | {f"{kind}_s": statistics.median(values) for kind, values in times.items()}))


if __name__ == "__main__":
    main()
