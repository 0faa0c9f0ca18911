"""Pages: the charts and tables of README.md and docs/, from pytest-benchmark's JSON alone.

    pytest bench -m "not slow" --benchmark-json=new.json
    python bench/pages.py new.json

stores this JSON, without the times of the single rounds, as `bench/results.json`. Then it writes
the text between these two lines, wherever they are in a page:

    <!-- figures: NAME -->
    <!-- end figures -->

NAME is a key of `PARTS`. Without an argument, pages are written from the present `results.json`.
"""

import hashlib
import json
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

import ratios
from ratios import Row, digits, times

BENCH = Path(__file__).parent
ROOT = BENCH.parent
RESULTS = BENCH / "results.json"
DOCS = ROOT / "docs"
CHARTS = DOCS / "explanation" / "charts"
PART = re.compile(
    r"^<!-- figures: (?P<name>[\w-]+) -->\n(?P<body>.*?)^<!-- end figures -->$", re.M | re.S
)
THEMES = ("light", "dark")
NOTHING = "Not measured."
Groups = dict[str, dict[str, Row]]


class Results(NamedTuple):
    """The results of a run, by group and row, and the whole JSON."""

    groups: Groups
    json: dict[str, Any]

    @classmethod
    def read(cls, path: Path = RESULTS) -> "Results":
        found = json.loads(path.read_text(encoding="utf-8"))
        return cls(ratios.groups(found["benchmarks"]), found)

    def source(self) -> str:
        """Return the line under a table: the date, the command, the versions and the processor."""
        machine = self.json["machine_info"]
        named = ("kcache-cuda", "nvidia-cuda-nvrtc", "cuda-core")
        versions = ", ".join(
            f"{name} {machine['versions'][name]}" for name in named if name in machine["versions"]
        )
        return (
            f"Measured on {self.json['datetime'][:10]} by `{self.json['command']}`: Python"
            f" {machine['python']}, {versions}; {machine['cpu']}, {machine['cores']} cores."
        )


def compact(found: dict[str, Any]) -> dict[str, Any]:
    """Remove the times of the single rounds, which are most of a JSON, and return the rest."""
    for each in found["benchmarks"]:
        each["stats"].pop("data", None)
        each.pop("options", None)
    return found


# -- figures ---------------------------------------------------------------------------------------


def seconds(value: float) -> str:
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if value >= 0.9995 * size:
            return f"{digits(value / size)} {unit}"
    return f"{digits(value * 1e9)} ns"


def median(row: Row) -> float:
    value: float = row["stats"]["median"]
    return value


def cell(row: Row | None) -> str:
    """Return the text of a table's cell: a fact, in bold type if it is wrong, or a time."""
    if row is None:
        return "-"
    info = row["extra_info"]
    if "found" in info:
        return info["found"] if info["right"] else f"**{info['found']}**"
    return seconds(median(row))


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    lines = [list(head), *map(list, rows)]
    lines.insert(1, ["---"] * len(lines[0]))
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


# -- charts ----------------------------------------------------------------------------------------


class Chart(NamedTuple):
    """A chart of bars, or of lines over the number of entries. `series` maps names to points."""

    name: str
    title: str
    kind: str
    series: dict[str, dict[str, float]]

    def digest(self) -> str:
        """Return a digest of the data. The drawn file contains the same digest for comparison."""
        return hashlib.sha256(json.dumps(self).encode()).hexdigest()[:32]

    def words(self) -> str:
        """Return the data of the chart as text, for readers who can't see the chart."""
        told = (
            f"{name} {', '.join(f'{at} {seconds(value)}'.strip() for at, value in points.items())}"
            for name, points in self.series.items()
        )
        return f"{self.title}. {'; '.join(told)}."


PROGRAM = "a program with cutlass_gemm, from start to end"
STARTS = {
    "kcache run, first start": "first start: NVRTC compiles a CUTLASS kernel",
    "kcache run, second start": "second start: the kernel is in the cache",
}


def starts(results: Results) -> Chart | None:
    """Return a chart of the times of one program that is started twice, or None without data."""
    group = results.groups.get(PROGRAM, {})
    if not STARTS.keys() <= group.keys():
        return None
    first, second = (group[name] for name in STARTS)
    faster = ratios.ratio(first, second)
    if faster is None:
        return None
    title = f"The same program again: {float(f'{faster.median:.2g}'):g} times as fast"
    series = {label: {"": median(group[name])} for name, label in STARTS.items()}
    return Chart("starts", title, "bars", series)


