"""Train one drafter on the target's own answers, in one process or several (:mod:`draftpool.training.ranks`)."""

from __future__ import annotations

import hashlib
import math
import shutil
import sys
import time
import warnings
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
from draftpool.training.batches import Batch, ResponseSet, make_batch, parts_of, step_rows
from draftpool.training.checkpoint import load_checkpoint, save_checkpoint
from draftpool.training.gradients import FlatGradients
from draftpool.training.initialise import parameter_hash
from draftpool.training.interruption import StopRequests
from draftpool.training.label_probabilities import label_log_probabilities, slot_divergences
from draftpool.training.objectives.base import (
    SMALLEST_DIVISOR,
    LossReport,
    LossSums,
    Objective,
    make_objective,
)
from draftpool.training.ranks import Ranks, joined
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
    """Loss of a whole batch (see :func:`batch_sums`)."""
    return batch_sums(trainee, batch, objective, autocast, tail).report()


def batch_sums(
    trainee: Trainee, batch: Batch, objective: Objective, autocast: bool, tail: TargetTail | None = None
) -> LossSums:
    """Forward pass and objective of a batch or a part of one; all but ``objective`` is the same in compared runs.

    ``tail`` gives the target's distribution to objectives that read it. Products are in bfloat16 with ``autocast``.
    """
    device = trainee.head.device
    valid = batch.mask.any(dim=-1).to(device)
    labels, mask = batch.labels.to(device)[valid], batch.mask.to(device)[valid]
    sequence = torch.arange(valid.shape[0], device=device)[:, None].expand(valid.shape)[valid]
    divergence = wanted = None
    if not len(labels):
        # Nothing supervised, which a small part may well be; its sequences may still count in the divisor.
        nothing = torch.zeros(mask.shape, device=device)
        read = nothing if objective.reads_target else None
        return objective.sums(nothing, mask, sequence, valid.shape[0], read)
    if objective.reads_target:
        wanted = tail.hidden_at(batch.taps.to(device), batch.positions.to(device), trainee.slots)[valid]
    with torch.autocast(device.type, dtype=torch.bfloat16, enabled=autocast):
        hidden = trainee.hidden(batch)[valid]
        log_q = label_log_probabilities(hidden, trainee.head, labels)
        if wanted is not None:
            divergence = slot_divergences(objective, hidden, trainee.head, wanted, tail, trainee.vocabulary)
    return objective.sums(log_q, mask, sequence, valid.shape[0], divergence)


def uses_bfloat16(precision: str, device: torch.device) -> bool:
    """Whether products of training are in bfloat16: `auto | float32 | bfloat16`."""
    if precision != "auto":
        return precision == "bfloat16"
    return device.type == "cuda" or cpu_multiplies_bfloat16()


def slots_of(cfg: dict) -> int:
    """Supervised slots after an anchor: one for a language model, else all that are drafted."""
    shape = cfg["model"]
    if cfg["kind"] == "independent":
        return 1
    return shape["block_size"] - 1 if cfg["kind"] == "block" else shape["draft_tokens"]


def _coverage(responses: ResponseSet, columns: np.ndarray) -> float:
    answers = np.concatenate([np.asarray(answer) for answer in responses.answers()])
    return float((columns[answers] >= 0).mean())


