"""The estimate of one or several studies: rows by stage, totals, and how they are printed."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

from draftpool.config.hardware import uses_gpu
from draftpool.estimate.counts import count_work
from draftpool.estimate.machines import MEASURED, Cpu, Gpu, Machine, measured, published
from draftpool.estimate.shapes import target_model
from draftpool.estimate.space import FILES, space_of
from draftpool.estimate.world import World

HOUR = 3600.0
COLUMNS = (
    "stage",
    "jobs",
    "GPU h",
    "CPU h",
    "longest",
    "disk",
    "scratch",
    "files",
    "host",
    "GPU mem",
    "rests on",
)
UNITS = ("B", "kB", "MB", "GB", "TB", "PB")


@dataclass(frozen=True)
class Row:
    """One stage, or a part of it that is priced otherwise.

    Attributes:
        stage: Stage, and what tells its part apart.
        jobs: Jobs.
        gpu_seconds, cpu_seconds: Sums over jobs of wall-clock time with and without a GPU.
        longest: Wall-clock time of the longest job.
        disk, scratch: Bytes of all its artefacts, and beside them.
        files: Files.
        host, device: Largest peak memory of a job, in bytes.
        basis: What the times rest on.
    """

    stage: str
    jobs: int
    gpu_seconds: float
    cpu_seconds: float
    longest: float
    disk: float
    scratch: float
    files: float
    host: float
    device: float
    basis: str

    def __add__(self, other: Row) -> Row:
        """Both together; the longest job and the largest memory are those of either."""
        return replace(
            self,
            jobs=self.jobs + other.jobs,
            gpu_seconds=self.gpu_seconds + other.gpu_seconds,
            cpu_seconds=self.cpu_seconds + other.cpu_seconds,
            longest=max(self.longest, other.longest),
            disk=self.disk + other.disk,
            scratch=self.scratch + other.scratch,
            files=self.files + other.files,
            host=max(self.host, other.host),
            device=max(self.device, other.device),
        )


NOTHING = Row("total", 0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, "")


@dataclass(frozen=True)
class Estimate:
    """One study."""

    experiment: str
    target: str
    machine: str
    assumptions: dict[str, float]
    rows: list[Row]
    sources: dict[str, list[str]]

    @property
    def total(self) -> Row:
        """All stages together, and Snakemake's own job at the end (`all`)."""
        return sum(self.rows, replace(NOTHING, jobs=1))


def in_order(rows: dict[tuple[str, str], Row]) -> list[Row]:
    """Rows by stage, parts of a stage that are priced otherwise together."""
    stages = list(FILES)
    return sorted(rows.values(), key=lambda row: (stages.index(row.stage.split()[0]), row.stage))


def machine_of(device: str, gpu: str) -> Machine:
    """What a study with this `device` runs on; `auto` is what this machine has."""
    return Gpu(gpu) if uses_gpu(device) else Cpu()


def estimate(world: World, machine: Machine) -> Estimate:
    """Count and price every job of a study."""
    rows: dict[tuple[str, str], Row] = {}
    sources: dict[str, set[str]] = {}
    for work in count_work(world):
        price = machine.price(work, world.shape)
        space = space_of(work, world, price.on_gpu)
        jobs = int(work.counts.get("jobs", 1))
        name = f"{work.stage} {work.detail}".strip()
        row = Row(
            name,
            jobs,
            price.seconds if price.on_gpu else 0.0,
            0.0 if price.on_gpu else price.seconds,
            price.seconds / max(1, jobs),
            space.disk,
            space.scratch,
            space.files,
            space.host,
            space.device,
            price.basis,
        )
        for source in price.sources:
            sources.setdefault(source, set()).add(work.stage)
        key = (name, price.basis)
        rows[key] = rows[key] + row if key in rows else row
    lengths, study = world.lengths, world.plan.study
    assumptions = {
        "prompt tokens": lengths.prompt_tokens(study.responses.max_prompt_tokens),
        "answer tokens": lengths.answer_tokens(study.responses.max_new_tokens),
        "live answer tokens": lengths.answer_tokens(study.decode.max_new_tokens),
    }
    kinds = sorted({run.kind for run in world.plan.runs.values()})
    assumptions |= {f"tau {kind}": world.tau_of(kind) for kind in kinds}
    told = {published()["sources"][name]: sorted(stages) for name, stages in sorted(sources.items())}
    return Estimate(
        study.experiment, target_model(study.target), machine.name, assumptions, in_order(rows), told
    )


