"""Training objectives of block drafters: one file per family, one protocol (`base`)."""
