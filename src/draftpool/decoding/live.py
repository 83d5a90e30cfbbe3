"""Live decoding of a stream under every selector, interleaved with plain decoding in one process."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import pandas as pd
import torch

from draftpool import draws
from draftpool.artefacts import (
    atomic_dir,
    content_hash,
    read_json,
    write_json,
    write_provenance,
    write_table,
)
from draftpool.config.digest import code_digest
from draftpool.config.ids import make_key
from draftpool.data.streams import StreamItem
from draftpool.decoding.clock import Mark
from draftpool.decoding.engine import Result, decode
from draftpool.decoding.evaluation import PoolEvaluation
from draftpool.decoding.lossless import first_difference
from draftpool.decoding.pool import Workbench, load_workbench, named_folders
from draftpool.decoding.sequence import Prefilled, Sampling, prefill
from draftpool.decoding.verification import gumbel_noise
from draftpool.errors import DraftpoolError
from draftpool.progress import bar
from draftpool.registry import find_registered
from draftpool.selectors.base import DECORATOR, PACKAGE, make_selector

PLAIN = "plain"
WARMUP_TOKENS = 12


@dataclass(frozen=True)
class Method:
    """A selector at one seed over its arms."""

    name: str
    cfg: dict
    arms: list[str]
    seed: int

    @cached_property
    def key(self) -> str:
        """Names this method's cells: its configuration and the code it runs."""
        module = find_registered(PACKAGE, DECORATOR, self.cfg["kind"])
        code = code_digest("draftpool.decoding.live", module)
        return make_key([self.name, self.cfg, self.arms, self.seed, code])


def methods_of(cfg: dict) -> list[Method]:
    """Plain decoding, every drafter alone, and every selector at every seed."""
    methods = [Method(PLAIN, {"kind": "plain"}, [PLAIN], 0)]
    methods += [
        Method(f"fixed:{d['name']}", {"kind": "fixed", "arm": d["name"]}, [d["name"]], 0)
        for d in cfg["drafters"]
    ]
    for name, selector in cfg["selectors"].items():
        methods += [Method(name, selector, list(cfg["pool"]), seed) for seed in cfg["selector_seeds"]]
    return methods


def _scratch(cfg: dict, content: str, device: torch.device, state: Path) -> Path:
    """Folder of finished cells: its name leaves the selectors out, so that adding one computes one.

    Cells of another device, number of threads or torch were timed under other conditions and are not used.
    """
    fixed = {name: value for name, value in cfg.items() if name not in ("selectors", "selector_seeds")}
    conditions = [str(device), torch.get_num_threads(), torch.__version__]
    return state.parent / f"live-{make_key([fixed, content, conditions])}"


def sha256_of_ids(ids: list[int]) -> str:
    """SHA-256 of token ids, to compare texts across runs."""
    return hashlib.sha256(",".join(map(str, ids)).encode()).hexdigest()


class Decoder:
    """Decodes one prompt under several methods and keeps their rows."""

    def __init__(self, bench: Workbench, cfg: dict):
        self.bench, self.cfg = bench, cfg
        self.k_pool = max(bench.drafters[name].k for name in cfg["pool"])
        # Drafters outside the pool decode too, and may draft longer blocks than the scale of the rewards.
        self.room = max(drafter.k for drafter in bench.drafters.values())
        self.half = cfg["dtype"] != "float32"
        self.evaluation = PoolEvaluation(
            {name: bench.drafters[name] for name in cfg["pool"]}, bench.target.head_weight
        )

    def prefill(self, item: StreamItem) -> Prefilled:
        """Let the target read a prompt, with room for a whole answer."""
        return prefill(self.bench.target, item.ids, self.cfg["max_new_tokens"], self.room)

    def run(
        self,
        method: Method,
        item: StreamItem,
        repeat: int,
        start: Prefilled,
        limit: int,
        marks: list[Mark] | None = None,
    ) -> Result:
        """Decode a prompt that was read under one method."""
        arms = {name: self.bench.drafters.get(name) for name in method.arms}
        sampling = Sampling(limit, self.bench.ends, self.cfg["temperature"], repeat)
        selector = make_selector(method.cfg, method.arms)
        keep = self.half and method.name == PLAIN
        return decode(
            self.bench.target,
            start,
            arms,
            selector,
            sampling,
            self.k_pool,
            item.prompt_id,
            method.seed,
            keep,
            self.evaluation if method.arms == list(self.cfg["pool"]) else None,
            marks,
        )

    def warm_up(self, item: StreamItem, methods: list[Method]) -> None:
        """Decode a few tokens under every method."""
        start = prefill(self.bench.target, item.ids, WARMUP_TOKENS, self.room)
        for method in methods:
            self.run(method, item, 0, start, WARMUP_TOKENS)

    def prompt(self, item: StreamItem, repeat: int, methods: list[Method], shown) -> dict[str, dict]:
        """Rows of every method on one prompt; plain decoding takes its place in the shuffled order."""
        limit, start = self.cfg["max_new_tokens"], self.prefill(item)
        if self.cfg["temperature"] > 0.0:
            # Drawn before anything is timed: noise belongs to the text, and blocks would pay for more rows of it.
            for position in range(limit + self.room + 1):
                gumbel_noise(self.bench.target.head_weight.shape[0], repeat, item.prompt_id, position)
        order = draws.generator("method_order", item.prompt_id, repeat).permutation(len(methods))
        results = {}
        for place in order:
            results[place] = self.run(methods[place], item, repeat, start, limit)
            shown.update(1)
        plain = next(results[place] for place in order if methods[place].name == PLAIN)
        return {
            methods[place].key: self._rows(methods[place], item, repeat, results[place], plain, start)
            for place in order
        }

    def _rows(
        self, method: Method, item: StreamItem, repeat: int, result: Result, plain: Result, start: Prefilled
    ) -> dict:
        common = {
            "stream": self.cfg["stream"],
            "selector": method.name,
            "selector_seed": method.seed,
            "repeat": repeat,
            "prompt_id": item.prompt_id,
            "domain": item.domain,
            "prompt_index": item.index,
            "dtype": self.cfg["dtype"],
        }
        place = first_difference(result.tokens, plain.tokens)
        sequence = common | {
            "sha256": sha256_of_ids(result.tokens),
            "n_tokens": len(result.tokens),
            "rounds": len(result.rounds),
            "wall_time": result.seconds,
            "t_prefill": start.seconds,
            "plain_wall_time": plain.seconds,
            "plain_n_tokens": len(plain.tokens),
            "plain_sha256": sha256_of_ids(plain.tokens),
            "matches_plain": place < 0,
            "first_mismatch": place,
            "top2_margin": plain.margins[place] if 0 <= place < len(plain.margins) else None,
        }
        return {"sequence": sequence, "steps": [common | row for row in result.rounds]}


