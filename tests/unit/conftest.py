"""Fixtures that several files of unit tests share."""

from tiny import llama_world, qwen3_world, targets

__all__ = ["llama_world", "qwen3_world", "targets"]
