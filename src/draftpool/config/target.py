"""Options of the target model and of the pinned packages that weights and prompts are read from."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from draftpool.config.strict import Strict


class Archive(Strict):
    """A file of a package registry, pinned by version and SHA-256, read as an archive and never installed."""

    package: str = Field(description="Name on the Python package index.")
    version: str = Field(description="Exact version.")
    filename: str = Field(description="File name of the wheel.")
    sha256: str = Field(description="SHA-256 of the wheel, 64 hex digits.", pattern="^[0-9a-f]{64}$")


class Target(Strict):
    """The large model whose text is kept; everything else only makes it faster."""

    name: str = Field(description="Short readable name, used in ids.", pattern="^[a-z0-9][a-z0-9._-]*$")
    source: Literal["package", "hub", "path"] = Field(
        description="Where the weights come from: a GGUF inside a pinned package, the Hub, or a local folder."
    )
    archive: Archive | None = Field(None, description="`source: package`: the pinned package.")
    member: str | None = Field(
        None, description="`source: package`: path of the GGUF file inside the package."
    )
    model_id: str | None = Field(
        None, description="`source: hub`: repository name, for example `Qwen/Qwen3-8B`."
    )
    revision: str | None = Field(None, description="`source: hub`: commit or tag; pin it.")
    path: str | None = Field(
        None, description="`source: path`: folder with config, tokenizer and safetensors."
    )
    taps: list[int] | None = Field(
        None,
        description="Target layers (0-based; the layer's output is taken) whose hidden states feed the "
        "drafters. Null: 5 layers spread from the 2nd to the 3rd-to-last (DFlash, section 4).",
        min_length=1,
    )

    chat_options: dict[str, bool | int | str] | None = Field(
        None,
        description="Variables of the chat template, fixed when the target is fetched, for example "
        "`{enable_thinking: false}`.",
    )
    backend: Literal["fast", "transformers"] = Field(
        "fast",
        description="`fast`: our own forward pass (Llama, Qwen2 and Qwen3 families; others fall back with a "
        "warning). `transformers`: the library's, one sequence at a time.",
    )
    device_map: Literal["auto", "balanced", "balanced_low_0", "sequential"] | None = Field(
        None,
        description="How accelerate spreads a target that one device does not hold over GPUs, main memory and disk "
        "(needs `backend: transformers`; docs/large-targets.md); `balanced_low_0` leaves room for drafters. Null: one "
        "device.",
    )

    @model_validator(mode="after")
    def _source_has_its_fields(self):
        needs = {"package": ("archive", "member"), "hub": ("model_id",), "path": ("path",)}[self.source]
        for name in needs:
            if getattr(self, name) is None:
                raise ValueError(f"`source: {self.source}` needs `{name}`")
        return self

    @model_validator(mode="after")
    def _only_transformers_spreads_layers(self):
        if self.device_map is not None and self.backend != "transformers":
            raise ValueError("`device_map` needs `backend: transformers`: the fast one runs on one device")
        return self

    @property
    def loading(self) -> dict[str, str]:
        """What stages are told of how it runs; `device_map` where it is set, so that other ids stay what they were."""
        spread = {} if self.device_map is None else {"device_map": self.device_map}
        return {"backend": self.backend} | spread
