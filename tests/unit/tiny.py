"""Tiny random targets with a real tokenizer, their answers and drafters, on disk as the real ones are."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest

from draftpool.artefacts import write_jsonl

LAYERS = 4
TAPS = [0, 1, 2]
LIMIT = 8  # tokens of an answer in live decoding
VOCABULARY = 120
MAX_POSITIONS = 256
SPECIALS = ["<pad>", "<unk>", "<eos>", "<turn>", "</turn>"]
LINES = [
    "the quick brown fox jumps over the lazy dog and runs into the green forest near the old river",
    "write a function that adds two numbers and returns their sum as an integer value in python code",
    "how many apples are left if a child eats three of seven apples before the long walk home today",
    "select name age city from people where age is more than thirty order by name limit ten rows only",
    "one of these answers must be wrong so say which it is why you think so please explain well now",
    "user assistant system question answer",
]
TEMPLATE = (
    "{% for m in messages %}<turn> {{ m['role'] }} {{ m['content'] }} </turn> {% endfor %}"
    "{% if add_generation_prompt %}<turn> assistant{% endif %}"
)
SHAPE = {
    "vocab_size": VOCABULARY,
    "num_hidden_layers": LAYERS,
    "intermediate_size": 64,
    "max_position_embeddings": MAX_POSITIONS,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": 2,
}
# Wide weights: with the families' own 0.02 a random model repeats its last token.
SPREAD = 0.25
FAMILIES = ("llama", "qwen2", "qwen3")


def tokenizer():
    """A word-level tokenizer of a few lines with a chat template; fewer ids than the model has rows."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel(unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.train_from_iterator(LINES, trainers.WordLevelTrainer(special_tokens=SPECIALS, show_progress=False))
    names = {"pad_token": "<pad>", "unk_token": "<unk>", "eos_token": "<eos>"}
    made = PreTrainedTokenizerFast(tokenizer_object=words, **names)
    made.chat_template = TEMPLATE
    return made


