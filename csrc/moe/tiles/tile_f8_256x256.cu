// SPDX-License-Identifier: Apache-2.0
#include "../tile_instance.cuh"

namespace vllm_humming {
// Token widths, stages, buffers of decoded weights.
template <Format F>
using Config_f8_256x256 = PairConfig<F, Widths<64, 128, 192, 256>, 4, 2>;
extern const Tile tile_f8_256x256 = TileInstance<Config_f8_256x256, Path::kFp8>::tile();
}  // namespace vllm_humming
