// SPDX-License-Identifier: Apache-2.0
// Carves the workspace and launches routing, sorting copy or quantisation, up GEMM, down GEMM and reduction. Nothing here allocates or synchronises.
#include <algorithm>
#include "../mma/chunk.h"
#include "../ptx/ptx.cuh"
#include "layer.h"

namespace vllm_humming {
namespace {

constexpr int64_t kAlign = 256;
int64_t aligned(int64_t bytes) { return (bytes + kAlign - 1) / kAlign * kAlign; }
int64_t blocks(int64_t n, int64_t size) { return (n + size - 1) / size; }

// h [entries, intermediate], then (FP8) the scales of h and of the sorted tokens, and y [entries, hidden], which the sorted tokens share.
struct Workspace {
  int64_t h, h_scale, x_scale, y, slots, row_weight, counts, block_base, lists, tiles[2], bytes;

  explicit Workspace(const LayerShape& s) {
    const int64_t tokens = std::min(s.tokens, kChunkTokens), entries = tokens * s.top_k;
    const int64_t tiles_most = std::min(entries, s.experts + entries / kLeastWidest) + 1;
    int64_t at = 0;
    auto take = [&](int64_t size) { const int64_t offset = at; at += aligned(size); return offset; };
    h = take(entries * s.intermediate * (s.fp8 ? 1 : 2));
    h_scale = take(s.fp8 ? blocks(s.intermediate, kBlockK) * entries * 4 : 0);
    x_scale = take(s.fp8 ? blocks(s.hidden, kBlockK) * entries * 4 : 0);
    y = take(entries * std::max(s.hidden * 2, s.fp8 ? blocks(s.hidden, kBlockK) * kBlockK : 0));
    slots = take(entries * 4);
    row_weight = take(entries * 4);
    counts = take((s.experts + 1) * 4);
    block_base = take(route_blocks(entries) * s.experts * 4);
    lists = take(sizeof(TileLists));
    for (auto& t : tiles) t = take(tiles_most * sizeof(TokenTile));
    bytes = at;
  }
};

const Tile& tile_for(Format format, int64_t index) {
  const Tile& tile = tile_at(index);
  if (tile.path != path_of(format))
    throw std::runtime_error("vllm_humming: tile " + std::to_string(index) + " is not compiled for weight_format " + std::to_string(int(format)));
  return tile;
}

// Most token tiles that `entries` routed rows can form.
int64_t most_token_tiles(const Tile& tile, int64_t entries, int64_t experts) {
  return std::min(entries, std::min(experts, entries) + entries / tile.widths.max());
}

void run_chunk(const LayerArgs& a, const Workspace& ws, int64_t first, int64_t tokens, cudaStream_t stream) {
  const LayerShape& s = a.shape;
  const int64_t entries = tokens * s.top_k;
  const Tile &up = tile_for(a.format, a.tile_up), &down = tile_for(a.format, a.tile_down);
  uint8_t* w = a.workspace;
  const int* ids = a.topk_ids + first * s.top_k;
  const int element = 2;

  RouteParams route = {};
  route.topk_ids = ids;
  route.topk_weights = a.topk_weights + first * s.top_k;
  route.expert_map = a.expert_map;
  route.entries = int(entries);
  route.top_k = int(s.top_k);
  route.global_experts = int(s.global_experts);
  route.local_experts = int(s.experts);
  route.slots = reinterpret_cast<int*>(w + ws.slots);
  route.row_weight = reinterpret_cast<float*>(w + ws.row_weight);
  route.counts = reinterpret_cast<int*>(w + ws.counts);
  route.block_base = reinterpret_cast<int*>(w + ws.block_base);
  route.lists = reinterpret_cast<TileLists*>(w + ws.lists);
  for (int i = 0; i < 2; ++i) {
    route.tiles[i] = reinterpret_cast<TokenTile*>(w + ws.tiles[i]);
    route.widths[i] = (i ? down : up).widths;
  }
  const bool sorts = !s.fp8 && up.sorted_tokens && sorting_makes_rows(entries, s.hidden);
  if (sorts) launch_tile_lists(route, stream);
  else launch_route(route, stream);
  // The sorted tokens live where y will: the up GEMM is done with them before the down GEMM writes.
  const void* x = static_cast<const uint8_t*>(a.x) + first * s.hidden * element;
  if (s.fp8) {
    QuantizeParams q = {};
    q.x = x;
    q.out = w + ws.y;
    q.scale = reinterpret_cast<float*>(w + ws.x_scale);
    q.slots = route.slots;
    q.rows_end = &route.lists->rows;
    q.rows = int(entries);
    q.top_k = int(s.top_k);
    q.columns = int(s.hidden);
    q.scale_stride = int(entries);
    launch_quantize(a.dtype, q, stream);
    x = w + ws.y;
  } else if (up.sorted_tokens) {
    if (sorts) launch_sort(x, w + ws.y, route, s.hidden, stream);
    else launch_permute(x, w + ws.y, route, s.hidden, stream);
    x = w + ws.y;
  }

  GemmParams g = {};
  g.packed = a.up.packed;
  g.row_scale = a.up.row_scale;
  g.bias = a.up.bias;
  g.x = x;
  g.out = w + ws.h;
  g.tiles = route.tiles[0];
  g.tile_count = &route.lists->tiles[0];
  g.next_tile = &route.lists->next[0];
  g.slots = route.slots;
  g.row_weight = a.router_weight_on_input ? route.row_weight : nullptr;
  g.row_blocks = int(s.intermediate * (s.gated ? 2 : 1) / kBlockRows);
  g.k_blocks = int(blocks(s.hidden, kBlockK));
  g.x_columns = g.x_stride = s.fp8 ? g.k_blocks * kBlockK : int(s.hidden);
  g.out_columns = g.out_stride = int(s.intermediate);
  g.top_k = int(s.top_k);
  g.column_tiles = int(blocks(g.row_blocks, up.blocks));
  // A weight tile is read once a token tile: worth keeping in L2 only where an expert has several.
  const int64_t local_entries = entries * s.experts / std::max(s.experts, s.global_experts);  // about, under expert parallelism
  g.evict_first = local_entries <= s.experts * up.widths.max();
  g.activation = a.activation;
  g.alpha = a.alpha;
  g.beta = a.beta;
  g.limit = a.limit;
  if (s.fp8) {
    g.x_scale = reinterpret_cast<float*>(w + ws.x_scale);
    g.out_scale = reinterpret_cast<float*>(w + ws.h_scale);
    g.scale_stride = int(entries);
  }
  up.launch(a.format, a.dtype, Stage::kUp, g, entries, most_token_tiles(up, entries, s.experts) * g.column_tiles, stream);

  g.packed = a.down.packed;
  g.row_scale = a.down.row_scale;
  g.bias = a.down.bias;
  g.x = w + ws.h;
  g.x_scale = g.out_scale;
  g.out = w + ws.y;
  g.tiles = route.tiles[1];
  g.tile_count = &route.lists->tiles[1];
  g.next_tile = &route.lists->next[1];
  g.row_weight = a.router_weight_on_input ? nullptr : route.row_weight;
  g.row_blocks = int(blocks(s.hidden, kBlockRows));
  g.k_blocks = int(s.intermediate / kBlockK);
  g.x_columns = g.x_stride = int(s.intermediate);
  g.out_columns = g.out_stride = int(s.hidden);
  g.column_tiles = int(blocks(g.row_blocks, down.blocks));
  g.evict_first = local_entries <= s.experts * down.widths.max();
  down.launch(a.format, a.dtype, Stage::kDown, g, entries, most_token_tiles(down, entries, s.experts) * g.column_tiles, stream);

  ReduceParams r = {};
  r.y = w + ws.y;
  r.out = static_cast<uint8_t*>(a.out) + first * s.hidden * element;
  r.topk_ids = ids;
  r.expert_map = a.expert_map;
  r.tokens = int(tokens);
  r.top_k = int(s.top_k);
  r.columns = int(s.hidden);
  r.global_experts = int(s.global_experts);
  r.local_experts = int(s.experts);
  launch_reduce(a.dtype, r, stream);
}

__global__ void plain_tiles(TokenTile* tiles, TileLists* lists, int tokens, WidthList widths) {
  const int max_width = widths.max();
  const int total = (tokens + max_width - 1) / max_width;
  for (int i = threadIdx.x; i < total; i += blockDim.x) {
    const int rows = min(max_width, tokens - i * max_width);
    int width = 0;
    while (widths.at[width] < rows) ++width;
    tiles[i] = TokenTile{0, i * max_width, rows, widths.at[width]};
  }
  if (threadIdx.x == 0) {
    lists->tiles[0] = total;
    lists->next[0] = 0;
  }
}

// The down stage reads its tile list before it waits for the kernel ahead: that kernel must then be a later one than the list's.
__global__ void settle(int) { ptx::grid_dependency_wait(); }

}  // namespace

int64_t workspace_bytes(const LayerShape& shape) { return Workspace(shape).bytes; }

void run_layer(const LayerArgs& a, cudaStream_t stream) {
  const Workspace ws(a.shape);
  for (int64_t first = 0; first < a.shape.tokens; first += kChunkTokens)
    run_chunk(a, ws, first, std::min(kChunkTokens, a.shape.tokens - first), stream);
}

// Lists, then token tiles, then (FP8) scales and the quantised tokens.
constexpr int64_t kPlainTileBytes = (1 << 20) - kAlign;

int64_t plain_scratch_bytes(Format format, int64_t tokens, int64_t k) {
  const int64_t fp8 = aligned(blocks(k, kBlockK) * tokens * 4) + blocks(k, kBlockK) * kBlockK * tokens;
  return kAlign + kPlainTileBytes + (fp8_tokens(format) ? fp8 : 0);
}

void run_plain(Format format, DType dtype, const void* x, const Projection& w, void* out, int64_t tokens, int64_t k, int64_t k_blocks, int64_t out_features,
               int64_t row_blocks, int64_t tile_index, uint8_t* scratch, cudaStream_t stream) {
  const Tile& tile = tile_for(format, tile_index);
  GemmParams g = {};
  g.packed = w.packed;
  g.row_scale = w.row_scale;
  g.bias = w.bias;
  g.x = x;
  g.out = out;
  TileLists* lists = reinterpret_cast<TileLists*>(scratch);
  g.tile_count = &lists->tiles[0];
  g.next_tile = &lists->next[0];
  g.tiles = reinterpret_cast<TokenTile*>(scratch + kAlign);
  g.row_blocks = int(row_blocks);
  g.k_blocks = int(k_blocks);
  g.x_columns = g.x_stride = int(k);
  g.out_columns = g.out_stride = int(out_features);
  g.top_k = 1;
  g.column_tiles = int(blocks(row_blocks, tile.blocks));
  const int64_t token_tiles = blocks(tokens, tile.widths.max());
  if (token_tiles * int64_t(sizeof(TokenTile)) > kPlainTileBytes) throw std::runtime_error("vllm_humming: too many tokens for gemm_plain");
  if (fp8_tokens(format)) {
    QuantizeParams q = {};
    q.x = x;
    q.scale = reinterpret_cast<float*>(scratch + kAlign + kPlainTileBytes);
    q.scale_stride = int(tokens);
    q.out = scratch + kAlign + kPlainTileBytes + aligned(blocks(k, kBlockK) * q.scale_stride * 4);
    q.rows = int(tokens);
    q.columns = int(k);
    launch_quantize(dtype, q, stream);
    g.x = q.out;
    g.x_columns = g.x_stride = int(blocks(k, kBlockK) * kBlockK);
    g.x_scale = q.scale;
    g.scale_stride = q.scale_stride;
  }
  plain_tiles<<<1, 256, 0, stream>>>(reinterpret_cast<TokenTile*>(scratch + kAlign), lists, int(tokens), tile.widths);
  check(cudaGetLastError(), "launch plain_tiles");
  launch(settle, 1, 1, 0, stream, 0);
  tile.launch(format, dtype, Stage::kDown, g, tokens, token_tiles * g.column_tiles, stream);
}

}  // namespace vllm_humming
