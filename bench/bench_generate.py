"""Batched greedy generation of 32 answers to real prompts: ours against transformers.generate with left padding."""

from __future__ import annotations

import torch
from harness import Report, Study, interleave, parser, ratio, run, spread
from transformers import AutoModelForCausalLM

from draftpool.artefacts import read_table
from draftpool.data.generation import answer_prompts
from draftpool.targets.load import end_ids, load_target, load_tokenizer


def main() -> None:
    """The first prompts of every domain, so that lengths are mixed as in the study."""
    options = parser(__doc__)
    options.add_argument("--sequences", type=int, default=32)
    options.add_argument("--tokens", type=int, default=96)
    options.set_defaults(repeats=1)
    options = options.parse_args()
    study = Study(options.overlay)
    report = Report("generate", options)
    dtype = getattr(torch, options.dtype)
    target = load_target(study.target, study.taps, report.device, dtype)
    tokenizer = load_tokenizer(study.target)
    ends = end_ids(tokenizer, target.hf_config)
    peer = AutoModelForCausalLM.from_pretrained(study.target, dtype=dtype).to(report.device).eval()
    tables = [read_table(folder / "responses.parquet") for folder in study.responses("train")]
    share = -(-options.sequences // len(tables))
    prompts = [list(map(int, ids)) for table in tables for ids in table.prompt_ids.head(share)]
    prompts = prompts[: options.sequences]
    longest = max(map(len, prompts))
    padded = torch.tensor(
        [[0] * (longest - len(prompt)) + prompt for prompt in prompts], device=report.device
    )
    mask = torch.tensor(
        [[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts], device=report.device
    )
    texts = {}

    def ours(tokens: int = options.tokens) -> None:
        made = dict(answer_prompts(target, prompts, ends, tokens, options.sequences, with_taps=False))
        texts["ours"] = [made[index].ids for index in range(len(prompts))]

    def theirs(tokens: int = options.tokens) -> None:
        made = peer.generate(
            padded,
            attention_mask=mask,
            do_sample=False,
            max_new_tokens=tokens,
            eos_token_id=ends,
            pad_token_id=0,
        )
        texts["theirs"] = made[:, longest:].tolist()

    # A whole answer takes a minute; a few tokens of each warm up all there is.
    ours(2)
    theirs(2)
    arms = {"transformers.generate": theirs, "ours": ours}
    times = interleave(arms, options.repeats, report.device, warmup=0)
    tokens = sum(map(len, texts["ours"]))
    differing = sum(
        theirs[: len(ours)] != ours for ours, theirs in zip(texts["ours"], texts["theirs"], strict=True)
    )
    report.row("prompt tokens", float(sum(map(len, prompts))), "tokens")
    report.row("answer tokens", float(tokens), "tokens")
    report.row("answers that differ", float(differing), "answers")
    for name, values in times.items():
        # Prompts are read within the time, as in the study.
        report.row(name, spread([tokens / value for value in values]), "tokens/s")
    report.row("ours / transformers (bar: at least 3)", ratio(times, "transformers.generate", "ours"), "x")
    report.finish()


if __name__ == "__main__":
    run(main)
