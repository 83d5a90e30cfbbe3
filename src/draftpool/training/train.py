"""Train one drafter on the target's own answers."""

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
from draftpool.errors import DraftpoolError
from draftpool.progress import bar
from draftpool.registry import find_registered
from draftpool.targets.load import resolve_device, synchronise
from draftpool.targets.tail import TargetTail, load_tail
from draftpool.targets.weights import read_config
from draftpool.training.batches import Batch, ResponseSet, make_batch
from draftpool.training.checkpoint import load_checkpoint, save_checkpoint
from draftpool.training.initialise import parameter_hash
from draftpool.training.label_probabilities import label_log_probabilities, slot_divergences
from draftpool.training.objectives.base import LossReport, Objective, make_objective
from draftpool.training.trainees import Trainee, new_trainee


def learning_rate(step: int, steps: int, peak: float, warmup_ratio: float) -> float:
    """Linear warm-up, then a cosine to zero; ``step`` counts from 0."""
    warmup = max(1, round(warmup_ratio * steps))
    if step < warmup:
        return peak * (step + 1) / warmup
    return peak * 0.5 * (1.0 + math.cos(math.pi * (step - warmup) / max(1, steps - warmup)))


def batch_loss(
    trainee: Trainee, batch: Batch, objective: Objective, autocast: bool, tail: TargetTail | None = None
) -> LossReport:
    """Forward pass and objective of one batch; everything here but ``objective`` is the same in compared runs.

    ``tail`` gives the target's distribution to objectives that read it.
    """
    device = trainee.head.device
    valid = batch.mask.any(dim=-1).to(device)
    labels, mask = batch.labels.to(device)[valid], batch.mask.to(device)[valid]
    divergence = wanted = None
    if objective.reads_target:
        wanted = tail.hidden_at(batch.taps.to(device), batch.positions.to(device), trainee.slots)[valid]
    with torch.autocast(device.type, dtype=torch.bfloat16, enabled=autocast):
        hidden = trainee.hidden(batch)[valid]
        log_q = label_log_probabilities(hidden, trainee.head, labels)
        if wanted is not None:
            divergence = slot_divergences(objective, hidden, trainee.head, wanted, tail, trainee.vocabulary)
    sequence = torch.arange(valid.shape[0], device=device)[:, None].expand(valid.shape)[valid]
    return objective.loss(log_q, mask, sequence, valid.shape[0], divergence)


def slots_of(cfg: dict) -> int:
    """Supervised slots after an anchor: one for a language model, else all that are drafted."""
    shape = cfg["model"]
    if cfg["kind"] == "independent":
        return 1
    return shape["block_size"] - 1 if cfg["kind"] == "block" else shape["draft_tokens"]


def _coverage(responses: ResponseSet, columns: np.ndarray) -> float:
    answers = np.concatenate([np.asarray(answer) for answer in responses.answers()])
    return float((columns[answers] >= 0).mean())


def _optimise(
    trainee: Trainee, tail, responses, columns, objective, cfg, checkpoint: Path, key: str
) -> tuple[list[dict], str]:
    """The training loop; resumes from the checkpoint and returns the log rows and the digest of the data order."""
    options, model, device = cfg["training"], trainee.module, trainee.head.device
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
    steps, block = options["steps"], trainee.slots + 1
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
            report = batch_loss(trainee, batch, objective, autocast, tail)
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
        cfg: `kind`, `domains`, `prompts_per_domain`, `seed`, `init`, `objective`, `model`, `training`, `taps`,
            `device`.
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
    objective = make_objective(cfg["objective"], slots_of(cfg) + 1, cfg["kind"])
    code = code_digest(
        "draftpool.training.train",
        find_registered("draftpool.training.objectives", "register_objective", objective.kind),
    )
    upstream = content_hash(target, *responses, *([init] if init else []))
    key = make_key([cfg, upstream, code])
    state.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(state / "lock", timeout=0):
            trainee = new_trainee(cfg, target, data, init, device)
            tail = load_tail(target, cfg["taps"], device) if objective.reads_target else None
            columns = np.full(read_config(target).vocab_size, -1, dtype=np.int64)
            columns[trainee.vocabulary.cpu().numpy()] = np.arange(len(trainee.vocabulary))
            started = parameter_hash(trainee.module)
            log, order = _optimise(
                trainee, tail, data, columns, objective, cfg, state / "checkpoint.safetensors", key
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
                trainee.save(folder)
                pd.DataFrame(log).to_csv(folder / "training.csv", index=False)
                write_provenance(folder, cfg, extra)
    except Timeout as error:
        raise DraftpoolError(
            "another copy of this job is running", str(state), "wait for it, or stop it"
        ) from error
    shutil.rmtree(state, ignore_errors=True)
