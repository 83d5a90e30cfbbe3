"""Live decoding of a stream under every selector, interleaved with plain decoding in one process."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path

import pandas as pd
import torch

from draftpool import draws
from draftpool.artefacts import (
    atomic_dir,
    content_hash,
    read_json,
    read_table,
    write_json,
    write_provenance,
    write_table,
)
from draftpool.config.ids import make_key
from draftpool.data.streams import StreamItem, conversation, session_of, turn_id
from draftpool.decoding.clock import Mark
from draftpool.decoding.engine import Result, decode
from draftpool.decoding.evaluation import PoolEvaluation
from draftpool.decoding.lossless import first_difference
from draftpool.decoding.methods import Method, methods_of
from draftpool.decoding.pool import Workbench, load_workbench, named_folders
from draftpool.decoding.sequence import Prefilled, Sampling, prefill
from draftpool.decoding.verification import gumbel_noise
from draftpool.drafters.base import Remembering, learns
from draftpool.errors import DraftpoolError
from draftpool.progress import bar
from draftpool.selectors.base import PLAIN, Selector
from draftpool.targets.load import prompt_ids

WARMUP_TOKENS = 12


def _scratch(cfg: dict, content: str, device: torch.device, state: Path) -> Path:
    """Folder of finished cells: its name leaves the selectors out, so that adding one computes one.

    Cells of another device, number of threads or torch were timed under other conditions and are not used.
    """
    fixed = {name: value for name, value in cfg.items() if name not in ("selectors", "selector_seeds")}
    conditions = [str(device), torch.get_num_threads(), torch.__version__]
    return state.parent / f"live-{make_key([fixed, content, conditions])}"


def _answered(folders: list[Path]) -> set[str] | None:
    """Sessions with answers; None where there are no sessions."""
    if not folders:
        return None
    tables = [read_table(folder / "responses.parquet", columns=["prompt_id"]) for folder in folders]
    return {session_of(prompt)[0] for table in tables for prompt in table["prompt_id"]}


def _broken_off(scratch: Path, items: list[StreamItem], repeats: int, methods: list[Method]) -> set[str]:
    """Keys of methods that carry state from query to query and lack a cell: they begin again with the first."""
    carrying = {method.key for method in methods if method.carries}
    if not carrying:
        return set()
    paths = [scratch / f"{item.prompt_id}-{repeat}.json" for item in items for repeat in range(repeats)]
    whole = carrying.intersection(*((read_json(path) if path.exists() else {}) for path in paths))
    return carrying - whole


def sha256_of_ids(ids: list[int]) -> str:
    """SHA-256 of token ids, to compare texts across runs."""
    return hashlib.sha256(",".join(map(str, ids)).encode()).hexdigest()


class Decoder:
    """Decodes one prompt under several methods and keeps their rows."""

    def __init__(self, bench: Workbench, cfg: dict):
        self.bench, self.cfg = bench, cfg
        self.k_pool = max(bench.drafters[name].k for name in cfg["pool"] if name != PLAIN)
        # Drafters outside the pool decode too, and may draft longer blocks than the scale of the rewards.
        self.room = max(drafter.k for drafter in bench.drafters.values())
        self.half = cfg["dtype"] != "float32"
        self.sampling = Sampling(
            cfg["max_new_tokens"],
            bench.ends,
            cfg["temperature"],
            top_p=cfg.get("top_p", 1.0),
            verification=cfg.get("verification", "match"),
        )
        self._evaluations: dict[tuple[str, ...], PoolEvaluation] = {}
        self._carried: dict[str, Selector] = {}
        # Some arms of the pool have no distribution: one scale of acceptance for all.
        self.hard = not all(bench.drafters[name].modelled for name in cfg["pool"] if name != PLAIN)
        # What drafters remember of the stream, for each run along it.
        self._memories: dict[tuple[str, int, str], object] = {}

    def prefill(self, ids: list[int]) -> Prefilled:
        """Let the target read a prompt, with room for a whole answer."""
        return prefill(self.bench.target, ids, self.cfg["max_new_tokens"], self.room)

    def evaluation(self, arms: list[str]) -> PoolEvaluation:
        """Evaluates these arms together, kept for all queries."""
        if tuple(arms) not in self._evaluations:
            own = {name: self.bench.drafters.get(name) for name in arms}
            self._evaluations[tuple(arms)] = PoolEvaluation(own, self.bench.target.head_weight)
        return self._evaluations[tuple(arms)]

    def run(
        self,
        method: Method,
        prompt_id: str,
        repeat: int,
        start: Prefilled,
        limit: int,
        selector: Selector | None = None,
        marks: list[Mark] | None = None,
        **options,
    ) -> Result:
        """Decode a prompt that was read under one method."""
        arms = {name: self.bench.drafters.get(name) for name in method.arms}
        for name, drafter in self._learning(method):
            drafter.memory = self._memory(method, repeat, name, drafter)
        sampling = replace(self.sampling, max_new_tokens=limit, sample_seed=repeat)
        selector = selector or method.selector()
        return decode(
            self.bench.target,
            start,
            arms,
            selector,
            sampling,
            self.k_pool,
            prompt_id,
            method.seed,
            self.half and method.name == PLAIN,
            # Weights may be stacked anew for it, which bandits have no use for.
            self.evaluation(method.arms) if selector.needs == "full" else None,
            marks,
            method.context(session_of(prompt_id)[0]),
            hard=self.hard,
            **options,
        )

    def _learning(self, method: Method) -> list[tuple[str, Remembering]]:
        """Arms of a method that remember its stream."""
        arms = {name: self.bench.drafters.get(name) for name in method.arms}
        return [(name, drafter) for name, drafter in arms.items() if learns(drafter)]

    def _memory(self, method: Method, repeat: int, name: str, drafter: Remembering) -> object:
        key = (method.key, repeat, name)
        if key not in self._memories:
            self._memories[key] = drafter.new_memory()
        return self._memories[key]

    def remember(self, method: Method, repeat: int, answers: list[list[int]]) -> None:
        """Tell the arms of a method that remember the stream what was written, whichever arm drafted it."""
        for name, drafter in self._learning(method):
            drafter.memory = self._memory(method, repeat, name, drafter)
            for answer in answers:
                drafter.remember(answer)

    def warm_up(self, item: StreamItem, methods: list[Method]) -> None:
        """Decode a few tokens under every method."""
        start = prefill(self.bench.target, item.ids, WARMUP_TOKENS, self.room)
        for method in methods:
            self.run(method, item.prompt_id, 0, start, WARMUP_TOKENS)

    def query(self, item: StreamItem, repeat: int, methods: list[Method], shown) -> dict[str, dict]:
        """Rows of every method on one prompt or session; plain decoding takes its place in the shuffled order.

        A session is decoded turn by turn; every method goes on from its own answers.
        """
        order = draws.generator("method_order", item.prompt_id, repeat).permutation(len(methods))
        selectors = {place: self._selector(methods[place]) for place in order}
        answers: dict[int, list[list[int]]] = {place: [] for place in order}
        played = dict.fromkeys(order, 0)
        found = {method.key: {"sequences": [], "steps": [], "answers": []} for method in methods}
        session = None if item.turns is None else item.prompt_id
        turns = len(item.turns or [item])
        for turn in range(turns):
            name = item.prompt_id if session is None else turn_id(session, turn)
            self._draw_noise(name, repeat)
            starts: dict[tuple[int, ...], Prefilled] = {}
            results, prompts_of = {}, {}
            for place in order:
                method = methods[place]
                ids = prompts_of[place] = self._prompt(item, turn, answers[place])
                if tuple(ids) not in starts:
                    starts[tuple(ids)] = self.prefill(ids)
                selector, resumed = selectors[place]
                results[place] = self.run(
                    method,
                    name,
                    repeat,
                    starts[tuple(ids)],
                    self.cfg["max_new_tokens"],
                    selector,
                    resumed=resumed,
                    session=session,
                    rounds_before=played[place],
                )
                answers[place].append(results[place].tokens)
                self.remember(method, repeat, [results[place].tokens])
                if self._learning(method):
                    # A run that is taken up again must know what was written before.
                    found[method.key]["answers"].append(results[place].tokens)
                played[place] += len(results[place].rounds)
                shown.update(int(turn == turns - 1))
            plain_place = next(place for place in order if methods[place].name == PLAIN)
            plain = results[plain_place]
            for place in order:
                same = prompts_of[place] == prompts_of[plain_place]
                rows = self._rows(methods[place], item, name, repeat, results[place], plain, same)
                found[methods[place].key]["sequences"].append(rows[0])
                found[methods[place].key]["steps"] += rows[1]
        return found

    def _selector(self, method: Method) -> tuple[Selector, bool]:
        """A method's selector for the next query, and whether it goes on from the query before."""
        if not method.carries:
            return method.selector(), False
        resumed = method.key in self._carried
        return self._carried.setdefault(method.key, method.selector()), resumed

    def _prompt(self, item: StreamItem, turn: int, answers: list[list[int]]) -> list[int]:
        if item.turns is None:
            return item.ids
        return prompt_ids(
            self.bench.tokenizer, conversation(self.bench.tokenizer, item.turns[: turn + 1], answers)
        )

    def _draw_noise(self, prompt_id: str, repeat: int) -> None:
        """Draw the text's noise before anything is timed: it belongs to the text, and blocks would pay for more."""
        if self.cfg["temperature"] > 0.0:
            for position in range(self.cfg["max_new_tokens"] + self.room + 1):
                gumbel_noise(self.bench.target.head_weight.shape[0], repeat, prompt_id, position)

    def _rows(
        self,
        method: Method,
        item: StreamItem,
        prompt_id: str,
        repeat: int,
        result: Result,
        plain: Result,
        same_prompt: bool,
    ) -> tuple[dict, list[dict]]:
        """Sequence row and step rows; behind a half-precision flip in an earlier turn the texts are not comparable.

        Under `rejection` texts have plain decoding's law, not its tokens, and are never compared: `matches_plain` and
        `first_mismatch` are missing.
        """
        common = {
            "stream": self.cfg["stream"],
            "selector": method.name,
            "selector_seed": method.seed,
            "repeat": repeat,
            "prompt_id": prompt_id,
            "domain": item.domain,
            "prompt_index": item.index,
            "dtype": self.cfg["dtype"],
        }
        compared = not self.sampling.rejects
        place = first_difference(result.tokens, plain.tokens) if same_prompt else 0
        sequence = common | {
            "sha256": sha256_of_ids(result.tokens),
            "n_tokens": len(result.tokens),
            "rounds": len(result.rounds),
            "wall_time": result.seconds,
            "t_prefill": result.prefill_seconds,
            "plain_wall_time": plain.seconds,
            "plain_n_tokens": len(plain.tokens),
            "plain_sha256": sha256_of_ids(plain.tokens),
            "matches_plain": place < 0 if compared else None,
            "first_mismatch": place if compared else None,
            "top2_margin": None,
        }
        if compared and same_prompt and 0 <= place < len(plain.margins):
            sequence["top2_margin"] = plain.margins[place]
        return sequence, [common | row for row in result.rounds]


