// SPDX-License-Identifier: Apache-2.0
#include "experts.h"
#include <algorithm>

namespace vllm_humming {

int64_t most_token_tiles(int64_t widest, int64_t rows, int64_t experts) { return std::min(rows, std::min(experts, rows) + rows / widest); }

const Tile& tile_for(Format format, int64_t index) {
  const Tile& tile = tile_at(index);
  if (tile.path != path_of(format))
    throw std::runtime_error("vllm_humming: tile " + std::to_string(index) + " is not compiled for weight_format " + std::to_string(int(format)));
  return tile;
}

void launch_experts(const Experts& e, const ExpertRows& r, cudaStream_t stream) {
  const Tile &up = tile_for(e.format, e.tile_up), &down = tile_for(e.format, e.tile_down);
  GemmParams g = {};
  g.packed = e.up.packed;
  g.row_scale = e.up.row_scale;
  g.bias = e.up.bias;
  g.x = r.x;
  g.out = r.h;
  g.few = r.few;
  if (r.lists) {
    g.tiles = r.tiles[0];
    g.tile_count = &r.lists->tiles[0];
    g.next_tile = &r.lists->next[0];
  }
  g.list_is_new = r.lists_are_new;
  g.slots = r.slots;
  g.row_weight = r.weight_on_input;
  g.row_blocks = int(e.up_rows() / kBlockRows);
  g.k_blocks = int(blocks(e.hidden, kBlockK));
  g.x_columns = g.x_stride = e.fp8() ? g.k_blocks * kBlockK : int(e.hidden);
  g.out_columns = g.out_stride = int(e.intermediate);
  g.top_k = int(r.top_k);
  g.column_tiles = int(blocks(g.row_blocks, up.blocks));
  // A weight tile is read once a token tile: worth keeping in L2 only where an expert has several.
  g.evict_first = r.used <= e.experts * up.widths.max();
  g.activation = e.activation;
  g.alpha = e.alpha;
  g.beta = e.beta;
  g.limit = e.limit;
  if (e.fp8()) {
    g.x_scale = r.x_scale;
    g.out_scale = r.h_scale;
    g.scale_stride = int(r.rows);
  }
  up.launch(e.format, e.dtype, Stage::kUp, g, r.rows, most_token_tiles(up.widths.max(), r.rows, e.experts) * g.column_tiles, stream);

  g.packed = e.down.packed;
  g.row_scale = e.down.row_scale;
  g.bias = e.down.bias;
  g.x = r.h;
  g.x_scale = g.out_scale;
  g.out = r.out;
  if (r.lists) {
    g.tiles = r.tiles[1];
    g.tile_count = &r.lists->tiles[1];
    g.next_tile = &r.lists->next[1];
  } else {
    g.next_tile = r.few.next_down;
  }
  g.list_is_new = false;
  g.row_weight = r.weight_on_output;
  g.row_blocks = int(blocks(e.hidden, kBlockRows));
  g.k_blocks = int(e.intermediate / kBlockK);
  g.x_columns = g.x_stride = int(e.intermediate);
  g.out_columns = g.out_stride = int(e.hidden);
  g.column_tiles = int(blocks(g.row_blocks, down.blocks));
  g.evict_first = r.used <= e.experts * down.widths.max();
  down.launch(e.format, e.dtype, Stage::kDown, g, r.rows, most_token_tiles(down.widths.max(), r.rows, e.experts) * g.column_tiles, stream);
}

}  // namespace vllm_humming
