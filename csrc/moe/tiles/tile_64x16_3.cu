// SPDX-License-Identifier: Apache-2.0
#include "../tile_instance.cuh"

namespace vllm_humming {
// Warpgroups, blocks a warpgroup, token widths, stages, CTAs an SM, producer warps, widest by mma.sync, tokens of the up GEMM.
template <Format F>
using Config_64x16_3 = TileConfig<F, 1, 1, Widths<8, 16>, F == Format::kMxfp4 ? 8 : 7, 3, 3, 16, Tokens::kGather>;
extern const Tile tile_64x16_3 = TileInstance<Config_64x16_3, Path::kA16>::tile();
}  // namespace vllm_humming