def decode_live(
    cfg: dict, target: Path, prompts: list[Path], drafters: list[Path], lossless: Path, state: Path, out: Path
) -> None:
    """Write `steps.parquet` and `sequences.parquet` of one stream in one dtype.

    Args:
        cfg: `stream`, `domains`, `prompts_per_domain`, `order`, `stream_seed`, `dtype`, `pool`, `drafters`,
            `selectors`, `selector_seeds`, `max_new_tokens`, `max_prompt_tokens`, `temperature`, `repeats`,
            `warmup_prompts`, `taps`, `backend`, `device`.
        target: Target folder.
        prompts: Prompt folders, one a domain.
        drafters: Drafter folders in the order of `cfg["drafters"]`.
        lossless: Report of the gate; without it nothing is decoded.
        state: Scratch folder; finished prompts are kept beside it and not decoded again.
        out: Folder to write.

    Raises:
        DraftpoolError: If the gate's report is missing, or a float32 text differs from plain decoding.
    """
    read_json(lossless)
    folders = named_folders(cfg, drafters)
    methods = methods_of(cfg)
    bench = load_workbench(cfg, target, folders, getattr(torch, cfg["dtype"]))
    scratch = _scratch(cfg, content_hash(target, *prompts, *drafters), bench.target.device, state)
    # At temperature 0 there is one text per prompt.
    repeats = cfg["repeats"] if cfg["temperature"] > 0.0 else 1
    decoder = Decoder(bench, cfg)
    items = bench.stream(
        prompts, cfg["max_prompt_tokens"], cfg["prompts_per_domain"], cfg["order"], cfg["stream_seed"]
    )
    cells, cold = [], True
    with bar(
        len(items) * repeats * len(methods), f"decode {cfg['stream']} {cfg['dtype']}", "answer"
    ) as shown:
        for item in items:
            for repeat in range(repeats):
                path = scratch / f"{item.prompt_id}-{repeat}.json"
                found = read_json(path) if path.exists() else {}
                missing = [method for method in methods if method.key not in found]
                shown.update(len(methods) - len(missing))
                if missing:
                    if cold:
                        for warmup in items[: cfg["warmup_prompts"]]:
                            decoder.warm_up(warmup, methods)
                        cold = False
                    if missing[0].name != PLAIN:
                        # The new method is paired with plain decoding measured beside it, not long ago.
                        missing = [methods[0], *missing]
                        shown.update(-1)
                    found |= decoder.prompt(item, repeat, missing, shown)
                    write_json(path, found)
                cells += [found[method.key] for method in methods]
    # Cells read back from disk have their keys in another order; the tables must not tell.
    sequences = pd.DataFrame([cell["sequence"] for cell in cells]).sort_index(axis=1)
    steps = pd.DataFrame([row for cell in cells for row in cell["steps"]]).sort_index(axis=1)
    wrong = sequences[~sequences.matches_plain]
    if cfg["dtype"] == "float32" and len(wrong):
        row = wrong.iloc[0]
        raise DraftpoolError(
            f"{len(wrong)} float32 texts differ from plain decoding, first "
            f"{row.selector} on {row.prompt_id} at token {row.first_mismatch}",
            "decode_live",
            "this is a bug: please report it with the log",
        )
    with atomic_dir(out) as folder:
        write_table(
            folder / "sequences.parquet",
            sequences.assign(run_id=out.name, top2_margin=sequences.top2_margin.astype(float)),
        )
        write_table(
            folder / "steps.parquet", steps.assign(run_id=out.name, reward_bd=steps.reward_bd.astype(float))
        )
        write_provenance(
            folder, cfg, {"device": str(bench.target.device), "threads": torch.get_num_threads()}
        )
