"""Several block drafters of one shape drafting together: what a full-information selector asks for in every round.

Everything but the weight products runs once for all of them, the raw taps are shared, and so is one product with the
head over the union of their vocabularies. The fusion matrices are trained, so fused context is not shared.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from draftpool.drafters.base import Draft
from draftpool.drafters.block import BlockDrafterModel, RMSNorm
from draftpool.drafters.block_live import BlockDrafter, LiveBlocks
from draftpool.targets.linear import FrozenLinear, can_pack


class StackedLinear(nn.Module):
    """One linear layer per drafter: x [n or 1, ..., in] -> [n, ..., out]; a leading 1 is shared by all.

    On a CPU in float32 every drafter keeps its packed weights (nothing is copied); elsewhere the weights are stacked
    and multiplied in one batched product.
    """

    def __init__(self, layers: Sequence[nn.Linear]):
        super().__init__()
        self.n = len(layers)
        self.packed = None
        if can_pack(layers[0].weight):
            self.packed = [
                layer.forward
                if isinstance(layer.forward, FrozenLinear)
                else FrozenLinear(layer.weight, layer.bias)
                for layer in layers
            ]
            return
        self.register_buffer("weight", torch.stack([layer.weight.detach() for layer in layers]))
        bias = (
            None
            if layers[0].bias is None
            else torch.stack([layer.bias.detach() for layer in layers])[:, None]
        )
        self.register_buffer("bias", bias)

    def forward(self, x: Tensor) -> Tensor:
        """[n or 1, ..., in] -> [n, ..., out]."""
        if self.packed is not None:
            return torch.stack(
                [product(x[index if len(x) > 1 else 0]) for index, product in enumerate(self.packed)]
            )
        flat = x.flatten(1, -2)
        if len(x) == 1:
            # One product serves all drafters: their weights are rows of a single tall matrix.
            made = F.linear(flat[0], self.weight.flatten(0, 1)).unflatten(-1, (self.n, -1)).movedim(1, 0)
        else:
            made = torch.bmm(flat, self.weight.transpose(1, 2))
        if self.bias is not None:
            made = made + self.bias
        return made.unflatten(1, x.shape[1:-1]) if x.dim() != 3 else made


class StackedNorm(nn.Module):
    """One root-mean-square norm per drafter: x [n or 1, ..., size] -> [n, ..., size]."""

    def __init__(self, norms: Sequence[RMSNorm]):
        super().__init__()
        self.eps = norms[0].eps
        self.register_buffer("weight", torch.stack([norm.weight.detach() for norm in norms]))

    def forward(self, x: Tensor) -> Tensor:
        """[n or 1, ..., size] -> [n, ..., size]."""
        n, size = self.weight.shape
        return F.rms_norm(x, (size,), None, self.eps) * self.weight.view(n, *(1,) * (x.dim() - 2), size)


def can_stack(drafters: Sequence[BlockDrafter]) -> bool:
    """Whether drafters have the same shape (their vocabularies may differ)."""
    return all(drafter.model.config == drafters[0].model.config for drafter in drafters)


def _union(models: Sequence[BlockDrafterModel]) -> tuple[Tensor, Tensor]:
    """Union of the vocabularies, rising, and which of it each drafter may propose [n, union]."""
    vocabulary = torch.cat([model.vocabulary for model in models]).unique()
    allowed = torch.stack([torch.isin(vocabulary, model.vocabulary) for model in models])
    return vocabulary, allowed


def stack(models: Sequence[BlockDrafterModel], head: Tensor) -> BlockDrafterModel:
    """A model whose every layer is the stack of the models' layers; its batch dimension runs over the drafters.

    Args:
        models: Drafters of one shape.
        head: The target's head [vocabulary, hidden].
    """
    vocabulary, _ = _union(models)
    with torch.device("meta"):
        stacked = BlockDrafterModel(models[0].config, models[0].embedding, head[vocabulary], vocabulary)
    for path, module in list(stacked.named_modules()):
        parts = [model.get_submodule(path) for model in models]
        if isinstance(module, nn.Linear):
            stacked.set_submodule(path, StackedLinear(parts))
        elif isinstance(module, RMSNorm):
            stacked.set_submodule(path, StackedNorm(parts))
    return stacked.eval().requires_grad_(False)


class StackedDrafters(LiveBlocks):
    """Drafters of one shape that read the same text and draft at the same anchor.

    Args:
        drafters: At least one.
        head: The target's head [vocabulary, hidden].
    """

    def __init__(self, drafters: Sequence[BlockDrafter], head: Tensor):
        models = [drafter.model for drafter in drafters]
        super().__init__("+".join(drafter.name for drafter in drafters), stack(models, head), len(models))
        self.own = [model.vocabulary for model in models]
        _, allowed = _union(models)
        # Columns outside a drafter's own vocabulary: it can neither propose them nor give them probability.
        self.barred = torch.zeros(allowed.shape, device=head.device).masked_fill_(~allowed, float("-inf"))
        if bool(allowed.all()):
            self.barred = None

    @torch.inference_mode()
    def evaluate(self, anchor: int) -> list[Draft]:
        """What every drafter proposes after ``anchor``, columns of log_q over the union of the vocabularies."""
        logits = self.head(self.hidden(anchor)).float()
        if self.barred is not None:
            logits = logits + self.barred[:, None]
        log_q = logits.log_softmax(dim=-1)
        ids = self.model.vocabulary[log_q.argmax(dim=-1)]
        return [Draft(ids[row], log_q[row], self.model.vocabulary) for row in range(self.rows)]
