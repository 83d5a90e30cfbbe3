"""Seconds of a job: units measured on a CPU, published ones of GPUs, and rooflines where there are none.

Every price says what it rests on: `measured` (this project, `measured.json`), `published` (`published.yaml`, with its
source) or `roofline` (bytes and products over a data sheet's peak at the stated utilisation).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Protocol

from draftpool.artefacts import read_json
from draftpool.config.load import read_yaml
from draftpool.estimate.counts import Work
from draftpool.estimate.drafters import block_shape, training_flops
from draftpool.estimate.lengths import Lengths
from draftpool.estimate.shapes import Shape, shape_of
from draftpool.selectors.base import PLAIN

MEASURED, PUBLISHED, ROOFLINE = "measured", "published", "roofline"
FOLDER = Path(__file__).parent
ITEM = {"float32": 4, "bfloat16": 2}


@cache
def measured() -> dict[str, Any]:
    """What was measured on a CPU."""
    return read_json(FOLDER / "measured.json")


@cache
def published() -> dict[str, Any]:
    """What others published."""
    return read_yaml(FOLDER / "published.yaml")


@dataclass(frozen=True)
class Price:
    """Seconds of a job, whether they are a GPU's, and what they rest on (`sources`: keys of `published.yaml`)."""

    seconds: float
    on_gpu: bool
    basis: str
    sources: tuple[str, ...] = ()


class Machine(Protocol):
    """Prices jobs.

    Attributes:
        name: Shown above the table.
        lengths: Assumed lengths of texts.
    """

    name: str
    lengths: Lengths

    def tau(self, model: str) -> Mapping[str, float]:
        """Tokens per target call by kind of drafter."""

    def price(self, work: Work, shape: Shape) -> Price:
        """The price of a job."""


def _light(work: Work) -> Price | None:
    """Jobs that need no GPU anywhere: priced as measured."""
    unit, counts = measured()["seconds"], work.counts
    if work.stage in ("make_drafter", "fetch_target"):
        return Price(unit[f"{work.stage}/job"], False, MEASURED)
    if work.stage == "compute_stats":
        return Price(counts["acceptance_rows"] * unit["compute_stats/row"], False, MEASURED)
    if work.stage in ("judge_claims", "copy_summary", "draw_figure", "write_table"):
        return Price(counts["jobs"] * unit[f"{work.stage}/job"], False, MEASURED)
    if work.stage == "trace_provenance":
        # The measured study had no such job; it reads and writes small files, as a table's does.
        return Price(counts["jobs"] * unit["write_table/job"], False, MEASURED)
    if work.stage in ("prepare_prompts", "train_router"):
        return Price(counts["prompts"] * unit[f"{work.stage}/prompt"], False, MEASURED)
    if work.stage == "prepare_set" and work.detail == "":
        return Price(counts["prompts"] * unit["prepare_set/prompt"], False, MEASURED)
    if work.stage == "replay_selectors":
        return Price(counts["rounds"] * unit["replay_selectors/round"], False, MEASURED)
    return None


class Cpu:
    """The CPU that the default study was measured on; another target is priced by its weights."""

    def __init__(self):
        self.name = measured()["machine"]
        told, others = measured()["lengths"], published()["lengths"]
        self.lengths = Lengths(
            told["answer_share"],
            told["prompt_share"],
            max(told["answer"], others["answer"]),
            max(told["prompt"], others["prompt"]),
        )

    def tau(self, model: str) -> Mapping[str, float]:
        """As measured in the default study, whatever the target."""
        return measured()["tau"]

    def price(self, work: Work, shape: Shape) -> Price:
        """Measured units times counts."""
        light = _light(work)
        if light is not None:
            return light
        counts, unit, rate = work.counts, measured()["seconds"], measured()["flops_per_second"]
        scale = shape.parameters / measured()["target_weights"]
        if work.stage in ("generate_responses", "prepare_set"):
            tokens = counts["prompt_tokens"] + counts["answer_tokens"]
            seconds = 2 * shape.multiplied * tokens / rate["generate_responses"]
        elif work.stage == "train_drafter":
            seconds = counts["flops"] / rate[f"train_drafter/{work.detail}"]
        elif work.stage == "score_pool":
            flops = counts["drafter_flops"] + 2 * shape.multiplied * counts["target_tokens"]
            seconds = flops / rate["score_pool"]
        elif work.stage == "decode_live":
            seconds = scale * counts["calls"] * unit[f"decode_live/{work.detail}/call"]
        elif work.stage == "profile_costs":
            seconds = scale * counts["parts"] * unit["profile_costs/part"]
        elif work.stage == "fetch_drafter":
            return Price(4 * counts["weights"] / published()["network"], False, ROOFLINE)
        else:
            seconds = scale * counts["calls"] * unit[f"{work.stage}/call"]
        return Price(seconds, False, MEASURED)


