"""Load a target folder and its tokenizer on the right device, dtype and backend."""

from __future__ import annotations

import tempfile
import warnings
from pathlib import Path

import torch
from safetensors import SafetensorError

from draftpool.artefacts import read_json
from draftpool.errors import DraftpoolError
from draftpool.targets.base import TargetModel, check_taps
from draftpool.targets.fast import FastTarget, unsupported_reason
from draftpool.targets.hub import TransformersTarget
from draftpool.targets.weights import (
    DELETE_TARGET,
    EMBEDDING,
    INDEX,
    ModelWeights,
    TargetWeights,
    read_config,
    shard_names,
)

# Names under which transformers saves a tokenizer that needs nothing but its `tokenizer.json`.
GENERAL_TOKENIZERS = ("TokenizersBackend", "PreTrainedTokenizerFast")


def resolve_device(device: str) -> torch.device:
    """Return the device of `auto | cpu | cuda`.

    Raises:
        DraftpoolError: If CUDA is asked for and there is none.
    """
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda" and not torch.cuda.is_available():
        raise DraftpoolError(
            "no CUDA device is visible to torch",
            "config key `device`",
            "use `auto`, or install a CUDA build of torch",
        )
    return torch.device(device)


def synchronise(device: torch.device) -> None:
    """Wait for the device, so that a clock read afterwards is true."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def load_target(
    folder: Path,
    taps: list[int] | None,
    device: torch.device,
    dtype: torch.dtype,
    backend: str = "fast",
    device_map: str | dict[str, str] | None = None,
) -> TargetModel:
    """Load the target model.

    Args:
        folder: Target folder.
        taps: Layers whose output drafters read; None for the default ones, empty for none.
        device: Where it runs; of a model over several devices, where drafters are.
        dtype: Type of its weights.
        backend: `fast`, where the family is supported, or `transformers`.
        device_map: How accelerate spreads the layers over devices (a name it knows, or a device for every module);
            None for one device.

    Raises:
        DraftpoolError: If the folder holds no loadable model, the taps do not fit, or the fast backend is asked for a
            model over several devices.
    """
    config = read_config(folder)
    taps = [] if taps == [] else check_taps(taps, config.num_hidden_layers)
    reason = unsupported_reason(config)
    if device_map is not None:
        if backend == "fast":
            raise DraftpoolError(
                "the fast backend runs on one device",
                "config key `target.device_map`",
                "use `backend: transformers`",
            )
        return TransformersTarget(_load_transformers(folder, device, dtype, device_map), taps, device)
    if backend == "fast":
        if reason is None:
            try:
                return FastTarget(config, TargetWeights(folder, dtype, device), taps)
            except KeyError as error:
                raise DraftpoolError(
                    f"cannot load the target (no tensor {error})", str(folder), DELETE_TARGET
                ) from error
        warnings.warn(
            f"the fast backend does not run this target ({reason}); using transformers", stacklevel=2
        )
    return TransformersTarget(_load_transformers(folder, device, dtype), taps)


def _load_transformers(
    folder: Path, device: torch.device, dtype: torch.dtype, device_map: str | dict[str, str] | None = None
) -> torch.nn.Module:
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    spread = {}
    if device_map is not None:
        # Only what safetensors do not hold as it is needed is written there; removed when this process ends.
        scratch = tempfile.TemporaryDirectory(prefix="draftpool-offload-")
        spread = {"device_map": device_map, "offload_folder": scratch.name}
    try:
        if (folder / INDEX).exists():
            shard_names(folder / INDEX)
        model = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=dtype,
            local_files_only=True,
            use_safetensors=True,
            trust_remote_code=False,
            **spread,
        )
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        message = str(error).splitlines()[0]
        raise DraftpoolError(f"cannot load the target ({message})", str(folder), DELETE_TARGET) from error
    if device_map is None:
        return model.to(device).eval()
    # A dispatched model is never moved: its hooks know where each layer is.
    model.offload_folder = scratch
    return model.eval()


def load_weights(folder: Path, dtype: torch.dtype) -> TargetWeights:
    """Tensors of a target folder on the CPU, without building the model where its tensors have the usual names.

    Raises:
        DraftpoolError: If a file is missing or damaged.
    """
    weights = TargetWeights(folder, dtype)
    if EMBEDDING in weights:
        return weights
    return ModelWeights(_load_transformers(folder, torch.device("cpu"), dtype))


def load_tokenizer(folder: Path):
    """Load the tokenizer of a target folder.

    Raises:
        DraftpoolError: If there is none.
    """
    try:
        # The general class imports in a third of the time that finding the right one takes.
        path = folder / "tokenizer_config.json"
        if path.exists() and read_json(path).get("tokenizer_class") in GENERAL_TOKENIZERS:
            from transformers import PreTrainedTokenizerFast as Tokenizer
        else:
            from transformers import AutoTokenizer as Tokenizer

        return Tokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise DraftpoolError("no tokenizer in the target folder", str(folder), DELETE_TARGET) from error


def prompt_ids(tokenizer, messages: list[dict]) -> list[int]:
    """Token ids of a chat prompt, ready for the answer; without a chat template the messages' texts are joined."""
    if tokenizer.chat_template:
        return tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, tokenize=True, return_dict=False
        )
    return tokenizer("\n".join(message["content"] for message in messages))["input_ids"]


def end_ids(tokenizer, hf_config) -> list[int]:
    """Ids that end an answer: the tokenizer's and the configuration's."""
    declared = getattr(hf_config, "eos_token_id", None)
    declared = declared if isinstance(declared, list) else [declared]
    return sorted({*declared, tokenizer.eos_token_id} - {None})
