"""Weights and work of drafters, from their recipes and the target's shape."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from draftpool.config.recipes import CheckpointRecipe
from draftpool.errors import DraftpoolError
from draftpool.estimate.shapes import Shape, known_drafter, shape_of

if TYPE_CHECKING:
    from draftpool.config.plan_drafters import DrafterRun

# Of DFlash, and of `target.taps: null`.
TAPS = 5
# A multiplication and an addition for every weight; backwards twice as many, or once for a frozen matrix.
FORWARD, FORWARD_BACKWARD, FROZEN = 2, 6, 4


@dataclass(frozen=True)
class DrafterShape:
    """What a drafter is made of.

    Attributes:
        kind: Kind of drafter.
        weights: Weights of its own.
        layers: Decoder layers that draft (0: no model).
        draft_tokens: Tokens of a draft, K.
        draft_vocab: Rows of the head.
        context: Weights that a token of the context is multiplied by before a draft.
        per_token: Weights that a drafted slot is multiplied by, head left out.
    """

    kind: str
    weights: int
    layers: int
    draft_tokens: int
    draft_vocab: int
    context: int
    per_token: int


def _wide_layer(shape: Shape) -> int:
    """An EAGLE layer, whose queries, keys and values read embedding and feature side by side."""
    reads = shape.hidden * shape.head_dim * (shape.heads + 2 * shape.kv_heads)
    return 2 * reads + shape.hidden * shape.head_dim * shape.heads + shape.feed_forward


def _keys(shape: Shape) -> int:
    return 2 * shape.hidden * shape.kv_heads * shape.head_dim


def block_shape(shape: Shape, taps: int, n_layers: int, block_size: int, vocab: int | None) -> DrafterShape:
    """A block drafter beside a target of this shape."""
    fuse, rows = taps * shape.hidden**2, vocab or shape.vocabulary
    context = fuse + n_layers * _keys(shape)
    weights = fuse + n_layers * shape.layer
    return DrafterShape("block", weights, n_layers, block_size - 1, rows, context, n_layers * shape.layer)


def _eagle(shape: Shape, taps: int, draft_tokens: int, vocab: int | None, own_head: bool) -> DrafterShape:
    fuse, layer, rows = taps * shape.hidden**2, _wide_layer(shape), vocab or shape.vocabulary
    head = rows * shape.hidden if own_head else 0
    return DrafterShape("eagle", fuse + layer + head, 1, draft_tokens, rows, fuse + 2 * _keys(shape), layer)


def drafter_shape(
    run: DrafterRun, shape: Shape, taps: list[int] | None, given: Mapping[str, Path]
) -> DrafterShape:
    """The shape of a drafter.

    Args:
        run: The drafter.
        shape: Of the target.
        taps: Tapped layers; None for the default.
        given: Shapes of models that the user gave.

    Raises:
        DraftpoolError: If it is published and its shape is not known.
    """
    recipe, n_taps = run.recipe, len(taps) if taps else TAPS
    if isinstance(recipe, CheckpointRecipe):
        return _published(recipe, shape, n_taps, given, f"config key `{run.where}`")
    if run.kind == "block":
        model = recipe.model
        return block_shape(shape, n_taps, model.n_layers, model.block_size, model.draft_vocab)
    if run.kind == "eagle":
        model = recipe.model
        return _eagle(shape, n_taps, model.draft_tokens, model.draft_vocab, model.own_head)
    if run.kind == "independent":
        model, rows = recipe.model, recipe.model.draft_vocab or shape.vocabulary
        weights = model.n_layers * shape.layer
        return DrafterShape(
            "independent", weights, model.n_layers, model.draft_tokens, rows, weights, weights
        )
    if run.kind == "early_exit":
        work = recipe.n_layers * shape.layer
        return DrafterShape("early_exit", 0, recipe.n_layers, recipe.draft_tokens, shape.vocabulary, 0, work)
    # Looking up needs no model.
    return DrafterShape(run.kind, 0, 0, recipe.draft_tokens, 0, 0, 0)


def _published(recipe: CheckpointRecipe, shape: Shape, taps: int, given, where: str) -> DrafterShape:
    name = recipe.model_id or recipe.path
    if recipe.layout == "causal_lm":
        other = shape_of(name, given, where)
        work = other.layers * other.layer
        return DrafterShape(
            "independent", other.parameters, other.layers, recipe.draft_tokens, other.vocabulary, work, work
        )
    if recipe.layout == "eagle3":
        # SafeAILab's heads read three layers and have a head of their own.
        return _eagle(shape, 3, recipe.draft_tokens, None, True)
    known = known_drafter(name)
    if known is None:
        raise DraftpoolError(
            f"layers and block of `{name}` are not known",
            where,
            "add it to src/draftpool/estimate/models.yaml",
        )
    return block_shape(shape, taps, known["n_layers"], known["block_size"], None)


def draft_flops(drafter: DrafterShape, shape: Shape) -> float:
    """Work of one draft at one anchor, its context read."""
    head = drafter.draft_vocab * shape.hidden
    # A block has a slot for its anchor, too.
    slots = drafter.draft_tokens + (1 if drafter.kind == "block" else 0)
    return FORWARD * (slots * drafter.per_token + drafter.draft_tokens * head)


def training_flops(
    drafter: DrafterShape, shape: Shape, context: float, anchors: int, supervised: float
) -> float:
    """Work of training on one sequence, forwards and backwards.

    Args:
        drafter: What is trained.
        shape: Of the target.
        context: Tokens of prompt and answer.
        anchors: Anchors of a sequence, padding included.
        supervised: Anchors that count.
    """
    k, width = drafter.draft_tokens, shape.heads * shape.head_dim
    head = FROZEN * drafter.draft_vocab * shape.hidden * supervised
    if drafter.kind == "independent":
        attention = FORWARD_BACKWARD * 2 * drafter.layers * width * context**2
        return FORWARD_BACKWARD * context * drafter.per_token + attention + head
    slots = anchors * (k + 1 if drafter.kind == "block" else k)
    products = FORWARD_BACKWARD * (context * drafter.context + slots * drafter.per_token)
    # Scores and sums over the whole context (and the block), masked or not.
    attention = FORWARD_BACKWARD * 2 * drafter.layers * width * slots * (context + k)
    return products + attention + head * k