def decode_live(
    cfg: dict,
    target: Path,
    prompts: list[Path],
    drafters: list[Path],
    lossless: Path,
    costs: Path | None,
    routes: Path | None,
    answers: list[Path],
    state: Path,
    out: Path,
) -> None:
    """Write `steps.parquet` and `sequences.parquet` of one stream in one dtype.

    Args:
        cfg: `stream`, `domains`, `prompts_per_domain`, `order`, `stream_seed`, `dtype`, `pool`, `homes`,
            `generalist`, `drafters`, `selectors`, `selector_seeds`, `max_new_tokens`, `max_prompt_tokens`,
            `temperature`, `repeats`, `warmup_prompts`, `taps`, `backend` (`device_map`), `device`; `top_p` (default 1)
            and `verification` (default `match`).
        target: Target folder.
        prompts: Prompt folders, one a domain.
        drafters: Drafter folders in the order of `cfg["drafters"]`.
        lossless: Report of the gate; without it nothing is decoded.
        costs: Folder of profile_costs, if a selector weighs costs.
        routes: Folder of train_router, if there are routers.
        answers: Response folders of the prompt sets of sessions, which tell those that do not become too long.
        state: Scratch folder; finished prompts are kept beside it and not decoded again.
        out: Folder to write.

    Raises:
        DraftpoolError: If the gate's report is missing, or a float32 text differs from plain decoding (which under
            `rejection` above temperature 0 it may).
    """
    read_json(lossless)
    folders = named_folders(cfg, drafters)
    bench = load_workbench(cfg, target, folders, getattr(torch, cfg["dtype"]))
    items = bench.stream(
        prompts,
        cfg["max_prompt_tokens"],
        cfg["prompts_per_domain"],
        cfg["order"],
        cfg["stream_seed"],
        _answered(answers),
    )
    methods = methods_of(cfg, bench.draft_lengths, [item.prompt_id for item in items], costs, routes)
    scratch = _scratch(cfg, content_hash(target, *prompts, *drafters), bench.target.device, state)
    # At temperature 0 there is one text per prompt.
    repeats = cfg["repeats"] if cfg["temperature"] > 0.0 else 1
    decoder = Decoder(bench, cfg)
    cells, cold = [], True
    broken = _broken_off(scratch, items, repeats, methods)
    with bar(
        len(items) * repeats * len(methods), f"decode {cfg['stream']} {cfg['dtype']}", "answer"
    ) as shown:
        for item in items:
            for repeat in range(repeats):
                path = scratch / f"{item.prompt_id}-{repeat}.json"
                found = read_json(path) if path.exists() else {}
                missing = [method for method in methods if method.key not in found or method.key in broken]
                for method in methods:
                    if method not in missing:
                        decoder.remember(method, repeat, found[method.key]["answers"])
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
                    found |= decoder.query(item, repeat, missing, shown)
                    write_json(path, found)
                cells += [found[method.key] for method in methods]
    # Cells read back from disk have their keys in another order; the tables must not tell.
    sequences = pd.DataFrame([row for cell in cells for row in cell["sequences"]]).sort_index(axis=1)
    steps = pd.DataFrame([row for cell in cells for row in cell["steps"]]).sort_index(axis=1)
    if decoder.sampling.rejects:
        # NaN, which the statistics do not take for a difference as they would None.
        sequences = sequences.astype({"matches_plain": float, "first_mismatch": float})
        wrong = sequences.iloc[:0]
    else:
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
