"""Decoding: plain steps, blocks, drafts, stacked evaluation, selection and prompt lookup against their peers."""

from __future__ import annotations

import itertools
import statistics
import time

import torch
import torch.nn.functional as F
from beside_transformers import BesideTransformers
from harness import interleave, parser, ratio, run, spread, total_ratio
from transformers import DynamicCache

from draftpool.decoding.evaluation import PoolEvaluation
from draftpool.drafters.block import BlockDrafterModel
from draftpool.drafters.block_live import BlockDrafter, load_model
from draftpool.drafters.ngram import NgramDrafter
from draftpool.targets.load import synchronise

CONTEXT = 150
STACKED = 6
LOOKUP = 10


def read_bandwidth(device: torch.device, repeats: int) -> list[float]:
    """Bytes per second of summing 1 GB, the bound for anything that reads its weights once."""
    values = torch.ones(2**28, device=device)
    seconds = interleave({"sum": values.sum}, repeats, device)["sum"]
    return [values.numel() * 4 / second for second in seconds]


def weight_bytes(target) -> int:
    """Bytes of the weights that one decoded token reads."""
    size = target.dtype.itemsize
    layers = [
        part for layer in target.layers for part in (layer.qkv, layer.output, layer.gate_up, layer.down)
    ]
    return size * sum(part.in_features * part.out_features for part in [*layers, target.head])


def longer_block(drafter: BlockDrafter, target, block_size: int) -> BlockDrafter:
    """The same weights with a block of another size (what it drafts is of no interest, its cost is)."""
    config = drafter.model.config.model_copy(update={"block_size": block_size})
    vocabulary = drafter.model.vocabulary
    model = BlockDrafterModel(config, target.embedding, target.head_weight[vocabulary], vocabulary)
    return BlockDrafter("long", model.to(target.device, target.dtype).eval().requires_grad_(False))


