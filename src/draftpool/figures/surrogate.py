"""Does the surrogate predict the acceptance length? Points are prompts of the generalist."""

from __future__ import annotations

from pathlib import Path

from draftpool.analysis.tidy import read_meta, read_tidy
from draftpool.errors import DraftpoolError
from draftpool.figures import style

SURROGATES = {
    "product": "S: sum of cumulative products\nof acceptance probabilities",
    "sum": "plain sum of\nacceptance probabilities",
}


def draw(stats: Path, out: Path) -> None:
    """Draw both surrogates against measured tau; reads surrogate, surrogate_prompts and meta.

    Raises:
        DraftpoolError: If the generalist was not scored.
    """
    meta = read_meta(stats)
    correlations, points = read_tidy(stats, "surrogate"), read_tidy(stats, "surrogate_prompts")
    drafter = meta["generalist"]
    points = points[points["drafter"] == drafter]
    rhos = correlations[correlations["drafter"] == drafter].set_index(["level", "surrogate"])
    if points.empty:
        raise DraftpoolError("no surrogate was computed for the generalist", drafter, "score it")
    figure, axes = style.panels(1, 2, 3.8, sharey=True)
    for panel, (name, label) in zip(axes[0], SURROGATES.items(), strict=True):
        for number, domain in enumerate(meta["domains"]):
            own = points[points["domain"] == domain]
            look = {"color": style.COLOURS[number % 8], "marker": style.MARKERS[number % 8]}
            panel.scatter(own[name], own["length"], s=14, alpha=0.75, lw=0, label=domain, **look)
        prompt, anchor = rhos.loc[("prompt", name)], rhos.loc[("anchor", name)]
        panel.set_title(
            f"rank correlation {prompt['value']:.2f} {style.brackets(prompt)}\n"
            f"single anchors {anchor['value']:.2f} {style.brackets(anchor)}",
            fontsize=8,
        )
        panel.set_xlabel(label)
        panel.grid(lw=0.4)
    axes[0, 0].set_ylabel("measured tau (tokens per target call)")
    gap = rhos.loc[("prompt", "difference")]
    better = (
        "S ranks prompts better than the plain sum"
        if gap["low"] > 0
        else "No clear difference between S and the plain sum"
    )
    if gap["high"] < 0:
        better = "The plain sum ranks prompts better than S"
    note = (
        f"{style.run_label(drafter)}, n = {len(points)} prompts. Rank correlation: Spearman's rho over "
        f"prompts, and over single anchors; brackets: {style.percent(meta['confidence'])} bootstrap "
        "intervals over prompts."
    )
    message = f"{better}: difference {gap['value']:+.3f} {style.brackets(gap, '+', 3)}"
    style.frame(figure, message, note, axes[0, 0], columns=6)
    style.save(figure, out)
