"""Fill the tables of docs/scaling.md from `draftpool plan`.

    python docs/fill_scaling.py

A table stands between `<!-- plan: FLAGS -->` and `<!-- end -->` and is what `draftpool plan FLAGS` prints; `<!-- plan:
accuracy -->` is the prediction of the default study against its measured run.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
from collections import Counter
from pathlib import Path

from draftpool.cli import main as draftpool
from draftpool.config.load import merge, read_yaml, resolve
from draftpool.config.plan import Plan
from draftpool.estimate.counts import count_work
from draftpool.estimate.machines import Cpu, measured
from draftpool.estimate.space import space_of
from draftpool.estimate.table import size_text
from draftpool.estimate.world import World
from draftpool.tables.writer import markdown

DOCS = Path(__file__).resolve().parent
PAGE = DOCS / "scaling.md"
BLOCK = re.compile(r"(<!-- plan: (.+?) -->\n).*?(<!-- end -->)", re.DOTALL)


def accuracy() -> str:
    """Predicted and measured seconds, disk and memory of the default study, by stage."""
    import pandas as pd

    raw = merge(
        read_yaml(DOCS.parent / "config/default.yaml"),
        {"device": "cpu", "decode": {"dtypes": ["float32", "bfloat16"]}},
    )
    machine = Cpu()
    world = World(Plan(resolve(raw)), machine.lengths, machine.tau(""), {})
    seconds, disk, memory = Counter(), Counter(), Counter()
    for work in count_work(world):
        space = space_of(work, world, False)
        seconds[work.stage] += machine.price(work, world.shape).seconds
        disk[work.stage] += space.disk
        memory[work.stage] = max(memory[work.stage], space.host)
    told = measured()["study"]
    rows = [
        {
            "stage": stage,
            "jobs": told["jobs"][stage],
            "seconds, predicted": f"{seconds[stage]:.0f}",
            "measured": f"{found:.0f}",
            "disk, predicted": size_text(disk[stage]),
            "measured disk": size_text(told["disk"][stage]),
            "memory, predicted": size_text(memory[stage]),
            "measured memory": size_text(told["memory"][stage]),
        }
        for stage, found in told["seconds"].items()
    ]
    rows.append(
        {
            "stage": "sum",
            "jobs": sum(told["jobs"].values()),
            "seconds, predicted": f"{sum(seconds[stage] for stage in told['seconds']):.0f}",
            "measured": f"{sum(told['seconds'].values()):.0f}",
            "disk, predicted": size_text(sum(disk[stage] for stage in told["disk"])),
            "measured disk": size_text(sum(told["disk"].values())),
            "memory, predicted": size_text(max(memory.values())),
            "measured memory": size_text(max(told["memory"].values())),
        }
    )
    return markdown(pd.DataFrame(rows).astype(str))


def block(flags: str) -> str:
    """What stands in a block."""
    if flags == "accuracy":
        return f"\n{accuracy()}\n"
    shown, before = io.StringIO(), Path.cwd()
    os.chdir(DOCS.parent)
    try:
        with contextlib.redirect_stdout(shown):
            if draftpool(["plan", *shlex.split(flags)]) != 0:
                raise SystemExit(f"draftpool plan {flags} failed")
    finally:
        os.chdir(before)
    return f"```text\n{shown.getvalue().rstrip()}\n```\n"


def filled(text: str) -> str:
    """The page with its tables made again."""
    return BLOCK.sub(lambda found: found[1] + block(found[2]) + found[3], text)


def main() -> None:
    """Write the page."""
    PAGE.write_text(filled(PAGE.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