def causal_model(family: str, seed: int = 0, **changes):
    """A random float32 model of a family (grouped queries; Qwen3's heads are wider than its hidden size)."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    widths = {
        "llama": {
            "hidden_size": 48,
            "num_attention_heads": 3,
            "num_key_value_heads": 1,
            "tie_word_embeddings": True,
        },
        "qwen2": {"hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 2},
        "qwen3": {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16},
        "mistral": {
            "hidden_size": 32,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "sliding_window": 8,
        },
    }[family]
    config = AutoConfig.for_model(family, **(SHAPE | widths | changes))
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "norm" in name:
                    parameter.uniform_(0.6, 1.4)
                else:
                    parameter.normal_(0.0, SPREAD)
    return model.eval()


def save_target(folder: Path, family: str, **changes) -> Path:
    """Write model and tokenizer."""
    causal_model(family, **changes).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


def load(folder: Path, taps: list[int] | None = None, dtype: str = "float32"):
    """The target of a folder on the CPU."""
    import torch

    from draftpool.targets.load import load_target

    return load_target(folder, taps, torch.device("cpu"), getattr(torch, dtype))


def reference_of(folder: Path):
    """The same model in transformers."""
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()


def token_ids(n: int, seed: int = 0) -> list[int]:
    """Token ids that are no special ones."""
    import numpy as np

    return np.random.default_rng(seed).integers(len(SPECIALS), VOCABULARY, size=n).tolist()


def save_prompts(folder: Path, domain: str, n_train: int, n_eval: int, seed: int = 0) -> Path:
    """Write `train.jsonl` and `eval.jsonl` of random sentences of 3 to 12 words."""
    import numpy as np

    generator = np.random.default_rng(seed)
    words = " ".join(LINES[:-1]).split()
    for split, count in (("train", n_train), ("eval", n_eval)):
        rows = []
        for number in range(count):
            text = " ".join(generator.choice(words, size=generator.integers(3, 13)))
            message = [{"role": "user", "content": text}]
            rows.append(
                {"id": f"{domain}-{split}-{number}", "domain": domain, "split": split, "prompt": message}
            )
        write_jsonl(folder / f"{split}.jsonl", rows)
    return folder


def responses_cfg(**changes) -> dict:
    """Configuration of generate_responses."""
    cfg = {
        "domain": "tales",
        "split": "train",
        "max_new_tokens": 20,
        "max_prompt_tokens": 20,
        "batch_sequences": 4,
    }
    return cfg | {"taps": TAPS, "backend": "fast", "device": "cpu"} | changes


def training_cfg(steps: int = 60, objective: dict | None = None, **changes) -> dict:
    """Configuration of train_drafter."""
    training = {
        "steps": steps,
        "lr": 3e-3,
        "weight_decay": 0.0,
        "beta2": 0.999,
        "warmup_ratio": 0.1,
        "clip": 1.0,
    }
    training |= {"batch_sequences": 4, "anchors_per_sequence": 6, "checkpoint_every": 5}
    return {
        "kind": "block",
        "domains": ["tales"],
        "prompts_per_domain": None,
        "seed": 0,
        "init": "target",
        "objective": objective or {"kind": "dpace", "alpha": 0.5, "reduction": "anchor_mean"},
        "model": {"n_layers": 2, "block_size": 4, "draft_vocab": None},
        "training": training,
        "taps": TAPS,
        "device": "cpu",
    } | copy.deepcopy(changes)


def random_drafter(target, name: str, n_layers: int = 2, block_size: int = 4, vocabulary=None, seed: int = 0):
    """An untrained block drafter at work, of loud weights so that its drafts depend on all they should."""
    import torch

    from draftpool.drafters.block import BlockDrafterModel
    from draftpool.drafters.block_config import config_for
    from draftpool.drafters.block_live import BlockDrafter

    config = config_for(target.hf_config, target.taps, 0, n_layers, block_size)
    vocabulary = torch.arange(VOCABULARY) if vocabulary is None else vocabulary
    model = BlockDrafterModel(config, target.embedding, target.head_weight[vocabulary], vocabulary)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * SPREAD)
    return BlockDrafter(name, model.eval().requires_grad_(False))


@dataclass(frozen=True)
class World:
    """Folders of one target: its prompts in two domains, its answers and three trained drafters."""

    root: Path
    target: Path
    prompts: list[Path]
    train: list[Path]
    heldout: list[Path]
    drafters: list[Path]

    @property
    def names(self) -> list[str]:
        """Names of the drafters."""
        return [path.name for path in self.drafters]


def build_world(root: Path, family: str) -> World:
    """Make everything by the stages themselves."""
    from draftpool.data.responses import generate_responses
    from draftpool.training.train import train_drafter

    target = save_target(root / "target", family)
    domains = ("tales", "sums")
    prompts, made = [], {"train": [], "eval": []}
    for seed, domain in enumerate(domains):
        prompts.append(save_prompts(root / f"prompts-{domain}", domain, 8, 3, seed))
        for split, folders in made.items():
            folders.append(root / f"answers-{domain}-{split}")
            cfg = responses_cfg(domain=domain, split=split)
            generate_responses(cfg, target, prompts[-1], folders[-1])
    drafters = []
    for name, block, vocab, steps in (("wide", 8, None, 60), ("small", 4, 60, 60), ("short", 4, None, 20)):
        drafters.append(root / name)
        model = {"n_layers": 2, "block_size": block, "draft_vocab": vocab}
        cfg = training_cfg(steps, model=model, domains=list(domains))
        train_drafter(cfg, target, made["train"], None, root / f"state-{name}", drafters[-1])
    return World(root, target, prompts, made["train"], made["eval"], drafters)


def named(world) -> list[dict]:
    """The drafters of a world as a stage's configuration names them."""
    return [{"name": name, "kind": "block", "id": name} for name in world.names]


def live_cfg(world, **changes) -> dict:
    """Configuration of decode_live."""
    cfg = {
        "stream": "mixed",
        "domains": ["tales", "sums"],
        "prompts_per_domain": 2,
        "order": "shuffled",
        "stream_seed": 1,
    }
    cfg |= {
        "dtype": "float32",
        "pool": ["small", "short"],
        "drafters": named(world),
        "selectors": {"random": {"kind": "random"}},
    }
    cfg |= {
        "selectors": {"random": {"kind": "random"}},
        "selector_seeds": [0],
        "max_new_tokens": LIMIT,
        "max_prompt_tokens": 20,
        "temperature": 0.0,
        "repeats": 1,
    }
    return cfg | {"warmup_prompts": 1, "taps": TAPS, "backend": "fast", "device": "cpu"} | changes


@pytest.fixture(scope="session")
def targets(tmp_path_factory) -> SimpleNamespace:
    """Target folders by family."""
    root = tmp_path_factory.mktemp("targets")
    return SimpleNamespace(**{family: save_target(root / family, family) for family in FAMILIES})


@pytest.fixture(scope="session")
def llama_world(tmp_path_factory) -> World:
    """The world of a tiny Llama."""
    return build_world(tmp_path_factory.mktemp("llama-world"), "llama")


@pytest.fixture(scope="session")
def qwen3_world(tmp_path_factory) -> World:
    """The world of a tiny Qwen3."""
    return build_world(tmp_path_factory.mktemp("qwen3-world"), "qwen3")
