"""Train one block drafter on the target's own answers."""

from __future__ import annotations

import hashlib
import math
import shutil
import sys
import time
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from filelock import FileLock, Timeout

from draftpool.artefacts import atomic_dir, content_hash, write_provenance
from draftpool.config.digest import code_digest
from draftpool.config.hardware import cpu_multiplies_bfloat16
from draftpool.config.ids import make_key
from draftpool.drafters.block import BlockDrafterModel
from draftpool.drafters.block_config import config_for, mask_token, reduced_vocabulary, save_drafter
from draftpool.errors import DraftpoolError
from draftpool.progress import bar
from draftpool.registry import find_registered
from draftpool.targets.base import check_taps
from draftpool.targets.load import load_tokenizer, load_weights, resolve_device, synchronise
from draftpool.targets.weights import described_mask_token, read_config
from draftpool.training.batches import Batch, ResponseSet, make_batch
from draftpool.training.checkpoint import load_checkpoint, save_checkpoint
from draftpool.training.initialise import parameter_hash, start_from_drafter, start_from_target, start_random
from draftpool.training.label_probabilities import label_log_probabilities
from draftpool.training.objectives.base import LossReport, Objective, make_objective


def learning_rate(step: int, steps: int, peak: float, warmup_ratio: float) -> float:
    """Linear warm-up, then a cosine to zero; ``step`` counts from 0."""
    warmup = max(1, round(warmup_ratio * steps))
    if step < warmup:
        return peak * (step + 1) / warmup
    return peak * 0.5 * (1.0 + math.cos(math.pi * (step - warmup) / max(1, steps - warmup)))


def batch_loss(model: BlockDrafterModel, batch: Batch, objective: Objective, autocast: bool) -> LossReport:
    """Forward pass and objective of one batch; everything here but ``objective`` is the same in compared runs."""
    device = model.embedding.device
    positions = torch.arange(batch.taps.shape[1], device=device).expand(batch.taps.shape[:2])
    valid = batch.mask.any(dim=-1).to(device)
    with torch.autocast(device.type, dtype=torch.bfloat16, enabled=autocast):
        context = model.context(batch.taps.to(device), positions)
        hidden = model.blocks(
            batch.anchors.to(device), batch.positions.to(device), context, batch.bias.to(device)
        )
        labels, mask = batch.labels.to(device)[valid], batch.mask.to(device)[valid]
        log_q = label_log_probabilities(hidden[valid], model.head, labels)
    sequence = torch.arange(valid.shape[0], device=device)[:, None].expand(valid.shape)[valid]
    return objective.loss(log_q, mask, sequence, valid.shape[0])


def new_model(
    cfg: dict, target: Path, responses: ResponseSet, init: Path | None, device: torch.device
) -> BlockDrafterModel:
    """Build a drafter beside its target and give it its first weights."""
    weights = load_weights(target, torch.float32)
    target_config = read_config(target)
    taps = check_taps(cfg["taps"], target_config.num_hidden_layers)
    shape = cfg["model"]
    mask = described_mask_token(target)
    if mask is None:
        mask = mask_token(load_tokenizer(target))
    config = config_for(target_config, taps, mask, shape["n_layers"], shape["block_size"])
    vocabulary = reduced_vocabulary(responses.answers(), shape["draft_vocab"], target_config.vocab_size)
    embedding = weights.embedding()
    model = BlockDrafterModel(config, embedding, weights.head(embedding)[vocabulary], vocabulary)
    if cfg["init"] == "drafter":
        start_from_drafter(model, init)
    elif cfg["init"] == "random":
        start_random(model, cfg["seed"])
    else:
        start_from_target(model, weights, cfg["seed"])
    return model.to(device)


def _coverage(responses: ResponseSet, columns: np.ndarray) -> float:
    answers = np.concatenate([np.asarray(answer) for answer in responses.answers()])
    return float((columns[answers] >= 0).mean())


