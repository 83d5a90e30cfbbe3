"""Drafters: one file per kind, one protocol (`base.py`)."""
