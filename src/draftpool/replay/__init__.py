"""The acceptance table: what every drafter would have achieved at every anchor of the target's own text."""