class _Optimiser:
    """The steps of one training: what is the same in each of them."""

    def __init__(
        self,
        trainee: Trainee,
        tail: TargetTail | None,
        responses: ResponseSet,
        columns: np.ndarray,
        objective: Objective,
        cfg: dict,
        ranks: Ranks,
        accumulate: int,
    ):
        self.trainee, self.tail, self.responses, self.columns = trainee, tail, responses, columns
        self.objective, self.ranks, self.seed = objective, ranks, cfg["seed"]
        self.options = options = cfg["training"]
        self.autocast = uses_bfloat16(options.get("precision", "auto"), ranks.device)
        self.accumulate = accumulate
        self.parameters = list(trainee.module.parameters())
        self.gradients = FlatGradients(self.parameters)
        self.adamw = torch.optim.AdamW(
            self.parameters,
            lr=options["lr"],
            betas=(0.9, options["beta2"]),
            weight_decay=options["weight_decay"],
            fused=True,
        )

    def _own_sums(self, step: int) -> tuple[LossSums, str]:
        """Gradients of this process's share of a step, its sums, and the digest of the step's data."""
        slots, order, n_sequences = self.trainee.slots, "", self.options["batch_sequences"]
        own = LossSums.nothing(self.gradients.flat, slots)
        lengths = self.responses.lengths(step_rows(self.responses, step, self.seed, n_sequences))
        for part in parts_of(lengths, self.ranks.size, self.accumulate, self.ranks.rank):
            if not part:
                continue
            batch = make_batch(
                self.responses,
                step,
                self.seed,
                n_sequences,
                self.options["anchors_per_sequence"],
                slots + 1,
                self.columns,
                part,
            )
            sums = batch_sums(self.trainee, batch, self.objective, self.autocast, self.tail)
            if sums.total.requires_grad:
                sums.total.backward()
            own, order = own + sums.detached(), batch.order_hash
        return own, order

    def step(self, step: int, requests: StopRequests) -> tuple[dict, str, bool]:
        """Take one step.

        Args:
            step: Its number.
            requests: Whether this process was told to stop; read when its share is done.

        Returns:
            The log's row, the digest of the step's data, and whether any process was told to stop.

        Raises:
            DraftpoolError: If the gradient is not finite; on all processes.
        """
        started, options = time.perf_counter(), self.options
        for group in self.adamw.param_groups:
            group["lr"] = learning_rate(step, options["steps"], options["lr"], options["warmup_ratio"])
        self.gradients.clear()
        own, order = self._own_sums(step)
        stop = torch.tensor([float(requests.noted)], device=self.ranks.device)
        numbers = torch.cat((own.numbers(), stop.double()))
        self.ranks.add_up(numbers)
        self.ranks.add_up(self.gradients.flat)
        whole = LossSums.of_numbers(numbers[:-1])
        report = whole.report()
        self.gradients.divide(max(float(whole.divisor), SMALLEST_DIVISOR))
        limit = options["clip"] if options["clip"] is not None else math.inf
        norm = float(torch.nn.utils.clip_grad_norm_(self.parameters, limit))
        if not math.isfinite(norm):
            raise DraftpoolError(
                f"gradient is not finite at step {step}",
                "train_drafter",
                "lower training.lr or set training.clip",
            )
        self.adamw.step()
        synchronise(self.ranks.device)
        elapsed = time.perf_counter() - started
        row = {"step": step, "loss": float(report.loss), "grad_norm": norm, "clipped": int(norm > limit)}
        row |= {
            "lr": self.adamw.param_groups[0]["lr"],
            "step_time": elapsed,
            "tokens_per_s": int(whole.supervised.sum()) / elapsed,
        }
        row |= {f"confidence_{slot + 1}": float(value) for slot, value in enumerate(report.confidence)}
        row |= {f"weight_share_{slot + 1}": float(value) for slot, value in enumerate(report.weight_share)}
        return row, order, bool(numbers[-1] > 0)


def _optimise(optimiser: _Optimiser, checkpoint: Path, key: str) -> tuple[list[dict], str]:
    """The training loop; resumes from the checkpoint and returns the log rows and the digest of the data order.

    Raises:
        KeyboardInterrupt: If a process was told to stop; the step was ended and a checkpoint written.
    """
    options, ranks, model = optimiser.options, optimiser.ranks, optimiser.trainee.module
    done, log, order = load_checkpoint(checkpoint, key, model, optimiser.adamw) or (0, [], "")
    ranks.agree("the checkpoint", lambda: [done, order])
    steps, stopped = options["steps"], False
    title = f"train {optimiser.objective.kind}"
    silent = not ranks.first
    with bar(steps, title, "step", done, silent) as shown, StopRequests(silent) as requests:
        if done and ranks.first:
            print(f"resumed from the checkpoint at step {done}", file=sys.stderr, flush=True)
        for step in range(done, steps):
            row, data, stopped = optimiser.step(step, requests)
            order = hashlib.sha256(f"{order}{data}".encode()).hexdigest()[:16]
            log.append(row)
            shown.update(1)
            shown.set_postfix_str(f"loss {row['loss']:.3f} q1 {row['confidence_1']:.3f}", refresh=False)
            due = (step + 1) % options["checkpoint_every"] == 0 and step + 1 < steps
            if ranks.first and (due or stopped):
                save_checkpoint(checkpoint, key, step + 1, model, optimiser.adamw, log, order)
            if stopped:
                ranks.wait()
                raise KeyboardInterrupt
    return log, order


