// SPDX-License-Identifier: Apache-2.0
#include "../tile_instance.cuh"

namespace vllm_humming {
// Warpgroups, blocks a warpgroup, token widths, stages, CTAs an SM, producer warps, widest by mma.sync, tokens of the up GEMM.
template <Format F>
using Config_64x32 = TileConfig<F, 1, 1, Widths<8, 16, 24, 32>, 5, 3, 3, 32, Tokens::kGather>;
extern const Tile tile_64x32 = TileInstance<Config_64x32, Path::kA16>::tile();
}  // namespace vllm_humming
