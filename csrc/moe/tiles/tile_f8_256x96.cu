// SPDX-License-Identifier: Apache-2.0
#include "../tile_instance.cuh"

namespace vllm_humming {
// Warpgroups, blocks a warpgroup, token widths, stages, CTAs an SM, producer warps, widest by mma.sync, tokens of the up GEMM.
template <Format F>
using Config_f8_256x96 = TileConfig<F, 2, 2, Widths<48, 64, 80, 96>, 6, 1, 4, 0, Tokens::kSorted>;
extern const Tile tile_f8_256x96 = TileInstance<Config_f8_256x96, Path::kFp8>::tile();
}  // namespace vllm_humming
