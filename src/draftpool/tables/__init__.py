"""One module per table: ``write(stats, out)`` reads tidy CSVs only and writes CSV, Markdown and LaTeX."""

# What a study must have for a table: scored drafters (every study), live decoding, a pool, replay, further pools.
TABLES = {
    "drafters_table": "scored",
    "dpace_table": "scored",
    "objectives_table": "scored",
    "headroom_table": "pool",
    "metasd_table": "live",
    "leaderboard_table": "replay",
    "streams_table": "replay",
    "pools_table": "pools",
}
