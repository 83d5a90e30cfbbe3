"""Drafters that transformers has too: assisted generation by a small model, and prompt lookup, with the same models."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

import torch
from beside_transformers import BesideTransformers
from harness import parser, run, total_ratio
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from draftpool.artefacts import read_json, write_json
from draftpool.drafters.independent import MODEL, load_published
from draftpool.drafters.ngram import NgramDrafter
from draftpool.targets.load import synchronise
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


class Peers(BesideTransformers):
    """Ours and transformers' on the same prompts, one after the other in an order that turns."""

    def __init__(self, options):
        super().__init__("peers", options)
        with tempfile.TemporaryDirectory() as folder:
            made = whole_model(self.study.drafter("small-s0"), self.study.target, Path(folder) / "small")
            self.small = load_published("small", made, self.target)
            assistant = AutoModelForCausalLM.from_pretrained(made / MODEL, dtype=self.dtype)
        self.assistant = assistant.to(self.device).eval()
        told = self.assistant.generation_config
        told.num_assistant_tokens, told.num_assistant_tokens_schedule = DRAFT, "constant"
        told.assistant_confidence_threshold = 0.0

    def ours(self, prompt: list[int], drafter) -> list[int]:
        """Our loop with one drafter (None: plain decoding), the target's prefill included."""
        k = 1 if drafter is None else drafter.k
        return self.decode(prompt, {"arm": drafter}, {"kind": "fixed", "arm": "arm"}, k).tokens

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
        for number, (_, prompt) in enumerate([self.prompts[0], *self.prompts]):
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
