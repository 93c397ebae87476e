// SPDX-License-Identifier: Apache-2.0
#include "../tile_instance.cuh"

namespace vllm_humming {
// Warpgroups, blocks a warpgroup, token widths, stages, CTAs an SM, producer warps, widest by mma.sync, tokens of the up GEMM.
template <Format F>
using Config_128x48 = TileConfig<F, 1, 2, Widths<16, 32, 40, 48>, 3, 3, 4, 16, Tokens::kSorted>;
extern const Tile tile_128x48 = TileInstance<Config_128x48, Path::kA16>::tile();
}  // namespace vllm_humming
