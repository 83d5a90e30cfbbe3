"""The licence page, made from the YAML: ``python -m draftpool.data.licences CONFIG OUT``."""

from __future__ import annotations

import sys
from pathlib import Path

import yaml

from draftpool.artefacts import atomic_path

HEAD = """# Licences of the prompts

Texts are downloaded by the workflow from pinned files and are not part of this repository. Licences are as
the packages declare them; where a package passes on texts of others, their licence is named too. Works under
CC BY-SA ask for attribution (the column *from*) and for the same licence when they are shared again.
This page is made by `python -m draftpool.data.licences config/default.yaml docs/licences.md`.

| domain | subset | used for | from | licence |
|---|---|---|---|---|
"""


def licence_page(archives: dict[str, dict], domains: dict[str, dict]) -> str:
    """Return the Markdown page for the ``archives`` and ``domains`` blocks of a configuration."""
    lines = []
    for domain, block in domains.items():
        for source in block["sources"]:
            if source["source"] == "archive":
                spec = archives[source["archive"]]
                origin = f"{spec['package']} {spec['version']}, `{source['member']}`"
            else:
                origin = f"`{source.get('dataset') or source.get('path')}`"
            use = {"both": "train, eval"}.get(source["split"], source["split"])
            lines.append(f"| {domain} | {source['subset']} | {use} | {origin} | {source['licence']} |\n")
    return HEAD + "".join(lines)


def main(config: Path, out: Path) -> None:
    """Write the licence page of a configuration file."""
    blocks = yaml.safe_load(config.read_text(encoding="utf-8"))
    with atomic_path(out) as temporary:
        temporary.write_text(licence_page(blocks["archives"], blocks["domains"]), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
