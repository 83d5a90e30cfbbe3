"""Configuration: strict models, loading and merging, artefact ids and code digests. Never imports torch."""
