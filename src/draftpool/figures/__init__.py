"""One module per figure: ``draw(stats, out)`` reads tidy CSVs only and writes a PNG and, beside it, a PDF."""

# What a study must have for a figure: scored drafters (every study), live decoding (of one text whatever drafts:
# exact), a profile, replay, both, further pools, or a sweep along another axis than the objective.
FIGURES = {
    "heatmap_tau": "scored",
    "objectives": "scored",
    "training_dynamics": "scored",
    "surrogate": "scored",
    "selectors": "live",
    "regret_curves": "live exact",
    "arm_choice": "live",
    "time_split": "live",
    "round_profile": "profile",
    "leaderboard": "replay",
    "streams": "replay",
    "prediction": "replay and live",
    "pool_sizes": "pool_sizes",
    "pools": "pools",
    "ablations": "sweeps",
}
