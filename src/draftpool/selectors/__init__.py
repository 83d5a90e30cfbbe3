"""Which drafter writes the next block: one file per family of selectors, one protocol (`base`)."""