CAP = "put at the cap: "


def growth(results: Results) -> Chart | None:
    """Return a chart of the time of a put over the number of entries, or None without data."""
    series = {
        name.removeprefix(CAP): {row.split()[0]: median(each) for row, each in group.items()}
        for name, group in results.groups.items()
        if name.startswith(CAP) and "zstd" not in name
    }
    title = "A put into a full cache, against its entries"
    return Chart("growth", title, "lines", series) if series else None


def draw(chart: Chart, theme: str) -> Path:
    import matplotlib as mpl

    mpl.use("svg")
    from matplotlib import pyplot as plt

    style = [BENCH / "charts.mplstyle"]
    with plt.style.context(["dark_background", *style] if theme == "dark" else style):
        figure, axes = plt.subplots(figsize=(6, 2 if chart.kind == "bars" else 4))
        (_bars if chart.kind == "bars" else _lines)(axes, chart)
        path = CHARTS / f"{chart.name}-{theme}.svg"
        figure.savefig(path, metadata={"Date": None, "Description": f"data: {chart.digest()}"})
        plt.close(figure)
    return path


def _bars(axes: Any, chart: Chart) -> None:
    """Draw bars on a linear axis from zero, each with its name above and its time to the right."""
    values = [next(iter(points.values())) for points in chart.series.values()]
    colours = ["tab:gray", *["tab:green"] * len(values)]
    drawn = axes.barh(range(len(values)), values, height=0.42, color=colours)
    for name, value, bar in zip(chart.series, values, drawn, strict=False):
        axes.text(0, bar.get_y() - 0.08, name, va="bottom")
        axes.text(value, bar.get_y() + 0.21, f" {value:.2f} s", va="center", weight="bold")
    axes.set(xlim=(0, max(values) * 1.2), ylim=(len(values) - 0.75, -0.7), title=chart.title)
    axes.axis("off")


def _lines(axes: Any, chart: Chart) -> None:
    for name, points in chart.series.items():
        entries = [int(at.replace(",", "")) for at in points]
        ours = name.startswith("kcache")
        axes.plot(entries, list(points.values()), label=name, linestyle="-" if ours else "--")
    axes.set(xscale="log", yscale="log", title=chart.title, xlabel="entries")
    axes.yaxis.set_major_formatter(lambda value, _: seconds(value))
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.figure.legend(loc="outside lower center", ncols=3, fontsize="small")


def embed(chart: Chart, page: Path) -> str:
    """Return the HTML that shows a chart on `page`, as a light or a dark image.

    On the documentation's site, a class of each image makes the reader's theme choose. On GitHub,
    the browser chooses.
    """
    folder = os.path.relpath(CHARTS, page.parent)
    light, dark = (f'src="{folder}/{chart.name}-{theme}.svg"' for theme in THEMES)
    alt = f'alt="{escape(chart.words())}" width="600"'
    if page.is_relative_to(DOCS):
        light, dark = f'{light} class="only-light"', f'{dark} class="only-dark"'
        return f"<img {light} {alt}>\n\n<img {dark} {alt}>"
    source = f'<source media="(prefers-color-scheme: dark)" {dark.replace("src", "srcset")}>'
    return f"<picture>\n{source}\n<img {light} {alt}>\n</picture>"


# -- parts -----------------------------------------------------------------------------------------

KERNELS = {
    "NVRTC alone": "NVRTC alone",
    "a miss": "kcache file, a miss",
    "hit, new process": "kcache file, hit in a new process",
    "hit from disk": "kcache file, hit from disk",
    "hit from memory": "kcache file, hit from memory",
    "headers checked once": "kcache file, hit from memory, headers checked once",
}
COMPARED = ", cold against hot"
#: Maps the columns of the comparison to the rows of a group that may be shown in them.
COLUMNS = {
    "kcache": ("kcache file", "kcache"),
    "cuda.core": ("cuda.core FileStream", "cuda.core InMemory"),
    "CuPy": ("CuPy",),
    "diskcache": ("diskcache",),
    "JAX LRUCache": ("JAX LRUCache",),
    "SQLite": ("SQLite",),
    "Triton": ("Triton",),
}
QUESTIONS = {
    "a new process gets its kernel": "a new process gets plain, hot",
    "asked again in one process": "hit of 4 KB of source in memory",
    "get 100 KiB": "get of 100 KiB",
    "put 100 KiB": "put of 100 KiB",
    "put into a full cache of 10,000": CAP,
    "open a cache of 10,000 entries": "opening among 10,000 entries",
    "16 processes want one kernel: compiles": "16 processes want one cold kernel",
    "a header is edited: what comes back": "a header is edited",
    "an entry's file is cut short": "the file of an entry is cut short",
    "the disk is full during a compile": "the disk is full during a compile",
    "8 writers, cap of 1 MB: on disk": "8 writers, cap of 1 MB: on disk",
}


