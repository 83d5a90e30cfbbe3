"""Limits of memory: chunks of logits, and batches that do not fit."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from tiny import load, responses_cfg, save_prompts

from draftpool.data.responses import generate_responses
from draftpool.errors import DraftpoolError
from draftpool.targets import memory
from draftpool.training import label_probabilities
from draftpool.training.label_probabilities import label_log_probabilities


@pytest.mark.parametrize("rows", [1, 3, 7, 100])
def test_chunks_change_neither_values_nor_gradients(rows, monkeypatch):
    torch.manual_seed(0)
    hidden, head = torch.randn(4, 5, 6, requires_grad=True), torch.randn(11, 6)
    labels, weights = torch.randint(0, 11, (4, 5)), torch.randn(4, 5)
    whole = F.linear(hidden, head).log_softmax(dim=-1).gather(-1, labels[..., None])[..., 0]
    (wanted,) = torch.autograd.grad((whole * weights).sum(), hidden)
    sizes, linear = [], F.linear

    def watched(x, weight):
        sizes.append(x.shape[0] * weight.shape[0] * 4)
        return linear(x, weight)

    monkeypatch.setattr(label_probabilities.F, "linear", watched)
    limit = rows * 11 * 4
    chunked = label_log_probabilities(hidden, head, labels, limit)
    (gradient,) = torch.autograd.grad((chunked * weights).sum(), hidden)
    assert max(sizes) <= limit
    torch.testing.assert_close(chunked, whole)
    torch.testing.assert_close(gradient, wanted)


def test_a_batch_that_does_not_fit_names_the_one_that_does(targets, tmp_path, monkeypatch):
    prompts = save_prompts(tmp_path / "prompts", "tales", 8, 0)
    target = load(targets.llama)
    each = memory.sequence_bytes(target, 40, 20)
    monkeypatch.setattr(memory, "free_bytes", lambda device: int(3.5 * each / memory.USABLE))
    memory.check_batch(target, 3, 40, 20, "here")
    with pytest.raises(DraftpoolError, match="here: 4 sequences of 40 tokens need .* -> use at most 3"):
        memory.check_batch(target, 4, 40, 20, "here")
    monkeypatch.setattr(memory, "free_bytes", lambda device: 10)
    with pytest.raises(DraftpoolError, match="responses.batch_sequences.*shorter prompts"):
        generate_responses(responses_cfg(), targets.llama, prompts, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_the_estimate_covers_what_the_cache_takes(targets):
    target = load(targets.qwen3)
    cache = target.new_cache(30, 4)
    taken = 2 * cache.keys.numel() * cache.keys.element_size()
    assert 4 * memory.sequence_bytes(target, 30, 1) >= taken
    assert memory.free_bytes(target.device) > 0
