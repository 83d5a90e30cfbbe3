"""What a study will take: counts of its artefacts times costs per unit, without running or loading anything."""