def _readme(results: Results, page: Path) -> Iterator[str]:
    chart = starts(results)
    if chart is not None:
        yield embed(chart, page)
        yield f"{results.source()} [All figures](docs/explanation/benchmarks.md)."


def _charts(results: Results, page: Path) -> Iterator[str]:
    for chart in filter(None, (starts(results), growth(results))):
        yield embed(chart, page)


def _kernels(results: Results, page: Path) -> Iterator[str]:
    rows = []
    for name, group in results.groups.items():
        if name.endswith(COMPARED) and KERNELS["a miss"] in group:
            headers = str(group[KERNELS["a miss"]]["extra_info"]["headers"])
            cells = [cell(group.get(row)) for row in KERNELS.values()]
            rows.append([f"`{name.removesuffix(COMPARED)}`", headers, *cells])
    if rows:
        yield table(("kernel", "headers", *KERNELS), rows)


def _peers(results: Results, page: Path) -> Iterator[str]:
    rows = []
    for question, name in QUESTIONS.items():
        group = results.groups.get(name, {})
        if name == CAP:  # each contender has a group, in which numbers of entries are compared
            among = "10,000 entries"
            caps = {each.removeprefix(CAP): found for each, found in results.groups.items()}
            group = {each: found[among] for each, found in caps.items() if among in found}
        if group:
            chosen = [next(filter(group.get, names), "") for names in COLUMNS.values()]
            cells = [_ours(group), *(cell(group.get(each)) for each in chosen[1:])]
            rows.append([question, *cells])
    if rows:
        yield table(("", *COLUMNS), rows)


def _ours(group: dict[str, Row]) -> str:
    """Return kcache's cell: the figure of its first backend, or all facts if they differ."""
    ours = {name: each for name, each in group.items() if name.startswith("kcache")}
    first = next((name for name in COLUMNS["kcache"] if name in ours), None)
    found = {name: cell(each) for name, each in ours.items() if "found" in each["extra_info"]}
    if len(set(found.values())) > 1 and "kcache file" in found:
        return ", ".join(f"`{name.removeprefix('kcache ')}` {each}" for name, each in found.items())
    return cell(ours[first]) if first else "-"


def _targets(results: Results, page: Path) -> Iterator[str]:
    rows = [
        (
            f"{each.group}: {each.row}, to {each.to}",
            f"≤ {times(each.most)}",
            times(each.ratio.median),
            f"{times(each.ratio.low)} to {times(each.ratio.high)}",
            "yes" if each.met else "**no**",
        )
        for each in ratios.targets(results.groups)
    ]
    if rows:
        yield table(("ratio", "target", "measured", "quartiles", "met"), rows)
        yield results.source()


PARTS: dict[str, Callable[[Results, Path], Iterator[str]]] = {
    "readme": _readme,
    "charts": _charts,
    "kernels": _kernels,
    "peers": _peers,
    "targets": _targets,
}


def render(name: str, page: Path, results: Results) -> str:
    """Return the text of the part `name` of a page.

    Raises:
        KeyError: there is no such part.
    """
    return "\n" + "".join(f"{text}\n\n" for text in PARTS[name](results, page) or (NOTHING,))


def pages() -> list[Path]:
    return [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]


def write(results: Results) -> None:
    for page in pages():
        before = page.read_text(encoding="utf-8")
        after = PART.sub(
            lambda found, page=page: (  # type: ignore[misc]
                f"<!-- figures: {found['name']} -->\n{render(found['name'], page, results)}"
                "<!-- end figures -->"
            ),
            before,
        )
        if after != before:
            page.write_text(after, encoding="utf-8")
            print(f"wrote {page.relative_to(ROOT)}")
    for chart in filter(None, (starts(results), growth(results))):
        for theme in THEMES:
            print(f"drew {draw(chart, theme).relative_to(ROOT)}")


def main() -> None:
    for argument in sys.argv[1:2]:
        found = compact(json.loads(Path(argument).read_text(encoding="utf-8")))
        RESULTS.write_text(json.dumps(found, separators=(",", ":")) + "\n", encoding="utf-8")
    write(Results.read())


if __name__ == "__main__":
    main()
