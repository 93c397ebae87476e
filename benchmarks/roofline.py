# SPDX-License-Identifier: Apache-2.0
"""Draws measurements of gemm.py or layer.py under the roofs of an H200: arithmetic intensity against TFLOP/s.

usage: PYTHONPATH=. python3 benchmarks/roofline.py FILE.jsonl ... --out PICTURE.svg [--formats ...] [--labels ...]
           [--title TEXT]
One colour a contestant, one marker a shape; the line through a shape's points goes from few tokens to many. Needs
matplotlib (pip install 'vllm-humming[plots]').
"""

import argparse
import json
import sys
from collections import defaultdict
from itertools import cycle
from pathlib import Path
from typing import Any

from protocol import MEMORY_RATE, TENSOR_RATE

from vllm_humming.moe.weight_formats import WEIGHT_FORMATS

MARKERS = "osD^vP*X<>hd"


def read_records(paths: list[Path], formats: list[str] | None, labels: list[str] | None) -> list[dict[str, Any]]:
    """The measurements of those formats and labels, with label, shape, x (flop / byte) and y (TFLOP/s).

    Tiles of a sweep that were not selected are left out. Raises ValueError that names the file and line of a record
    without rates.
    """
    points = []
    for path in paths:
        for number, line in enumerate(path.read_text().splitlines(), 1):
            record = json.loads(line)
            fmt, label = record.get("fmt", "mxfp4"), record.get("label") or record.get("peer")
            if record.get("role") == "sweep" or "us" not in record or (formats and fmt not in formats):
                continue
            if labels and label not in labels:
                continue
            if not record.get("tflops") or not record.get("gbps"):
                raise ValueError(f"{path}, line {number}: a measurement needs tflops and gbps, found {sorted(record)}")
            shape = record.get("shape") or f"{record['set']} {record['gemm']}"
            # Layers count the active weights as their bytes.
            intensity = record.get("flop_per_byte") or 1e3 * record["tflops"] / record["gbps"]
            points.append({"label": label, "shape": shape, "fmt": fmt, "m": record["m"], "x": intensity})
            points[-1]["y"] = record["tflops"]
    return points


def roofs(points: list[dict[str, Any]]) -> list[tuple[str, float, float]]:
    """(path, TFLOP/s of the tensor cores, flop / byte where the memory's roof meets them) of the paths that occur."""
    paths = sorted({WEIGHT_FORMATS[point["fmt"]].path for point in points})
    return [(path, TENSOR_RATE[path] / 1e12, TENSOR_RATE[path] / MEMORY_RATE) for path in paths]


def draw(points: list[dict[str, Any]], out: Path, title: str) -> None:
    """Writes the picture; the format is that of out's suffix."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(10, 6.5))
    labels, shapes = (list(dict.fromkeys(point[key] for point in points)) for key in ("label", "shape"))
    colours = dict(zip(labels, cycle(pyplot.get_cmap("tab10").colors), strict=False))
    markers = dict(zip(shapes, cycle(MARKERS), strict=False))
    lines: dict[tuple[str, str, str], list[dict[str, Any]]] = defaultdict(list)
    for point in points:
        lines[point["label"], point["shape"], point["fmt"]].append(point)
    for (label, shape, _), line in lines.items():
        line.sort(key=lambda point: point["m"])
        xs, ys = [point["x"] for point in line], [point["y"] for point in line]
        axes.plot(xs, ys, color=colours[label], marker=markers[shape], markersize=5, linewidth=0.7, alpha=0.8)
    low, high = min(p["x"] for p in points) / 1.5, max(p["x"] for p in points) * 1.5
    for path, rate, knee in roofs(points):
        high = max(high, 2 * knee)
        name = {"a16": "16-bit", "w4a8": "FP8"}[path]
        axes.plot([knee, high], [rate, rate], color="black", linewidth=1)
        axes.annotate(f"{name} tensor cores, {rate:.0f} TFLOP/s", (high, rate), ha="right", va="bottom", fontsize=8)
    knees = [knee for _, _, knee in roofs(points)]
    rises = [x * MEMORY_RATE / 1e12 for x in (low, max(knees))]
    axes.plot([low, max(knees)], rises, color="black", linewidth=1)
    axes.annotate(
        f"memory, {MEMORY_RATE / 1e12:.1f} TB/s",
        (low, rises[0]),
        xytext=(6, 24),
        textcoords="offset points",
        fontsize=8,
    )
    axes.set(xscale="log", yscale="log", xlabel="flop / byte", ylabel="TFLOP/s", title=title, xlim=(low, high))
    for label in labels:
        axes.plot([], [], color=colours[label], label=label)
    for shape in shapes:
        axes.plot([], [], color="grey", marker=markers[shape], linestyle="", markersize=5, label=shape)
    axes.grid(True, which="both", linewidth=0.3)
    axes.legend(fontsize=7, loc="lower right", ncols=2)
    figure.tight_layout()
    figure.savefig(out, dpi=150)
    pyplot.close(figure)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--formats", nargs="+", choices=list(WEIGHT_FORMATS))
    parser.add_argument("--labels", nargs="+")
    parser.add_argument("--title", default="One H200")
    args = parser.parse_args()
    points = read_records(args.files, args.formats, args.labels)
    if not points:
        parser.error("no measurement in these files fits --formats and --labels")
    draw(points, args.out, args.title)
    print(f"{args.out}: {len(points)} points")
    return 0


if __name__ == "__main__":
    sys.exit(main())
