"""Statistics over the step, sequence and acceptance tables: metrics, regret, headroom, intervals."""