def _train(
    cfg: dict,
    target: Path,
    responses: list[Path],
    init: Path | None,
    state: Path,
    out: Path,
    accumulate: int,
    ranks: Ranks,
) -> None:
    data = ResponseSet(responses, cfg["prompts_per_domain"])
    objective = make_objective(cfg["objective"], slots_of(cfg) + 1, cfg["kind"])
    code = code_digest(
        "draftpool.training.train",
        find_registered("draftpool.training.objectives", "register_objective", objective.kind),
    )
    # Another split of the batch has other rounding, and a resumed run is to end bit-equal.
    split = [ranks.size, accumulate]
    inputs = [target, *responses, *([init] if init else [])]
    key = ranks.from_first(lambda: make_key([cfg, content_hash(*inputs), code, split]))
    trainee = new_trainee(cfg, target, data, init, ranks.device)
    tail = load_tail(target, cfg["taps"], ranks.device) if objective.reads_target else None
    columns = np.full(read_config(target).vocab_size, -1, dtype=np.int64)
    columns[trainee.vocabulary.cpu().numpy()] = np.arange(len(trainee.vocabulary))
    started = parameter_hash(trainee.module)
    ranks.agree("the weights they start with", lambda: started)
    optimiser = _Optimiser(trainee, tail, data, columns, objective, cfg, ranks, accumulate)
    log, order = _optimise(optimiser, state / "checkpoint.safetensors", key)
    ranks.agree("the weights they end with", lambda: parameter_hash(trainee.module))
    if not ranks.first:
        return
    extra = {
        "device": ranks.device.type,
        "processes": ranks.size,
        "accumulate": accumulate,
        "bfloat16": optimiser.autocast,
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


def train_drafter(
    cfg: dict,
    target: Path,
    responses: list[Path],
    init: Path | None,
    state: Path,
    out: Path,
    accumulate: int = 1,
) -> None:
    """Write a drafter folder: `model.safetensors`, `config.json`, `training.csv`, provenance.

    SIGTERM and SIGINT let the running step end and write a checkpoint. Started by torch's launcher, this process takes
    its share of every step; the first one writes.

    Args:
        cfg: `kind`, `domains`, `prompts_per_domain`, `seed`, `init`, `objective`, `model`, `training`, `taps`,
            `device`.
        target: Target folder.
        responses: Response folders of the domains.
        init: Drafter folder to start from (`init: drafter`).
        state: Scratch folder for checkpoints; survives a kill, removed at the end.
        out: Folder to write.
        accumulate: Micro-batches that each process cuts its share of a step into.

    Raises:
        DraftpoolError: If an input is damaged, another copy of this job runs, or the gradient is not finite.
        KeyboardInterrupt: If it was told to stop.
        PeerLostError: If another process of this training has gone.
    """
    with joined(resolve_device(cfg["device"])) as ranks:
        if not ranks.first:
            # What is worth a warning is worth one.
            warnings.simplefilter("ignore")
            ranks.wait()
            _train(cfg, target, responses, init, state, out, accumulate, ranks)
            return
        state.mkdir(parents=True, exist_ok=True)
        try:
            with FileLock(state / "lock", timeout=0):
                ranks.wait()
                _train(cfg, target, responses, init, state, out, accumulate, ranks)
        except Timeout as error:
            raise DraftpoolError(
                "another copy of this job is running", str(state), "wait for it, or stop it"
            ) from error
        shutil.rmtree(state, ignore_errors=True)
