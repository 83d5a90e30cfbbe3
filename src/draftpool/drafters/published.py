"""Published drafters: checkpoints of others become drafter folders of ours, and our block drafters theirs."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file

from draftpool.artefacts import atomic_dir, write_json, write_provenance
from draftpool.drafters import eagle3_layout, zlab_layout
from draftpool.drafters.block_config import BlockConfig, mask_token
from draftpool.drafters.drafter_folder import (
    check_fits,
    damaged,
    read_drafter,
    save_drafter,
    target_shape,
)
from draftpool.drafters.independent import MODEL, PublishedConfig, common_vocabulary
from draftpool.drafters.load import kind_of
from draftpool.drafters.published_files import Checkpoint, source_folder, weight_files
from draftpool.errors import DraftpoolError
from draftpool.targets.base import check_taps
from draftpool.targets.fast import FAMILIES
from draftpool.targets.load import load_tokenizer
from draftpool.targets.weights import DESCRIPTION, read_config


@contextmanager
def _quiet() -> Iterator[None]:
    """No report and no bar of transformers, which says at length what is said here in one line."""
    from transformers.utils import logging

    before = logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(before)


def _causal_model(folder: Path, where: str):
    """Model and tokenizer of a folder, every tensor accounted for."""
    weight_files(folder, where)
    from transformers import AutoModelForCausalLM, AutoTokenizer

    options = {"local_files_only": True, "trust_remote_code": False}
    part = "model"
    try:
        with _quiet():
            model, told = AutoModelForCausalLM.from_pretrained(
                folder,
                dtype="auto",
                use_safetensors=True,
                output_loading_info=True,
                ignore_mismatched_sizes=True,
                **options,
            )
            part = "tokenizer"
            tokenizer = AutoTokenizer.from_pretrained(folder, **options)
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        # The first line says what is wrong, further ones explain.
        message = next(iter(str(error).splitlines()), type(error).__name__)
        raise _cannot_load(f"{part}: {message}", where) from error
    # transformers only reports these, and leaves random numbers in what is missing.
    for key, what in (
        ("missing_keys", "no tensor"),
        ("unexpected_keys", "an unknown tensor"),
        ("mismatched_keys", "another shape of tensor"),
    ):
        if told[key]:
            first = sorted(entry if isinstance(entry, str) else entry[0] for entry in told[key])[0]
            raise _cannot_load(f"{what} `{first}`", where)
    return model, tokenizer


def _cannot_load(what: str, where: str) -> DraftpoolError:
    return DraftpoolError(
        f"cannot be loaded ({what})", where, "give a complete causal language model that transformers knows"
    )


def _fetch_causal_model(cfg: dict, source: Path, where: str, target: Path, target_config, out: Path) -> None:
    model, tokenizer = _causal_model(source, where)
    ours = load_tokenizer(target)
    rows, largest = model.get_input_embeddings().weight.shape[0], max(ours.get_vocab().values())
    if rows <= largest:
        raise DraftpoolError(
            f"knows ids below {rows}, the target's tokenizer goes up to {largest}",
            where,
            "choose a drafter with the target's tokenizer",
        )
    head = model.get_output_embeddings().weight.shape[0]
    config = PublishedConfig(
        draft_tokens=cfg["draft_tokens"],
        published=cfg.get("path") or cfg["model_id"],
        common_vocabulary=common_vocabulary(tokenizer, ours, head, target_config.vocab_size, where),
        target_vocabulary=target_config.vocab_size,
    )
    with atomic_dir(out) as folder:
        model.save_pretrained(folder / MODEL)
        tokenizer.save_pretrained(folder / MODEL)
        if model.config.model_type in FAMILIES:
            described = {"config": model.config.to_dict(), "mask_token_id": mask_token(tokenizer)}
            write_json(folder / MODEL / DESCRIPTION, described)
        write_json(folder / "config.json", config.model_dump())
        write_provenance(folder, cfg)


def fetch_drafter(cfg: dict, target: Path, out: Path) -> None:
    """Write the drafter folder of a published drafter (stage `fetch_drafter`).

    Args:
        cfg: `layout` (`dflash`, `eagle3` or `causal_lm`), `path` or `model_id` and `revision`, `draft_tokens` (a block
            drafter has its own block instead), `taps` of the study (None: the default ones).
        target: Target folder.
        out: Folder to write; nothing is left there on an error.

    Raises:
        DraftpoolError: If the checkpoint cannot be had, is damaged or a pickle, belongs to another target, reads other
            layers than the study's, has another tokenizer, or is of a form that is not run here.
    """
    target_config = read_config(target)
    taps = check_taps(cfg["taps"], target_config.num_hidden_layers)
    source, where = source_folder(cfg)
    if cfg["layout"] == "causal_lm":
        _fetch_causal_model(cfg, source, where, target, target_config, out)
        return
    checkpoint = Checkpoint(source, where)
    if cfg["layout"] == "dflash":
        config, state = zlab_layout.read(checkpoint, target_config, taps)
    else:
        config, state = eagle3_layout.read(checkpoint, target, target_config, taps, cfg["draft_tokens"])
    with atomic_dir(out) as folder:
        save_drafter(folder, config, state)
        write_provenance(folder, cfg)


def export_drafter(folder: Path, target: Path, out: Path) -> None:
    """Write one of our block drafters in z-lab's layout: `config.json` and `model.safetensors`.

    That layout has no place for a reduced vocabulary: the weights stay, a warning is printed.

    Args:
        folder: Drafter folder.
        target: Folder of its target.
        out: Folder to write.

    Raises:
        DraftpoolError: If it is no block drafter, belongs to another target, is damaged, or has no q/k norms, which
            every layer of Qwen3's form has.
    """
    where = str(folder)
    kind = kind_of(folder)
    if kind != "block":
        raise DraftpoolError(
            f"is a drafter of kind `{kind}`", where, "only block drafters have a place in z-lab's layout"
        )
    config, state = read_drafter(folder, BlockConfig)
    check_fits(config, target_shape(read_config(target)), where)
    if not config.qk_norm:
        # No weight makes a norm the identity: it divides by each head's own size.
        raise DraftpoolError(
            "has no q/k norms, which z-lab's layers (Qwen3's form) always have",
            where,
            "export a drafter of a Qwen3 target",
        )
    vocabulary = state.pop("vocabulary")
    if {name: tuple(tensor.shape) for name, tensor in state.items()} != zlab_layout.shapes(config):
        raise damaged("model.safetensors does not fit config.json", folder)
    if len(vocabulary) < config.target_vocabulary:
        print(
            f"draftpool: warning: {folder}: z-lab's layout has no reduced vocabulary: elsewhere this drafter may "
            f"propose all {config.target_vocabulary} ids, not only the {len(vocabulary)} it was trained on",
            file=sys.stderr,
        )
    with atomic_dir(out) as made:
        # transformers reads only files that say what wrote them.
        save_file(
            zlab_layout.tensors_of(config, state), made / "model.safetensors", metadata={"format": "pt"}
        )
        write_json(made / "config.json", zlab_layout.settings_of(config, state["norm.weight"].dtype))
