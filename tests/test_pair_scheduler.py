# SPDX-License-Identifier: Apache-2.0
"""The schedulers of a pair tile's two CTAs (csrc/moe/pair/pair_producer.cuh), compiled for the host: whichever CTA
falls behind, both run the same tiles, all of them, and come to an end.
"""

import ctypes
import re
import shutil
import subprocess
from itertools import permutations
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parent
PAIR = TESTS.parent / "csrc/moe/pair"

# Consumers take a stage when it has been loaded. A loader may fill stage n once all consumers of both CTAs have left
# n - kStages; tokens of more than one box come from both CTAs' loaders, those of one box from the first CTA's alone.
MODEL = """
struct C {
  static constexpr int Stages = STAGES, kStages = Stages, kInfos = INFOS, kTileBlocks = 2;
};
static int left[2];  // stages that a CTA's consumers have left

void consume(const PairShared& s, int rank, int k_blocks, bool one_box) {
  Ring<C::kInfos> infos;
  while (true) {
    ptx::mbarrier_wait(s.info_full + infos.at * 8, infos.parity);
    if (infos_of[rank][infos.at].expert < 0) break;
    for (int kb = 0; kb < k_blocks; ++kb) {
      wait_until([=] {
        const auto loaded = [&](int cta) { return left[rank] < int(published[cta].size()) * k_blocks; };
        const bool free = left[rank] < std::min(left[0], left[1]) + C::kStages;
        return free && loaded(rank) && loaded(0) && (one_box || loaded(1));
      });
      ++left[rank];
    }
    wait_until([] { return true; });  // the epilogue
    ptx::mbarrier_arrive(s.info_empty + infos.at * 8);
    infos.next();
  }
}

// 0, or 1: not all came to an end, 2: the CTAs ran other tiles than they should.
extern "C" int run(int tiles, int column_tiles, int k_blocks, int one_box, const int* order, int seed) {
  std::mt19937 random(seed);
  int next_tile = 0;
  const PairShared s;
  const GemmParams p = {&p, &next_tile, column_tiles};
  actors = std::vector<Actor>(4);
  for (int rank = 0; rank < 2; ++rank) {
    memory[rank].clear(), barriers[rank].clear(), published[rank].clear(), left[rank] = 0;
    actors[rank].rank = actors[2 + rank].rank = rank;
    actors[rank].body = [&, rank] { publish_pairs<C, Stage::kDown>(p, s, 0, rank, Tiles{tiles}); };
    actors[2 + rank].body = [&, rank] { consume(s, rank, k_blocks, one_box); };
  }
  if (!run_all(order ? std::vector<int>(order, order + 4) : std::vector<int>(), random)) return 1;
  std::vector<int> all;
  for (int t = 0; t < tiles * column_tiles; ++t) all.push_back(t / column_tiles * 1000 + t % column_tiles);
  return published[0] == all && published[1] == all ? 0 : 2;
}
"""


def found(pattern: str, path: Path) -> str:
    match = re.search(pattern, path.read_text(), re.DOTALL | re.MULTILINE)
    assert match, f"{pattern} in {path}"
    return match[1]


STAGES = int(found(r"PairConfig<F, Widths<.*?>, (\d+), \d+>", PAIR.parent / "tiles/tile_f8_256x256.cu"))


def compiled(directory: Path):
    """The model with the kernel's schedulers."""
    if shutil.which("g++") is None:
        pytest.skip("no g++")
    tile = PAIR / "pair_tile.cuh"
    model = MODEL.replace("STAGES", str(STAGES))
    model = model.replace("INFOS", found(r"constexpr int kInfos = (\d+);", tile))
    ring = found(r"(^template <int N>\nstruct Ring .*?^};)", PAIR.parent / "tile.cuh")
    template = r"(^template <typename C, Stage S, typename Tiles>\n[^\n]* void publish_pairs.*?^})"
    schedulers = found(template, PAIR / "pair_producer.cuh")
    structure, rest = model.split("static int left")
    source = "\n".join(['#include "host_cluster.h"', ring, structure, schedulers, "static int left" + rest])
    (directory / "pair.cpp").write_text(source)
    library = directory / "pair.so"
    command = ["g++", "-std=c++20", "-O1", "-shared", "-fPIC", f"-I{TESTS}", "-o", library, directory / "pair.cpp"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    run = ctypes.CDLL(str(library)).run

    def outcomes(k_blocks: int, one_box: bool, sizes: tuple = ((0, 3), (1, 1), (5, 1), (7, 4))) -> set[int]:
        """Of every order of precedence of the two schedulers and the two CTAs' consumers, and of some random ones.
        sizes: token tiles and column tiles."""
        orders = [(ctypes.c_int * 4)(*order) for order in permutations(range(4))]
        cases = [(order, 0) for order in orders] + [(None, seed) for seed in range(40)]
        return {run(*size, k_blocks, int(one_box), order, seed) for size in sizes for order, seed in cases}

    return outcomes


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    return compiled(tmp_path_factory.mktemp("pair"))


@pytest.mark.parametrize("one_box", [True, False])
@pytest.mark.parametrize("k_blocks", [STAGES + 1, STAGES + 2, 9])
def test_both_ctas_run_all_tiles(outcomes, k_blocks, one_box):
    assert outcomes(k_blocks, one_box) == {0}


@pytest.mark.parametrize("k_blocks", range(1, STAGES + 1))
def test_where_k_is_short_a_cluster_may_run_one_tile_only(outcomes, k_blocks):
    """A first CTA that is tiles ahead, which only tiles of one box and few blocks of K allow, writes over a number that
    the second has not read: launch_gemm (csrc/moe/tile_instance.cuh) launches a cluster a tile there."""
    assert outcomes(k_blocks, True) != {0}
    assert outcomes(k_blocks, True, ((0, 3), (1, 1))) == {0}
    assert "if (p.k_blocks <= C::kStages) at_once = most_tiles;" in (PAIR.parent / "tile_instance.cuh").read_text()
