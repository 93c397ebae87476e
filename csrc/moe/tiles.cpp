// SPDX-License-Identifier: Apache-2.0
// The compiled tiles, in the order that vllm_humming/moe/schedule.py names them.
#include <algorithm>
#include <vector>
#include "launch.h"

namespace vllm_humming {

extern const Tile tile_64x16, tile_64x16_3, tile_128x48, tile_128x64, tile_128x96, tile_256x128, tile_256x160, tile_256x16, tile_128x16_k2,
    tile_64x8_k4, tile_f8_256x16, tile_f8_256x64, tile_f8_256x96, tile_f8_256x256;

// Cycles: schedule.py's, by width. What the cut of an expert's rows into tiles is chosen by.
struct Entry {
  const Tile* tile;
  int cycles[WidthList::kMost];
};
static const Entry kTiles[] = {
    {&tile_64x16, {255, 285}},
    {&tile_64x16_3, {264, 294}},
    {&tile_128x48, {268, 282, 296, 314}},
    {&tile_128x64, {283, 301, 324, 356}},
    {&tile_128x96, {359, 424, 472, 520}},
    {&tile_256x128, {344, 399, 479, 589}},
    {&tile_256x160, {404, 473, 581, 729}},
    {&tile_256x16, {222, 256}},
    {&tile_128x16_k2, {232, 266}},
    {&tile_64x8_k4, {245}},
    {&tile_f8_256x16, {188, 188}},
    {&tile_f8_256x64, {206, 236, 284, 367}},
    {&tile_f8_256x96, {295, 330, 350, 434}},
    {&tile_f8_256x256, {228, 285, 350, 415}},
};

int64_t tile_total() { return sizeof(kTiles) / sizeof(kTiles[0]); }

static std::vector<Tile> tiles_with_cuts() {
  std::vector<Tile> tiles;
  for (const Entry& entry : kTiles) {
    Tile& tile = tiles.emplace_back(*entry.tile);
    std::copy_n(entry.cycles, WidthList::kMost, tile.cycles);
    tile.widths.set_cycles(tile.cycles);
  }
  return tiles;
}

const Tile& tile_at(int64_t index) {
  static const std::vector<Tile> tiles = tiles_with_cuts();
  if (index < 0 || index >= tile_total())
    throw std::out_of_range("vllm_humming: no compiled tile " + std::to_string(index) + "; there are " + std::to_string(tile_total()));
  return tiles[index];
}

}  // namespace vllm_humming
