"""One answer per method under torch's profiler: a Chrome trace, and where a round's time goes, Python included."""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Iterable
from pathlib import Path

import pandas as pd
import torch
from torch.profiler import ProfilerActivity, profile

from draftpool.artefacts import atomic_dir, write_provenance
from draftpool.decoding.clock import Mark
from draftpool.decoding.live import Decoder
from draftpool.decoding.methods import methods_of
from draftpool.decoding.pool import load_workbench, named_folders
from draftpool.errors import DraftpoolError
from draftpool.progress import progress

OPERATORS = {"cpu_op", "kernel", "gpu_memcpy", "gpu_memset"}


def busy(intervals: Iterable[tuple[float, float]], start: float, end: float) -> float:
    """Length of the union of intervals inside [start, end]."""
    total, reached = 0.0, start
    for low, high in sorted(intervals):
        low, high = max(low, reached), min(high, end)
        if high > low:
            total += high - low
            reached = high
    return total


def split_marks(marks: list[Mark], operators: list[tuple[float, float]]) -> pd.DataFrame:
    """Seconds of every part: in operators, and the rest, which is Python and dispatch.

    Args:
        marks: Parts of rounds, in order, in nanoseconds.
        operators: Start and end of every operator in nanoseconds, in any order.

    Returns:
        Columns part, seconds, operator_seconds, python_seconds; sums over the marks.
    """
    operators = sorted(operators)
    rows, first = [], 0
    for mark in marks:
        while first < len(operators) and operators[first][1] <= mark.start:
            first += 1
        inside = []
        for low, high in operators[first:]:
            if low >= mark.end:
                break
            inside.append((low, high))
        used = busy(inside, mark.start, mark.end)
        rows.append((mark.part, (mark.end - mark.start) / 1e9, used / 1e9))
    frame = pd.DataFrame(rows, columns=["part", "seconds", "operator_seconds"])
    frame = frame.groupby("part", sort=False, as_index=False).sum()
    return frame.assign(python_seconds=frame.seconds - frame.operator_seconds)


def _annotate(path: Path, marks: list[Mark]) -> list[tuple[float, float]]:
    """Write the parts of rounds into a trace, take the machine's name out, and return its operators' times."""
    with gzip.open(path, "rt") as handle:
        trace = json.load(handle)
    base = trace["baseTimeNanoseconds"]
    operators = [
        (base + 1000 * event["ts"], base + 1000 * (event["ts"] + event["dur"]))
        for event in trace["traceEvents"]
        if event.get("cat") in OPERATORS
    ]
    trace.pop("host_name", None)
    trace["traceEvents"] += [
        {
            "ph": "X",
            "cat": "round",
            "name": mark.part,
            "pid": os.getpid(),
            "tid": "parts of a round",
            "ts": (mark.start - base) / 1000,
            "dur": (mark.end - mark.start) / 1000,
        }
        for mark in marks
    ]
    with gzip.open(path, "wt") as handle:
        json.dump(trace, handle)
    return operators


def profile_decode(
    cfg: dict,
    target: Path,
    prompts: list[Path],
    drafters: list[Path],
    costs: Path | None,
    routes: Path | None,
    out: Path,
) -> None:
    """Write `trace-<method>.json.gz` (open it in Perfetto or chrome://tracing) and `parts.csv`.

    Args:
        cfg: As for decode_live, with `methods` (names of selectors, `plain` or `fixed:<drafter>`).
        target: Target folder.
        prompts: Prompt folders, one a domain.
        drafters: Drafter folders in the order of `cfg["drafters"]`.
        costs: Folder of profile_costs, if a selector weighs costs.
        routes: Folder of train_router, if there are routers.
        out: Folder to write.

    Raises:
        DraftpoolError: If a method is unknown.
    """
    bench = load_workbench(cfg, target, named_folders(cfg, drafters), getattr(torch, cfg["dtype"]))
    (item, *_) = bench.stream(prompts, cfg["max_prompt_tokens"], 1, cfg["order"], cfg["stream_seed"])
    methods = methods_of(cfg, bench.draft_lengths, [item.prompt_id], costs, routes)
    known = {method.name: method for method in reversed(methods)}
    for name in cfg["methods"]:
        if name not in known:
            raise DraftpoolError(
                f"unknown method `{name}`",
                "config key `profile.methods`",
                f"known: {', '.join(sorted(known))}",
            )
    decoder = Decoder(bench, cfg)
    activities = [ProfilerActivity.CPU]
    if bench.target.device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    parts = []
    with atomic_dir(out) as folder:
        for name in progress(cfg["methods"], len(cfg["methods"]), "profile", "method"):
            method, marks = known[name], []
            decoder.warm_up(item, [method])
            start = decoder.prefill(item.ids)
            with profile(activities=activities) as profiler:
                result = decoder.run(method, item.prompt_id, 0, start, cfg["max_new_tokens"], marks=marks)
            path = folder / f"trace-{name.replace(':', '-')}.json.gz"
            profiler.export_chrome_trace(str(path))
            split = split_marks(marks, _annotate(path, marks))
            parts.append(split.assign(method=name, rounds=len(result.rounds), dtype=cfg["dtype"]))
        pd.concat(parts).to_csv(folder / "parts.csv", index=False)
        write_provenance(
            folder, cfg, {"device": str(bench.target.device), "threads": torch.get_num_threads()}
        )
