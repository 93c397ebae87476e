// SPDX-License-Identifier: Apache-2.0
#include "../tile_instance.cuh"

namespace vllm_humming {
// Warpgroups, blocks a warpgroup, token widths, stages, CTAs an SM, producer warps, widest by mma.sync, tokens of the up GEMM, warpgroups that
// split K, chunks of K a stage.
template <Format F>
using Config_128x16_k2 = TileConfig<F, 4, 1, Widths<8, 16>, F == Format::kMxfp4 ? 4 : 3, 1, 4, 16, Tokens::kGather, 2, 4>;
extern const Tile tile_128x16_k2 = TileInstance<Config_128x16_k2, Path::kA16>::tile();
}  // namespace vllm_humming
