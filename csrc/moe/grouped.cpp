// SPDX-License-Identifier: Apache-2.0
// Launches for tokens in groups: tile lists where there are groups, quantisation or sorting copy where the tile needs one, the GEMMs. Nothing
// here allocates or synchronises.
#include "grouped.h"
#include <algorithm>

namespace vllm_humming {
namespace {

int64_t fp8_bytes(int64_t rows, int64_t k) { return rows * blocks(k, kBlockK) * kBlockK; }
int64_t scale_bytes(int64_t rows, int64_t k) { return rows * blocks(k, kBlockK) * 4; }

// Tile lists, then the tokens as the GEMM reads them where those are not the caller's.
struct GroupedWorkspace {
  int64_t lists, tiles, x_scale, x, bytes;
  GroupedWorkspace(int64_t rows, int64_t experts, int64_t k, bool fp8, bool indexed) {
    Carver ws;
    lists = ws.take(sizeof(TileLists));
    tiles = ws.take(most_token_tiles(kLeastWidest, rows, experts) * sizeof(TokenTile));
    x_scale = ws.take(fp8 ? scale_bytes(rows, k) : 0);
    x = ws.take(fp8 ? fp8_bytes(rows, k) : indexed ? rows * k * 2 : 0);
    bytes = ws.at;
  }
};

// The same for both GEMMs of a layer, and what lies between them.
struct BatchedWorkspace {
  int64_t lists, tiles[2], x_scale, x, h_scale, h, bytes;
  BatchedWorkspace(int64_t rows, int64_t experts, int64_t hidden, int64_t intermediate, bool fp8) {
    Carver ws;
    lists = ws.take(sizeof(TileLists));
    for (auto& t : tiles) t = ws.take(most_token_tiles(kLeastWidest, rows, experts) * sizeof(TokenTile));
    x_scale = ws.take(fp8 ? scale_bytes(rows, hidden) : 0);
    x = ws.take(fp8 ? fp8_bytes(rows, hidden) : 0);
    h_scale = ws.take(fp8 ? scale_bytes(rows, intermediate) : 0);
    h = ws.take(rows * intermediate * (fp8 ? 1 : 2));
    bytes = ws.at;
  }
};

// The caller's tokens as e4m3 rows. rows_each: tokens of an expert (kMasked), else of all.
void quantize(const GroupedTokens& tokens, const RowList& list, const int* counts, int64_t rows_each, int64_t columns, void* out, float* scale,
              cudaStream_t stream) {
  QuantizeParams q = {};
  q.x = tokens.x;
  q.out = out;
  q.scale = scale;
  q.list = list;
  q.counts = counts;
  q.columns = int(columns);
  q.scale_stride = list.rows;
  q.x_scale = tokens.x_scale;
  std::copy_n(tokens.x_scale_strides, 3, q.x_scale_strides);
  q.rows_each = int(rows_each);
  launch_quantize(tokens.type, q, stream);
}

}  // namespace

int64_t grouped_workspace_bytes(int64_t rows, int64_t experts, int64_t k, bool fp8, bool indexed) {
  return GroupedWorkspace(rows, experts, k, fp8, indexed).bytes;
}

int64_t batched_workspace_bytes(int64_t rows_each, int64_t experts, int64_t hidden, int64_t intermediate, bool fp8) {
  return BatchedWorkspace(rows_each * experts, experts, hidden, intermediate, fp8).bytes;
}

void run_grouped(const GroupedArgs& a, cudaStream_t stream) {
  const Tile& tile = tile_for(a.format, a.tile);
  const bool fp8 = fp8_tokens(a.format), indexed = a.layout == Layout::kIndexed, masked = a.layout == Layout::kMasked;
  // The up GEMM's kernels gather tokens by a row list, where the tile does that; all others read rows that lie together.
  const bool gathers = indexed && !fp8 && !tile.sorted_tokens && a.tokens_total * a.k < kMostGathered;
  const GroupedWorkspace ws(a.rows, a.experts, a.k, fp8, indexed);
  uint8_t* w = a.workspace;
  GemmParams g = {};
  g.packed = a.weights.packed;
  g.row_scale = a.weights.row_scale;
  g.bias = a.weights.bias;
  g.x = a.tokens.x;
  g.out = a.out;
  g.row_blocks = int(a.row_blocks);
  g.k_blocks = int(a.k_blocks);
  g.x_columns = g.x_stride = int(a.k);
  g.out_columns = g.out_stride = int(a.n);
  g.top_k = 1;
  g.column_tiles = int(blocks(a.n, tile.blocks * kBlockRows));
  g.evict_first = a.rows <= a.experts * tile.widths.max();
  g.activation = Activation::kNone;
  g.rows = int(a.rows);
  g.cut = tile.widths.cut(g.rows);
  int64_t token_tiles = blocks(a.rows, tile.widths.max());
  if (a.groups) {
    GroupParams lists = {};
    lists.lists = reinterpret_cast<TileLists*>(w + ws.lists);
    lists.tiles[0] = reinterpret_cast<TokenTile*>(w + ws.tiles);
    lists.widths[0] = tile.widths;
    lists.groups = a.groups;
    lists.experts = int(a.experts);
    lists.rows = int(a.rows);
    lists.rows_each = masked ? int(a.rows_each) : 0;
    lists.gemms = 1;
    launch_group_tiles(lists, stream);
    g.tiles = lists.tiles[0];
    g.tile_count = &lists.lists->tiles[0];
    g.next_tile = &lists.lists->next[0];
    g.list_is_new = true;
    token_tiles = most_token_tiles(tile.widths.max(), a.rows, a.experts);
  }
  const bool offsets = a.groups && !masked;
  const RowList list = {a.row_tokens, offsets ? a.groups : nullptr, offsets ? a.groups + a.experts : nullptr, int(a.rows), 1};
  if (fp8) {
    float* scale = reinterpret_cast<float*>(w + ws.x_scale);
    quantize(a.tokens, list, masked ? a.groups : nullptr, masked ? a.rows_each : a.tokens_total, a.k, w + ws.x, scale, stream);
    g.x = w + ws.x;
    g.x_columns = g.x_stride = g.k_blocks * kBlockK;
    g.x_scale = scale;
    g.scale_stride = int(a.rows);
    g.list_is_new = false;
  } else if (gathers) {
    g.slots = a.row_tokens;
  } else if (indexed) {
    launch_permute(a.tokens.x, w + ws.x, list, a.k, stream);
    g.x = w + ws.x;
    g.list_is_new = false;
  }
  tile.launch(a.format, a.dtype, gathers ? Stage::kUp : Stage::kDown, g, a.rows, token_tiles * g.column_tiles, stream);
}

void run_batched(const BatchedArgs& a, cudaStream_t stream) {
  const Experts& e = a.experts;
  const int64_t rows = e.experts * a.rows_each;
  const BatchedWorkspace ws(rows, e.experts, e.hidden, e.intermediate, e.fp8());
  uint8_t* w = a.workspace;
  GroupParams lists = {};
  lists.lists = reinterpret_cast<TileLists*>(w + ws.lists);
  for (int i = 0; i < 2; ++i) {
    lists.tiles[i] = reinterpret_cast<TokenTile*>(w + ws.tiles[i]);
    lists.widths[i] = tile_for(e.format, i ? e.tile_down : e.tile_up).widths;
  }
  lists.groups = a.counts;
  lists.experts = int(e.experts);
  lists.rows = int(rows);
  lists.rows_each = int(a.rows_each);
  lists.gemms = 2;
  launch_group_tiles(lists, stream);

  ExpertRows r = {};
  r.rows = r.used = rows;
  r.x = a.tokens.x;
  r.h = w + ws.h;
  r.out = a.out;
  r.top_k = 1;
  r.lists = lists.lists;
  for (int i = 0; i < 2; ++i) r.tiles[i] = lists.tiles[i];
  r.lists_are_new = !e.fp8();
  if (e.fp8()) {
    float* scale = reinterpret_cast<float*>(w + ws.x_scale);
    quantize(a.tokens, {nullptr, nullptr, nullptr, int(rows), 1}, a.counts, a.rows_each, e.hidden, w + ws.x, scale, stream);
    r.x = w + ws.x;
    r.x_scale = scale;
    r.h_scale = reinterpret_cast<float*>(w + ws.h_scale);
  }
  launch_experts(e, r, stream);
}

}  // namespace vllm_humming
