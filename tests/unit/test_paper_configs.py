"""The studies of the papers: sources are read as the Hub lays them out, and settings are the papers'."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from draftpool.config.load import load
from draftpool.config.plan import Plan
from draftpool.data import sources
from draftpool.data.sources import read_candidates

CONFIG = Path(__file__).resolve().parents[2] / "config"
NAMES = ("qwen3-4b", "qwen3-8b", "llama31-8b", "vicuna-7b")

TURN = [{"from": "human", "value": "Why?"}, {"from": "gpt", "value": "Because."}]
# A row of every data set, as its page on the Hub describes its columns.
ROWS = {
    "z-lab/qwen3-4b-instruct-100k": {"conversations": TURN, "source": "x", "split": "chat", "status": "ok"},
    "Aeala/ShareGPT_Vicuna_unfiltered": {"id": "1", "conversations": TURN},
    "openai/gsm8k": {"question": "1 + 1?", "answer": "2 #### 2"},
    "HuggingFaceH4/MATH-500": {"problem": "x^2", "solution": "s", "answer": "1", "subject": "Algebra", "level": 1},
    "openai/openai_humaneval": {
        "task_id": "HumanEval/0", "prompt": "def f():\n", "canonical_solution": "pass", "test": "t", "entry_point": "f",
    },
    "google-research-datasets/mbpp": {
        "source_file": "f", "task_id": 1, "prompt": "Write f.", "code": "pass", "test_imports": [], "test_list": [],
    },
    "HuggingFaceH4/mt_bench_prompts": {"prompt": ["one", "two"], "category": "coding", "reference": [], "prompt_id": 1},
    "tatsu-lab/alpaca": {"instruction": "Name it.", "input": "", "output": "It.", "text": "all"},
    "jtatman/python-code-dataset-500k": {"instruction": "Sort a list.", "output": "sorted(x)", "system": "be good"},
    "nvidia/OpenMathInstruct-2": {
        "problem": "2 + 2", "generated_solution": "4", "expected_answer": "4", "problem_source": "math",
    },
    "mattwesney/ToT-Biology": {"question": "What is a cell?", "answer": "Small.", "metadata": {}},
    "mlfoundations-dev/stackexchange_chemistry": {"instruction": "What is a mole?", "completion": "6e23"},
    "FreedomIntelligence/medical-o1-reasoning-SFT": {"Question": "Which drug?", "Complex_CoT": "", "Response": "This."},
    "abisee/cnn_dailymail": {"article": "It rained.", "highlights": "Rain.", "id": "1"},
    "gretelai/synthetic_text_to_sql": {
        "sql_prompt": "How many?", "sql_context": "CREATE TABLE t (a INT);", "sql": "SELECT COUNT(*) FROM t;",
    },
    "sahil2801/CodeAlpaca-20k": {"instruction": "Reverse a string.", "input": "abc", "output": "cba"},
    "wmt/wmt16": {"translation": {"de": "Hallo", "en": "Hello"}},
    "Helsinki-NLP/opus-100": {
        "translation": {"ja": "a", "fr": "b", "ru": "c", "zh": "d", "en": "e"},
    },
    "google-research-datasets/nq_open": {"question": "who sang it", "answer": ["them", "they"]},
    "virattt/financial-qa-10K": {"question": "How much?", "answer": "Much.", "context": "We sold much.", "ticker": "X"},
    "neural-bridge/rag-dataset-12000": {"context": "It is red.", "question": "Which colour?", "answer": "Red."},
}  # fmt: skip


@pytest.fixture(scope="module", params=NAMES)
def plan(request) -> Plan:
    return Plan(load(CONFIG / "default.yaml", CONFIG / "paper" / f"{request.param}.yaml"))


def test_every_source_is_read(plan, monkeypatch):
    def rows(entry: dict, where: str):
        yield f"{entry['dataset']}:{entry['split_name']}", ROWS[entry["dataset"]]

    monkeypatch.setattr(sources, "_hub_records", rows)
    for name, made in plan.prompts.items():
        for position, source in enumerate(made.cfg["sources"]):
            assert source["source"] == "hub" and source["revision"], name
            (found,), _ = read_candidates(made.cfg, position, Counter())
            assert found.text and "{" not in found.text.replace("\\boxed{}", ""), name
            assert source["reference"] is None or found.reference


def test_nothing_of_the_default_study_is_left(plan):
    assert plan.study.device == "cuda" and plan.study.experiment.startswith("paper_")
    assert not {"code", "maths", "sql", "summarisation", "rag", "qa", "biomed", "finance"} & set(
        plan.study.domains
    )
    assert plan.dtypes == ["float32", "bfloat16"] and plan.study.target.source == "hub"
    # Prompt and answer stay within the papers' training length, or the target's positions.
    longest = plan.study.responses.max_prompt_tokens + plan.study.responses.max_new_tokens
    assert longest == (1984 if "vicuna" in plan.study.experiment else 3072)
    assert 4 <= len(plan.study.pool) <= 8
    # Both temperatures have a live stream.
    temperatures = {made.cfg["temperature"] for made in plan.decodes.values()}
    assert temperatures == ({0.0, 0.7} if "vicuna" in plan.study.experiment else {0.0, 1.0})


def test_steps_are_the_epochs_that_the_files_say(plan):
    epochs = {
        name: run.recipe.training.steps * run.recipe.training.batch_sequences
        / (run.recipe.prompts_per_domain * len(run.domains))
        for name, run in plan.runs.items()
        if run.recipe.trained
    }  # fmt: skip
    for name, found in epochs.items():
        kind, specialist = plan.runs[name].kind, plan.runs[name].home is not None
        wanted = 3 if specialist or "vicuna" in plan.study.experiment else 6 if kind == "block" else 2
        assert found == pytest.approx(wanted, rel=0.01), name


def test_dflash_and_dpace_are_trained_as_published():
    for name, block, gamma in (("qwen3-4b", 16, 7.0), ("qwen3-8b", 16, 7.0), ("llama31-8b", 10, 5.0)):
        plan = Plan(load(CONFIG / "default.yaml", CONFIG / "paper" / f"{name}.yaml"))
        for recipe in ("generalist_dpace", "generalist_dflash"):
            found = plan.runs[f"{recipe}-s0"].recipe
            told = found.training
            assert (told.lr, told.warmup_ratio, told.clip, told.anchors_per_sequence) == (
                6e-4,
                0.04,
                1.0,
                512,
            )
            assert (found.model.block_size, found.model.n_layers, found.model.draft_vocab) == (block, 3, None)
        assert plan.runs["generalist_dpace-s0"].recipe.objective.model_dump()["alpha"] == 0.5
        assert plan.runs["generalist_dflash-s0"].recipe.objective.model_dump()["gamma"] == gamma
    plan = Plan(load(CONFIG / "default.yaml", CONFIG / "paper/qwen3-4b.yaml"))
    assert plan.runs["generalist_dpace_5l-s0"].recipe.model.n_layers == 5


def test_every_value_of_the_files_has_a_source_or_a_reason():
    for name in NAMES:
        lines = (CONFIG / "paper" / f"{name}.yaml").read_text(encoding="utf-8").splitlines()
        keys = ("lr:", "clip:", "warmup_ratio:", "anchors_per_sequence:")
        training = [line for line in lines if line.strip().startswith(keys)]
        settings = training + [
            line
            for line in lines
            if line.strip().startswith(
                (
                    "max_new_tokens:",
                    "max_prompt_tokens:",
                    "temperature:",
                    "dtypes:",
                    "model_id:",
                    "evaluation_domains:",
                )
            )
        ]
        assert len(settings) >= 8, name
        for line in settings:
            above = lines[lines.index(line) - 1].strip().startswith("#")
            ours = "vicuna" in name and line in training  # all at once, above the block
            assert "#" in line or above or ours, f"{name}: {line}"
