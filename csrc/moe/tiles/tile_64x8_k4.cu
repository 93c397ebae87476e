// SPDX-License-Identifier: Apache-2.0
#include "../tile_instance.cuh"

namespace vllm_humming {
// Warpgroups, blocks a warpgroup, token widths, stages, CTAs an SM, producer warps, widest by mma.sync, tokens of the up GEMM, warpgroups that
// split K, chunks of K a stage.
template <Format F>
using Config_64x8_k4 = TileConfig<F, 4, 1, Widths<8>, 4, 1, 4, 8, Tokens::kGather, 4, 8>;
extern const Tile tile_64x8_k4 = TileInstance<Config_64x8_k4, Path::kA16>::tile();
}  // namespace vllm_humming