class Gpu:
    """One GPU; stages that use none are priced as measured on the CPU.

    Attributes:
        training_rate: FLOP/s of D-PACE's published step, which prices trainings of block drafters.
    """

    def __init__(self, name: str = "h200"):
        self.peak, self.utilisation = published()["gpus"][name], published()["utilisation"]
        self.name = f"one {name.upper()} a job; rooflines reach {self.utilisation:.0%} of its data sheet"
        others = published()["lengths"]
        self.lengths = Lengths(1.0, 1.0, others["answer"], others["prompt"])
        self.training_rate = self._published_training()

    def tau(self, model: str) -> Mapping[str, float]:
        """Published tokens per target call."""
        return published()["tau"]["any"] | published()["tau"].get(model, {})

    def _published_training(self) -> float:
        """FLOP/s of D-PACE's published step, by our own count of its work."""
        told, lengths = published()["training"], published()["lengths"]
        shape = shape_of(told["model"], {}, "published.yaml")
        drafter = block_shape(shape, 5, told["n_layers"], told["block_size"], None)
        context, anchors = lengths["prompt"] + lengths["answer"], told["anchors"]
        each = training_flops(drafter, shape, context, anchors, min(anchors, lengths["answer"] - 1))
        return told["sequences"] * each / told["seconds"]

    def call(self, shape: Shape, dtype: str) -> float:
        """Seconds of a target call: as published for 8B parameters, more where more bytes are read, never less."""
        told = published()["call"]
        other = shape_of(told["model"], {}, "published.yaml")
        return told["seconds"] * max(1.0, shape.parameters * ITEM[dtype] / (other.parameters * 2))

    def draft(self, kind: str, drafters: Mapping[str, float]) -> float:
        """Seconds of a draft; ``drafters`` holds its `layers` and `draft_tokens`."""
        told, layers = published()["draft"], drafters["layers"]
        if kind == "block":
            return told["block_fixed"] + layers * told["block_layer"]
        # A layer of a small model costs what an EAGLE head does.
        return told["eagle_token"] * drafters["draft_tokens"] * max(1, layers) if layers else 0.0

    def _writing(self, work: Work, shape: Shape, dtype: str) -> Price:
        counts = work.counts
        if counts["batch"] == 1:
            seconds = counts["answer_tokens"] * self.call(shape, dtype)
            return Price(seconds, True, PUBLISHED, ("banditspec",))
        batch, item = counts["batch"], ITEM[dtype]
        read = item * (shape.parameters + batch * counts["length"] * shape.cache_values)
        step = max(read / self.peak["bandwidth"], 2 * shape.multiplied * batch / self.peak[dtype])
        prompts = 2 * shape.multiplied * counts["prompt_tokens"] / self.peak[dtype]
        seconds = (counts["answer_tokens"] / batch * step + prompts) / self.utilisation
        return Price(seconds, True, ROOFLINE)

    def price(self, work: Work, shape: Shape) -> Price:
        """Published units times counts where there are any, else a roofline."""
        if work.stage in ("fetch_target", "fetch_drafter"):
            size = work.counts["weights"] * shape.stored_bytes
            return Price(size / published()["network"], False, ROOFLINE)
        light = _light(work)
        if light is not None:
            return light
        counts = work.counts
        if work.stage in ("generate_responses", "prepare_set"):
            return self._writing(work, shape, work.detail if work.detail in ITEM else "float32")
        if work.stage == "train_drafter":
            if work.detail == "block":
                return Price(counts["flops"] / self.training_rate, True, PUBLISHED, ("dpace",))
            return Price(counts["flops"] / (self.peak["bfloat16"] * self.utilisation), True, ROOFLINE)
        if work.stage == "score_pool":
            flops = counts["drafter_flops"] + 2 * shape.multiplied * counts["target_tokens"]
            return Price(flops / (self.peak["float32"] * self.utilisation), True, ROOFLINE)
        dtype = work.detail if work.detail in ITEM else "float32"
        calls = sum(work.rounds.values()) * self.call(shape, dtype)
        drafts = sum(
            count * self.draft(kind, work.drafts[kind])
            for made in (work.rounds, work.evaluated)
            for kind, count in made.items()
            if kind != PLAIN
        )
        learning = published()["learner"] * (sum(work.rounds.values()) - work.rounds[PLAIN])
        return Price(calls + drafts + learning, True, PUBLISHED, ("banditspec", "dflash", "hedgespec"))
