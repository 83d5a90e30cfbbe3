"""One optimiser step: ours against a plain transformers + autograd loop, and D-PACE against DFlash."""

from __future__ import annotations

import numpy as np
import torch
from harness import Report, Study, interleave, parser, ratio, run, spread
from plain_training import PlainDrafter, plain_step
from torch.nn.utils.rnn import pad_sequence

from draftpool.training.batches import Batch, ResponseSet, make_batch, sequence_order
from draftpool.training.objectives.base import make_objective
from draftpool.training.train import batch_loss
from draftpool.training.trainees import new_trainee


class Steps:
    """Arms that take the same batch in the same repeat; making it is part of each arm's step."""

    def __init__(self, options):
        study = Study(options.overlay)
        self.report = Report("train", options)
        self.data = ResponseSet(study.responses("train"), None)
        recipe = study.plan.runs[study.plan.study.generalist].recipe
        self.training, self.block = recipe.training, recipe.model.block_size
        self.sequences = options.sequences or self.training.batch_sequences
        cfg = {"taps": study.taps, "model": recipe.model.model_dump(), "init": "target_layers", "seed": 0}
        cfg["kind"] = "block"
        self.trainees = {
            kind: new_trainee(cfg, study.target, self.data, None, self.report.device)
            for kind in ("dpace", "dflash")
        }
        self.models = {kind: trainee.module for kind, trainee in self.trainees.items()}
        self.objectives = {kind: make_objective({"kind": kind}, self.block) for kind in self.models}
        self.optimisers = {
            kind: torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
            for kind, model in self.models.items()
        }
        model = self.models["dpace"]
        self.columns = np.full(model.config.target_vocabulary, -1, dtype=np.int64)
        self.columns[model.vocabulary.cpu().numpy()] = np.arange(len(model.vocabulary))
        self.plain = PlainDrafter(study.target, model)
        self.taken: dict[str, int] = {}

    def batch(self, arm: str) -> tuple[int, Batch]:
        """The next batch of an arm, and its number."""
        step = self.taken.get(arm, 0)
        self.taken[arm] = step + 1
        anchors = self.training.anchors_per_sequence
        return step, make_batch(self.data, step, 0, self.sequences, anchors, self.block, self.columns)

    def ours(self, kind: str) -> None:
        """A step of the study's training loop."""
        _, batch = self.batch(kind)
        model, optimiser = self.models[kind], self.optimisers[kind]
        report = batch_loss(
            self.trainees[kind], batch, self.objectives[kind], self.report.device.type == "cuda"
        )
        optimiser.zero_grad(set_to_none=True)
        report.loss.backward()
        torch.nn.utils.clip_grad_norm_(list(model.parameters()), 10.0)
        optimiser.step()

    def cached(self) -> None:
        """The plain loop on the same cached taps."""
        _, batch = self.batch("cached")
        plain_step(self.plain, batch.taps, batch, self.objectives["dpace"])

    def online(self) -> None:
        """The plain loop whose target reads the batch."""
        step, batch = self.batch("online")
        places = range(step * self.sequences, (step + 1) * self.sequences)
        ids = []
        for place in places:
            epoch, offset = divmod(place, len(self.data))
            row = self.data.rows.iloc[sequence_order(len(self.data), 0, epoch)[offset]]
            ids.append(torch.tensor([*row.prompt_ids, *row.response_ids[:-1]]))
        taps = self.plain.online_taps(pad_sequence(ids, batch_first=True))
        plain_step(self.plain, taps, batch, self.objectives["dpace"])

    def same_loss(self) -> float:
        """Difference of the two implementations' logits on one batch, before any step."""
        batch = make_batch(self.data, 10**6, 0, 2, 8, self.block, self.columns)
        model = self.models["dpace"]
        with torch.no_grad():
            positions = torch.arange(batch.taps.shape[1]).expand(batch.taps.shape[:2])
            context = model.context(batch.taps, positions)
            ours = model.logits(model.blocks(batch.anchors, batch.positions, context, batch.bias))
            return float((ours - self.plain.logits(batch.taps, batch)).abs().max())


def main() -> None:
    """Same batches, same weights at the start, arms interleaved."""
    options = parser(__doc__)
    options.add_argument(
        "--sequences", type=int, default=None, help="sequences a step (default: the study's)"
    )
    steps = Steps(options.parse_args())
    report, repeats = steps.report, options.parse_args().repeats
    report.row("largest difference of logits, plain - ours", steps.same_loss(), "")
    arms = {
        "dpace": lambda: steps.ours("dpace"),
        "dflash": lambda: steps.ours("dflash"),
        "plain loop, cached taps": steps.cached,
        "plain loop, online taps": steps.online,
    }
    times = interleave(arms, repeats, report.device)
    for name, values in times.items():
        report.row(name, spread(values), "s a step")
    tokens = steps.sequences * steps.training.anchors_per_sequence * (steps.block - 1)
    report.row("ours", spread([tokens / value for value in times["dpace"]]), "slots/s")
    for name in ("plain loop, cached taps", "plain loop, online taps"):
        report.row(f"{name} / ours (bar: at least 1.5)", ratio(times, name, "dpace"), "x")
    report.row("D-PACE / DFlash (bar: at most 1.02)", ratio(times, "dpace", "dflash"), "x")
    report.finish()


if __name__ == "__main__":
    run(main)