def _optimise(
    model, responses, columns, objective, cfg, checkpoint: Path, key: str
) -> tuple[list[dict], str]:
    """The training loop; resumes from the checkpoint and returns the log rows and the digest of the data order."""
    options, device = cfg["training"], model.embedding.device
    autocast = device.type == "cuda" or (device.type == "cpu" and cpu_multiplies_bfloat16())
    parameters = list(model.parameters())
    optimiser = torch.optim.AdamW(
        parameters,
        lr=options["lr"],
        betas=(0.9, options["beta2"]),
        weight_decay=options["weight_decay"],
        fused=True,
    )
    done, log, order = load_checkpoint(checkpoint, key, model, optimiser) or (0, [], "")
    steps, block = options["steps"], cfg["model"]["block_size"]
    with bar(steps, f"train {objective.kind}", "step", initial=done) as shown:
        if done:
            print(f"resumed from the checkpoint at step {done}", file=sys.stderr, flush=True)
        for step in range(done, steps):
            started = time.perf_counter()
            batch = make_batch(
                responses,
                step,
                cfg["seed"],
                options["batch_sequences"],
                options["anchors_per_sequence"],
                block,
                columns,
            )
            for group in optimiser.param_groups:
                group["lr"] = learning_rate(step, steps, options["lr"], options["warmup_ratio"])
            report = batch_loss(model, batch, objective, autocast)
            optimiser.zero_grad(set_to_none=True)
            report.loss.backward()
            limit = options["clip"] if options["clip"] is not None else math.inf
            norm = float(torch.nn.utils.clip_grad_norm_(parameters, limit))
            if not math.isfinite(norm):
                raise DraftpoolError(
                    f"gradient is not finite at step {step}",
                    "train_drafter",
                    "lower training.lr or set training.clip",
                )
            optimiser.step()
            synchronise(device)
            elapsed = time.perf_counter() - started
            order = hashlib.sha256(f"{order}{batch.order_hash}".encode()).hexdigest()[:16]
            row = {
                "step": step,
                "loss": float(report.loss.detach()),
                "grad_norm": norm,
                "clipped": int(norm > limit),
            }
            row |= {
                "lr": optimiser.param_groups[0]["lr"],
                "step_time": elapsed,
                "tokens_per_s": int(batch.mask.sum()) / elapsed,
            }
            row |= {f"confidence_{slot + 1}": float(value) for slot, value in enumerate(report.confidence)}
            row |= {
                f"weight_share_{slot + 1}": float(value) for slot, value in enumerate(report.weight_share)
            }
            log.append(row)
            shown.update(1)
            shown.set_postfix_str(f"loss {row['loss']:.3f} q1 {row['confidence_1']:.3f}", refresh=False)
            if (step + 1) % options["checkpoint_every"] == 0 and step + 1 < steps:
                save_checkpoint(checkpoint, key, step + 1, model, optimiser, log, order)
    return log, order


def train_drafter(
    cfg: dict, target: Path, responses: list[Path], init: Path | None, state: Path, out: Path
) -> None:
    """Write a drafter folder: `model.safetensors`, `config.json`, `training.csv`, provenance.

    Args:
        cfg: `domains`, `prompts_per_domain`, `seed`, `init`, `objective`, `model`, `training`, `taps`, `device`.
        target: Target folder.
        responses: Response folders of the domains.
        init: Drafter folder to start from (`init: drafter`).
        state: Scratch folder for checkpoints; survives a kill, removed at the end.
        out: Folder to write.

    Raises:
        DraftpoolError: If an input is damaged, another copy of this job runs, or the gradient is not finite.
    """
    device = resolve_device(cfg["device"])
    data = ResponseSet(responses, cfg["prompts_per_domain"])
    objective = make_objective(cfg["objective"], cfg["model"]["block_size"])
    code = code_digest(
        "draftpool.training.train",
        find_registered("draftpool.training.objectives", "register_objective", objective.kind),
    )
    upstream = content_hash(target, *responses, *([init] if init else []))
    key = make_key([cfg, upstream, code])
    state.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(state / "lock", timeout=0):
            model = new_model(cfg, target, data, init, device)
            columns = np.full(model.config.target_vocabulary, -1, dtype=np.int64)
            columns[model.vocabulary.cpu().numpy()] = np.arange(len(model.vocabulary))
            started = parameter_hash(model)
            log, order = _optimise(
                model, data, columns, objective, cfg, state / "checkpoint.safetensors", key
            )
            extra = {
                "device": str(device),
                "initial_parameters": started,
                "data_order": order,
                "sequences": len(data),
                "answer_tokens": sum(map(len, data.answers())),
                "vocabulary_coverage": _coverage(data, columns),
            }
            with atomic_dir(out) as folder:
                save_drafter(folder, model.config, model.state_dict())
                pd.DataFrame(log).to_csv(folder / "training.csv", index=False)
                write_provenance(folder, cfg, extra)
    except Timeout as error:
        raise DraftpoolError(
            "another copy of this job is running", str(state), "wait for it, or stop it"
        ) from error
    shutil.rmtree(state, ignore_errors=True)
