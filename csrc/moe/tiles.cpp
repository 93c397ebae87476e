// SPDX-License-Identifier: Apache-2.0
// The compiled tiles, in the order that vllm_humming/moe/schedule.py names them.
#include "launch.h"

namespace vllm_humming {

extern const Tile tile_64x16, tile_64x32, tile_128x48, tile_128x64, tile_128x96, tile_256x128, tile_256x160, tile_f8_256x16, tile_f8_256x64,
    tile_f8_256x96, tile_f8_256x256;

static const Tile* const kTiles[] = {&tile_64x16,   &tile_64x32,   &tile_128x48,    &tile_128x64,    &tile_128x96,    &tile_256x128,
                                     &tile_256x160, &tile_f8_256x16, &tile_f8_256x64, &tile_f8_256x96, &tile_f8_256x256};

int64_t tile_total() { return sizeof(kTiles) / sizeof(kTiles[0]); }

const Tile& tile_at(int64_t index) {
  if (index < 0 || index >= tile_total())
    throw std::out_of_range("vllm_humming: no compiled tile " + std::to_string(index) + "; there are " + std::to_string(tile_total()));
  return *kTiles[index];
}

}  // namespace vllm_humming
