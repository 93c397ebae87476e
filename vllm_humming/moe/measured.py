# SPDX-License-Identifier: Apache-2.0
"""Tiles that beat the cost model's choice when they were measured (H200; benchmarks/layer.py --sweep-tiles).

Few on purpose: a record is worth its line only where the model's choice costs 1.5 % of the layer or more. A record
holds for the GEMM it names and for the rows an expert that were measured, on any parallel share of that size.
"""

from dataclasses import dataclass

from vllm_humming.moe.weight_formats import Path


@dataclass(frozen=True)
class Record:
    """experts: local experts. n, k: weight rows and reduction of the GEMM, with the intermediate size padded to 128.
    rows: inclusive range of the mean rows an active expert. tile: name in schedule.TILES, of that path."""

    experts: int
    n: int
    k: int
    rows: tuple[float, float]
    tile: str
    path: Path = "a16"


RECORDS = (
    Record(128, 1536, 2048, (1, 1.45), "64x16"),
    Record(128, 2048, 768, (1.1, 1.2), "64x16"),
    Record(128, 2048, 768, (1.22, 1.5), "256x16"),
    Record(128, 2048, 768, (1.51, 9), "256x16"),  # alone, 64 tokens: 44.9 us (-gemm-2.jsonl), else 54.4 (-gemm-3)
    Record(128, 2048, 768, (9.1, 40), "128x48"),
    Record(32, 4096, 6144, (1.35, 2), "64x16"),
    Record(32, 4096, 6144, (6, 8.5), "256x16"),
    Record(32, 4096, 6144, (11, 40), "128x48"),
    Record(32, 6144, 2048, (1.2, 1.3), "64x16"),
    Record(32, 5888, 2880, (1.35, 1.6), "64x16"),
    Record(32, 5888, 2880, (1.8, 2.2), "256x16"),
    Record(32, 2880, 2944, (3, 5), "64x16"),
    Record(12, 3584, 3072, (1, 2), "64x16"),
    Record(12, 6144, 3584, (2.1, 2.5), "64x16"),
    Record(12, 6144, 3584, (4, 8.5), "64x16"),
    Record(12, 6144, 3584, (9, 30), "128x64"),
    Record(128, 1536, 2048, (10, 14), "f8-256x16", "w4a8"),
    Record(128, 2048, 768, (10, 14), "f8-256x16", "w4a8"),
    Record(128, 1536, 2048, (1, 1.1), "f8-256x16", "w4a8"),
    Record(128, 2048, 768, (1, 1.1), "f8-256x16", "w4a8"),
    Record(128, 1536, 2048, (1.2, 1.35), "f8-256x64", "w4a8"),
    Record(32, 4096, 6144, (1.2, 2), "f8-256x64", "w4a8"),
    Record(32, 5888, 2880, (1, 1.1), "f8-256x16", "w4a8"),
    Record(32, 5888, 2880, (1.15, 1.4), "f8-256x64", "w4a8"),
    Record(32, 5888, 2880, (2, 2.6), "f8-256x64", "w4a8"),
    Record(32, 2880, 2944, (2, 2.6), "f8-256x64", "w4a8"),
    Record(12, 6144, 3584, (2, 12), "f8-256x64", "w4a8"),
    Record(32, 5888, 2880, (110, 150), "f8-256x256", "w4a8"),
)


@dataclass(frozen=True)
class LayerRecord:
    """A gated layer of up to 4096 entries with 16-bit activations. experts: local ones. intermediate: padded to 128.
    rows: inclusive range of the mean rows an active expert. tiles: of the up and the down GEMM; one for both: one
    kernel."""

    experts: int
    hidden: int
    intermediate: int
    rows: tuple[float, float]
    tiles: tuple[str, str]


def _one(experts: int, hidden: int, intermediate: int, rows: tuple[float, float], tile: str) -> LayerRecord:
    return LayerRecord(experts, hidden, intermediate, rows, (tile, tile))


# The fastest over MXFP4 and NVFP4: benchmarks/results/2026-12-01-h200-split-k.txt; from 10 rows on -fused.txt.
LAYERS = (
    LayerRecord(128, 2048, 768, (1, 1.045), ("64x16", "64x16-3")),
    LayerRecord(128, 2048, 768, (1.05, 1.08), ("64x16-3", "64x16")),
    LayerRecord(128, 2048, 768, (1.09, 1.12), ("64x16", "64x16-3")),
    _one(128, 2048, 768, (1.125, 1.2), "256x16"),
    _one(128, 2048, 768, (1.22, 1.35), "64x16"),
    _one(128, 2048, 768, (1.36, 9), "256x16"),
    _one(32, 6144, 2048, (1, 2.5), "128x16-k2"),
    _one(32, 6144, 2048, (3, 9), "256x16"),
    _one(32, 6144, 2048, (56, 72), "128x96"),
    _one(12, 3584, 3072, (1, 6), "128x16-k2"),
    _one(12, 3584, 3072, (10, 50), "128x64"),
    _one(12, 3584, 3072, (52, 95), "128x96"),
    _one(32, 2880, 2944, (1, 1.06), "64x8-k4"),
    _one(32, 2880, 2944, (1.07, 1.7), "128x16-k2"),
    _one(32, 2880, 2944, (1.9, 4.5), "256x16"),
    _one(32, 2880, 2944, (8.5, 40), "128x48"),
)


def layer_tiles(experts: int, hidden: int, intermediate: int, rows: float) -> tuple[str, str] | None:
    """The recorded tiles of a layer of up to 4096 entries, or None."""
    wanted = (experts, hidden, intermediate)
    for record in LAYERS:
        if (record.experts, record.hidden, record.intermediate) == wanted and record.rows[0] <= rows <= record.rows[1]:
            return record.tiles
    return None


def tile_for(experts: int, n: int, k: int, rows: float, path: Path) -> str | None:
    """The recorded tile of a GEMM on that path, or None."""
    wanted = (experts, n, k, path)
    for record in RECORDS:
        if (record.experts, record.n, record.k, record.path) == wanted and record.rows[0] <= rows <= record.rows[1]:
            return record.tile
    return None
