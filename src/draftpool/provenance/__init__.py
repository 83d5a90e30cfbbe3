"""Where a result comes from: what every job records of itself, and the chain from a figure back to the prompts."""
