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

namespace {

GemmParams params_of(const Experts& e, const ExpertRows& r, Stage stage, const Tile& tile) {
  const bool up = stage == Stage::kUp;
  const Projection& w = up ? e.up : e.down;
  const int64_t in = up ? e.hidden : e.intermediate, out = up ? e.intermediate : e.hidden, k_blocks = blocks(in, kBlockK);
  GemmParams g = {};
  g.packed = w.packed;
  g.row_scale = w.row_scale;
  g.bias = w.bias;
  g.x = up ? r.x : r.h;
  g.out = up ? r.h : r.out;
  if (r.lists) {
    g.tiles = r.tiles[int(stage)];
    g.tile_count = &r.lists->tiles[int(stage)];
    g.next_tile = &r.lists->next[int(stage)];
  } else if (!up) {
    g.next_tile = r.few.next_down;
  }
  g.few = r.few;
  g.list_is_new = up && r.lists_are_new;
  g.slots = r.slots;
  g.row_weight = up ? r.weight_on_input : r.weight_on_output;
  g.row_blocks = int(blocks(up ? e.up_rows() : e.hidden, kBlockRows));
  g.k_blocks = int(k_blocks);
  g.x_columns = g.x_stride = int(e.fp8() ? k_blocks * kBlockK : in);
  g.out_columns = g.out_stride = int(out);
  g.top_k = int(r.top_k);
  g.column_tiles = int(blocks(g.row_blocks, tile.blocks));
  // A weight tile is read once a token tile: worth keeping in L2 only where an expert has several.
  g.evict_first = r.used <= e.experts * tile.widths.max();
  g.activation = e.activation;
  g.alpha = e.alpha;
  g.beta = e.beta;
  g.limit = e.limit;
  if (e.fp8()) {
    g.x_scale = up ? r.x_scale : r.h_scale;
    g.out_scale = r.h_scale;
    g.scale_stride = int(r.rows);
  }
  return g;
}

}  // namespace

void launch_experts(const Experts& e, const ExpertRows& r, cudaStream_t stream) {
  for (const Stage stage : {Stage::kUp, Stage::kDown}) {
    const Tile& tile = tile_for(e.format, stage == Stage::kUp ? e.tile_up : e.tile_down);
    const GemmParams g = params_of(e, r, stage, tile);
    tile.launch(e.format, e.dtype, stage, g, r.rows, most_token_tiles(tile.widths.max(), r.rows, e.experts) * g.column_tiles, stream);
  }
}

void launch_fused(const Experts& e, const ExpertRows& r, const FusedRows& f, cudaStream_t stream) {
  const Tile& tile = tile_for(e.format, e.tile_up);
  FusedParams p = {};
  for (const Stage stage : {Stage::kUp, Stage::kDown}) p.gemm[int(stage)] = params_of(e, r, stage, tile);
  p.few = f.few;
  p.next = f.next;
  p.ready = f.ready;
  const int64_t columns = p.gemm[0].column_tiles + p.gemm[1].column_tiles;
  tile.launch_fused(e.format, e.dtype, p, r.rows, most_token_tiles(tile.widths.max(), r.rows, e.experts) * columns, stream);
}

}  // namespace vllm_humming