class Bench(BesideTransformers):
    """The study's target and pool, beside the same target in transformers."""

    def __init__(self, options):
        super().__init__("decode", options)
        self.pool = {
            name: BlockDrafter(name, load_model(folder, self.target))
            for name, folder in self.study.pool.items()
        }

    def one_token(self) -> None:
        """Forward passes after a prompt: widths, drafts and stacked evaluation against one token."""
        target, options, report = self.target, self.options, self.report
        ids = torch.randint(100, target.hf_config.vocab_size, (1, CONTEXT), device=self.device)
        cache = target.new_cache(CONTEXT + 64)
        taps = target.forward(ids, cache, "none").taps[0]
        first = next(iter(self.pool.values()))
        long = longer_block(first, target, 8)
        # A smaller pool is filled up with copies, which cost what other drafters would.
        folders = itertools.islice(itertools.cycle(self.study.pool.values()), STACKED)
        members = {
            str(number): BlockDrafter(str(number), load_model(folder, target))
            for number, folder in enumerate(folders)
        }
        evaluation = PoolEvaluation(members, target.head_weight)
        for drafter in (first, long, evaluation.stacked):
            drafter.reset(CONTEXT + 64)
            drafter.catch_up(ids[0], taps)

        def block(n: int):
            def run() -> None:
                target.forward(ids[:, :n], cache)
                cache.rollback(n)

            return run

        past = DynamicCache()
        with torch.inference_mode():
            self.peer(ids, cache=past, use_cache=True)

        @torch.inference_mode()
        def peer() -> None:
            self.peer(ids[:, :1], cache=past, use_cache=True)
            past.crop(-1)

        width = first.k + 1
        arms = {f"block of {n}": block(n) for n in sorted({1, 2, width, 8, 16})}
        arms |= {
            "transformers, one token": peer,
            f"draft, block of {width}": lambda: first.draft(5),
            "draft, block of 8": lambda: long.draft(5),
            f"stacked evaluation of {len(members)}": lambda: evaluation.stacked.evaluate(5),
        }
        times = interleave(arms, options.repeats, self.device)
        for name, values in times.items():
            report.row(name, spread([1000 * value for value in values]), "ms")
        report.row(
            "transformers / ours, one token", ratio(times, "transformers, one token", "block of 1"), "x"
        )
        report.row("verify 8 / one token (bar: at most 1.15)", ratio(times, "block of 8", "block of 1"), "x")
        report.row(
            "draft 8 / one token (bar: at most 0.15)", ratio(times, "draft, block of 8", "block of 1"), "x"
        )
        report.row(
            f"stacked {len(members)} / one draft (bar: at most 4 on a CPU)",
            ratio(times, f"stacked evaluation of {len(members)}", f"draft, block of {width}"),
            "x",
        )
        heads = {name: drafter.model.head.numel() for name, drafter in (("first", first), ("long", long))}
        size = target.dtype.itemsize
        layers = size * sum(part.numel() for part in first.model.layers.parameters())
        union = evaluation.stacked.model.head.numel()
        report.result["bytes"] = {
            **{name: weight_bytes(target) for name in arms if name.startswith("block of")},
            "transformers, one token": weight_bytes(target),
            f"draft, block of {width}": layers + size * heads["first"],
            "draft, block of 8": layers + size * heads["long"],
            f"stacked evaluation of {len(members)}": len(members) * layers + size * union,
        }
        bandwidth = read_bandwidth(self.device, 10)
        report.row("read bandwidth", spread([value / 1e9 for value in bandwidth]), "GB/s")
        one = statistics.median(times["block of 1"])
        report.row("weights read per plain token", weight_bytes(target) / 1e6, "MB")
        share = weight_bytes(target) / one / statistics.median(bandwidth)
        report.row("share of the bandwidth limit, one token (bar: at least 0.4)", share, "")
        break_even = (
            statistics.median(times[f"block of {width}"])
            + statistics.median(times[f"draft, block of {width}"])
        ) / one
        report.row(f"break-even tau at block {width}", break_even, "tokens")

    def products(self) -> None:
        """The target's own products alone: packed weights against the plain kernel, at several numbers of rows."""
        layers, report = self.target.layers, self.report
        kinds = {
            "gate and up": [layer.gate_up for layer in layers],
            "down": [layer.down for layer in layers],
            "head": [self.target.head],
        }
        for name, parts in kinds.items():
            shape = (parts[0].out_features, parts[0].in_features)
            plain = [torch.randn(shape, dtype=self.target.dtype, device=self.device) for _ in parts]
            for rows in (1, 8, 32):
                x = torch.randn(rows, shape[1], dtype=self.target.dtype, device=self.device)
                arms = {
                    "ours": lambda parts=parts, x=x: [part(x) for part in parts],
                    "plain": lambda plain=plain, x=x: [F.linear(x, weight) for weight in plain],
                }
                for arm, seconds in interleave(arms, max(3, self.options.repeats // 4), self.device).items():
                    operations = 2 * rows * shape[0] * shape[1] * len(parts)
                    size = plain[0].element_size() * shape[0] * shape[1] * len(parts)
                    unit, amount = ("GB/s", size) if rows == 1 else ("GFLOP/s", operations)
                    speeds = [amount / second / 1e9 for second in seconds]
                    report.row(f"{name} {shape[0]} x {shape[1]}, {rows} rows, {arm}", spread(speeds), unit)

    def texts(self) -> None:
        """Whole answers: plain, the generalist, prompt lookup, and the peers; every arm once per prompt."""
        name, generalist = next(iter(self.pool.items()))
        lookup = {"ngram": NgramDrafter("ngram", LOOKUP, device=self.device)}
        arms = {
            "transformers": lambda ids: self.generate(ids),
            "transformers lookup": lambda ids: self.generate(ids, prompt_lookup_num_tokens=LOOKUP),
            "plain": lambda ids: self.decode(ids, {"plain": None}, {"kind": "plain"}, 1).tokens,
            "lookup": lambda ids: self.decode(ids, lookup, {"kind": "fixed", "arm": "ngram"}, LOOKUP).tokens,
            name: lambda ids: (
                self.decode(ids, {name: generalist}, {"kind": "fixed", "arm": name}, generalist.k).tokens
            ),
        }
        seconds = {arm: [] for arm in arms}
        tokens, differing, domains = [], dict.fromkeys(arms, 0), [domain for domain, _ in self.prompts]
        for number, (_, prompt) in enumerate([self.prompts[0], *self.prompts]):
            texts = {}
            for arm in list(arms) if number % 2 else list(reversed(arms)):
                synchronise(self.device)
                started = time.perf_counter()
                texts[arm] = arms[arm](prompt)
                synchronise(self.device)
                if number:
                    seconds[arm].append(time.perf_counter() - started)
            if number:
                tokens.append(len(texts["plain"]))
                for arm, text in texts.items():
                    differing[arm] += text != texts["plain"]
        report = self.report
        for arm, values in seconds.items():
            report.row(f"{arm}, prefill included", sum(tokens) / sum(values), "tokens/s")
            report.row(f"{arm}, answers that differ from plain", float(differing[arm]), "answers")
        report.row("plain / transformers (bar: at least 1.8)", ratio(seconds, "transformers", "plain"), "x")
        report.row(
            "lookup / transformers lookup (bar: at least 1.3)",
            total_ratio(seconds, "transformers lookup", "lookup"),
            "x",
        )
        report.row(f"{name} / plain", total_ratio(seconds, "plain", name), "x")
        for domain in dict.fromkeys(domains):
            chosen = {
                arm: [value for value, other in zip(values, domains, strict=True) if other == domain]
                for arm, values in seconds.items()
            }
            report.row(f"{name} / plain, {domain}", total_ratio(chosen, "plain", name), "x")

    def selection(self) -> None:
        """Time of choosing, learning and book-keeping as a share of the round."""
        evaluation = PoolEvaluation(self.pool, self.target.head_weight)
        k_pool = max(drafter.k for drafter in self.pool.values())
        for kind, selector in (
            ("ucb_bd", {"kind": "metasd_ucb", "reward": "bd", "beta": 0.25}),
            ("exp3", {"kind": "exp3"}),
            ("hedgespec", {"kind": "hedgespec"}),
        ):
            shares, evaluated = [], []
            for _, prompt in self.prompts[:: max(1, len(self.prompts) // 4)]:
                result = self.decode(prompt, self.pool, selector, k_pool, evaluation)
                for row in result.rounds[1:]:
                    total = sum(value for key, value in row.items() if key.startswith("t_"))
                    shares.append(100 * (row["t_select"] + row["t_commit"]) / total)
                    evaluated.append(100 * row["t_evaluate"] / total)
            self.report.row(
                f"{kind}: selection and book-keeping (bar: at most 1)", spread(shares), "% of a round"
            )
            if selector["kind"] == "hedgespec":
                self.report.row(f"{kind}: evaluation of {len(self.pool)}", spread(evaluated), "% of a round")


def main() -> None:
    """Run all parts."""
    options = parser(__doc__)
    options.add_argument("--prompts", type=int, default=2, help="prompts per domain")
    options.add_argument("--tokens", type=int, default=48, help="tokens per answer")
    bench = Bench(options.parse_args())
    bench.one_token()
    bench.products()
    bench.selection()
    bench.texts()
    bench.report.finish()


if __name__ == "__main__":
    run(main)
