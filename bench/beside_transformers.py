"""The study's target beside the same target in transformers, for benchmarks that decode with both."""

from __future__ import annotations

import argparse

import torch
from harness import Report, Study
from transformers import AutoModelForCausalLM

from draftpool.artefacts import read_table
from draftpool.decoding.engine import Result, decode
from draftpool.decoding.sequence import Sampling, prefill
from draftpool.selectors.base import make_selector
from draftpool.targets.load import end_ids, load_target, load_tokenizer


class BesideTransformers:
    """Both targets, the evaluation prompts with their domains, and greedy decoding with either.

    Args:
        name: Of the benchmark.
        options: Of `harness.parser`, with `prompts` (per domain) and `tokens` (per answer).
    """

    def __init__(self, name: str, options: argparse.Namespace):
        self.options, self.study = options, Study(options.overlay)
        self.report = Report(name, options)
        self.device, self.dtype = self.report.device, getattr(torch, options.dtype)
        self.target = load_target(self.study.target, self.study.taps, self.device, self.dtype)
        self.ends = end_ids(load_tokenizer(self.study.target), self.target.hf_config)
        self.peer = AutoModelForCausalLM.from_pretrained(self.study.target, dtype=self.dtype)
        self.peer = self.peer.to(self.device).eval()
        self.prompts = [
            (table.domain.iloc[0], list(map(int, ids)))
            for table in (read_table(f / "responses.parquet") for f in self.study.responses("eval"))
            for ids in table.prompt_ids.head(options.prompts)
        ]

    def generate(self, prompt: list[int], **extra) -> list[int]:
        """transformers.generate, greedy."""
        ids = torch.tensor([prompt], device=self.device)
        made = self.peer.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=self.options.tokens,
            eos_token_id=self.ends,
            pad_token_id=0,
            **extra,
        )
        return made[0, len(prompt) :].tolist()

    def decode(self, prompt: list[int], arms: dict, selector: dict, k_pool: int, evaluation=None) -> Result:
        """Our loop, the target's prefill included in the caller's clock."""
        start = prefill(self.target, prompt, self.options.tokens, k_pool)
        chooser = make_selector(selector, list(arms))
        sampling = Sampling(self.options.tokens, self.ends)
        return decode(self.target, start, arms, chooser, sampling, k_pool, "bench", evaluation=evaluation)
