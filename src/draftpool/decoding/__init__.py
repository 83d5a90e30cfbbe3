"""Decoding a target with a pool of drafters: the loop, verification, feedback and step records."""
