"""Drafters that transformers has too: assisted generation by a small model, and prompt lookup, with the same models."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

import torch
from harness import Report, Study, parser, run, total_ratio
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from draftpool.artefacts import read_json, read_table, write_json
from draftpool.decoding.engine import decode
from draftpool.decoding.sequence import Sampling, prefill
from draftpool.drafters.independent import MODEL, load_published
from draftpool.drafters.ngram import NgramDrafter
from draftpool.selectors.base import make_selector
from draftpool.targets.load import end_ids, load_target, load_tokenizer, synchronise
from draftpool.targets.weights import TargetWeights

DRAFT, LOOKUP = 3, 10


def whole_model(small: Path, target: Path, out: Path) -> Path:
    """A distilled drafter with the target's embedding and whole head, as a model that transformers loads."""
    config, state = AutoConfig.from_pretrained(target), load_file(small / "model.safetensors")
    state.pop("vocabulary")
    config.num_hidden_layers = read_json(small / "config.json")["n_layers"]
    weights = TargetWeights(target, torch.float32)
    embedding = weights.embedding()
    state["model.embed_tokens.weight"] = embedding
    if not config.tie_word_embeddings:
        state["lm_head.weight"] = weights.head(embedding).clone()
    (out / MODEL).mkdir(parents=True)
    save_file(state, out / MODEL / "model.safetensors", metadata={"format": "pt"})
    config.save_pretrained(out / MODEL)
    told = {"kind": "independent", "draft_tokens": DRAFT, "published": "bench"}
    write_json(
        out / "config.json",
        told | {"common_vocabulary": config.vocab_size, "target_vocabulary": config.vocab_size},
    )
    return out


class Peers:
    """Ours and transformers' on the same prompts, one after the other in an order that turns."""

    def __init__(self, options):
        self.options, self.study = options, Study(options.overlay)
        self.report = Report("peers", options)
        self.device, dtype = self.report.device, getattr(torch, options.dtype)
        self.target = load_target(self.study.target, self.study.taps, self.device, dtype)
        self.ends = end_ids(load_tokenizer(self.study.target), self.target.hf_config)
        self.peer = (
            AutoModelForCausalLM.from_pretrained(self.study.target, dtype=dtype).to(self.device).eval()
        )
        with tempfile.TemporaryDirectory() as folder:
            made = whole_model(self.study.drafter("small-s0"), self.study.target, Path(folder) / "small")
            self.small = load_published("small", made, self.target)
            assistant = AutoModelForCausalLM.from_pretrained(made / MODEL, dtype=dtype)
        self.assistant = assistant.to(self.device).eval()
        told = self.assistant.generation_config
        told.num_assistant_tokens, told.num_assistant_tokens_schedule = DRAFT, "constant"
        told.assistant_confidence_threshold = 0.0
        self.prompts = [
            list(map(int, ids))
            for folder in self.study.responses("eval")
            for ids in read_table(folder / "responses.parquet").prompt_ids.head(options.prompts)
        ]

    def generate(self, prompt: list[int], **extra) -> list[int]:
        """transformers.generate, greedy."""
        ids = torch.tensor([prompt], device=self.device)
        options = {"do_sample": False, "max_new_tokens": self.options.tokens, "pad_token_id": 0}
        made = self.peer.generate(
            ids, attention_mask=torch.ones_like(ids), eos_token_id=self.ends, **options, **extra
        )
        return made[0, len(prompt) :].tolist()

    def ours(self, prompt: list[int], drafter) -> list[int]:
        """Our loop with one drafter (None: plain decoding), the target's prefill included."""
        k = 1 if drafter is None else drafter.k
        start = prefill(self.target, prompt, self.options.tokens, k)
        selector = make_selector({"kind": "fixed", "arm": "arm"}, ["arm"])
        sampling = Sampling(self.options.tokens, self.ends)
        return decode(self.target, start, {"arm": drafter}, selector, sampling, k, "bench").tokens

    def run(self) -> None:
        """Time every arm once per prompt and count texts that differ from plain decoding."""
        lookup = NgramDrafter("ngram", LOOKUP, device=self.device)
        arms = {
            "plain": lambda ids: self.ours(ids, None),
            "assisted, transformers": lambda ids: self.generate(ids, assistant_model=self.assistant),
            "assisted, ours": lambda ids: self.ours(ids, self.small),
            "lookup, transformers": lambda ids: self.generate(ids, prompt_lookup_num_tokens=LOOKUP),
            "lookup, ours": lambda ids: self.ours(ids, lookup),
        }
        seconds, differing = {arm: [] for arm in arms}, dict.fromkeys(arms, 0)
        for number, prompt in enumerate([self.prompts[0], *self.prompts]):
            texts = {}
            for arm in list(arms) if number % 2 else list(reversed(arms)):
                synchronise(self.device)
                started = time.perf_counter()
                texts[arm] = arms[arm](prompt)
                synchronise(self.device)
                if number:
                    seconds[arm].append(time.perf_counter() - started)
            for arm, text in texts.items():
                differing[arm] += bool(number) and text != texts["plain"]
        report = self.report
        report.row("prompts", float(len(self.prompts)), "")
        for arm in arms:
            report.row(f"{arm}, answers that differ from plain", float(differing[arm]), "answers")
        for kind in ("assisted", "lookup"):
            speed = total_ratio(seconds, f"{kind}, transformers", f"{kind}, ours")
            report.row(f"{kind}: ours / transformers (bar: at least 1)", speed, "x")


def main() -> None:
    """Compare both kinds."""
    options = parser(__doc__)
    options.add_argument("--prompts", type=int, default=3, help="prompts per domain")
    options.add_argument("--tokens", type=int, default=48, help="tokens per answer")
    bench = Peers(options.parse_args())
    bench.run()
    bench.report.finish()


if __name__ == "__main__":
    run(main)
