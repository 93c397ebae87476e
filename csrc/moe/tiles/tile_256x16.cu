// SPDX-License-Identifier: Apache-2.0
#include "../tile_instance.cuh"

namespace vllm_humming {
// Warpgroups, blocks a warpgroup, token widths, stages, CTAs an SM, producer warps, widest by mma.sync, tokens of the up GEMM.
template <Format F>
using Config_256x16 = TileConfig<F, 2, 2, Widths<8, 16>, 4, 2, 4, 16, Tokens::kSorted>;
extern const Tile tile_256x16 = TileInstance<Config_256x16, Path::kA16>::tile();
}  // namespace vllm_humming
