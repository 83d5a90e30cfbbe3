"""Training objectives of drafters: one file per family, one protocol (`base`)."""
