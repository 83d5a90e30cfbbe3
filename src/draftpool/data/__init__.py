"""Prompts: pinned archives, sources, readers, splits and licences."""