def size_text(size: float) -> str:
    """Bytes with three digits and a unit of a thousand."""
    for unit in UNITS:
        if size < 999.5 or unit == UNITS[-1]:
            return f"{size:.3g} {unit}" if unit != "B" else f"{size:.0f} {unit}"
        size /= 1000.0
    raise AssertionError("unreachable")


def _hours(seconds: float) -> str:
    hours = seconds / HOUR
    if hours == 0.0:
        return "-"
    return f"{hours:.0f}" if hours >= 99.5 else f"{hours:.3g}" if hours >= 0.0095 else "< 0.01"


def cells(row: Row) -> list[str]:
    """The cells of a row as text."""
    sizes = [size_text(size) if size else "-" for size in (row.disk, row.scratch)]
    memory = [size_text(size) if size else "-" for size in (row.host, row.device)]
    times = [_hours(seconds) for seconds in (row.gpu_seconds, row.cpu_seconds, row.longest)]
    return [row.stage, str(row.jobs), *times, *sizes, f"{row.files:.0f}", *memory, row.basis]


def table_text(rows: list[Row], total: Row) -> str:
    """Rows and their total in columns."""
    lines = [list(COLUMNS), *(cells(row) for row in rows), cells(total)]
    widths = [max(len(line[place]) for line in lines) for place in range(len(COLUMNS))]
    # Names and the last column are text, numbers stand at the right.
    shown = [
        "  ".join(
            cell.ljust(width) if place in (0, len(widths) - 1) else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    ]
    rule = "-" * max(map(len, shown))
    return "\n".join([shown[0], rule, *shown[1:-1], rule, shown[-1]])


def estimate_text(one: Estimate) -> str:
    """A study's head, table and assumptions."""
    assumed = ", ".join(f"{name} {value:.3g}" for name, value in one.assumptions.items())
    line = measured()["dry_run"]
    seconds = line["fixed"] + line["job"] * one.total.jobs
    head = {
        "study": one.experiment,
        "target": one.target,
        "machine": one.machine,
        "assumed": assumed,
        "dry run": f"{seconds:.2g} s of `snakemake -n` ({MEASURED} on the CPU)",
    }
    lines = [f"{name + ':':<9} {value}" for name, value in head.items()]
    return "\n".join([*lines, "", table_text(one.rows, one.total), *sources_lines([one])])


def by_stage(estimates: list[Estimate]) -> list[Row]:
    """Rows of several studies, stage by stage."""
    rows: dict[tuple[str, str], Row] = {}
    for one in estimates:
        for row in one.rows:
            key = (row.stage, row.basis)
            rows[key] = rows[key] + row if key in rows else row
    return in_order(rows)


def by_study(estimates: list[Estimate]) -> list[Row]:
    """A row a study."""
    return [replace(one.total, stage=one.experiment) for one in estimates]


def sources_lines(estimates: list[Estimate]) -> list[str]:
    """Whose numbers the published rows rest on, and for which stages."""
    told: dict[str, set[str]] = {}
    for one in estimates:
        for source, stages in one.sources.items():
            told.setdefault(source, set()).update(stages)
    return (
        ["", *(f"published for {', '.join(sorted(s))}: {source}" for source, s in told.items())]
        if told
        else []
    )


def total_of(estimates: list[Estimate]) -> Row:
    """All studies together."""
    return sum((one.total for one in estimates), NOTHING)


def as_json(estimates: list[Estimate]) -> dict[str, Any]:
    """Everything that is printed, and the numbers behind it, in seconds and bytes."""
    studies = [asdict(one) | {"total": asdict(one.total)} for one in estimates]
    return {"studies": studies, "total": asdict(total_of(estimates))}
