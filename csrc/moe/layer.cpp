// SPDX-License-Identifier: Apache-2.0
// Carves the workspace and launches routing, sorting copy or quantisation, up GEMM, down GEMM and reduction; of few entries no routing.
// Nothing here allocates or synchronises.
#include "layer.h"
#include <algorithm>

namespace vllm_humming {
namespace {

// h [entries, intermediate], then (FP8) the scales of h and of the sorted tokens, and y [entries, hidden], which the sorted tokens share, but where
// one kernel runs both GEMMs.
struct Workspace {
  int64_t h, h_scale, x_scale, y, slots, row_weight, row_of_slot, counts, block_base, lists, tiles[2], ready, most_tiles, sorted, bytes;

  Workspace(int64_t all_tokens, int64_t top_k, int64_t experts, int64_t hidden, int64_t intermediate, bool fp8) {
    const int64_t tokens = std::min(all_tokens, kChunkTokens), entries = tokens * top_k;
    const int64_t tiles_most = std::min(entries, experts + entries / kLeastWidest) + 1;
    Carver ws;
    h = ws.take(entries * intermediate * (fp8 ? 1 : 2));
    h_scale = ws.take(fp8 ? blocks(intermediate, kBlockK) * entries * 4 : 0);
    x_scale = ws.take(fp8 ? blocks(hidden, kBlockK) * entries * 4 : 0);
    y = ws.take(entries * std::max(hidden * 2, fp8 ? blocks(hidden, kBlockK) * kBlockK : 0));
    slots = ws.take(entries * 4);
    row_weight = ws.take(entries * 4);
    row_of_slot = ws.take(fp8 ? entries * 4 : 0);
    counts = ws.take((experts + 1) * 4);
    block_base = ws.take(route_blocks(entries) * experts * 4);
    lists = ws.take(sizeof(TileLists));
    for (auto& t : tiles) t = ws.take(tiles_most * sizeof(TokenTile));
    most_tiles = std::min(tiles_most, kMostFusedEntries + 1);
    ready = ws.take(most_tiles * 4);
    sorted = ws.take(fp8 ? 0 : std::min(entries, kMostFusedEntries) * hidden * 2);
    bytes = ws.at;
  }
};

constexpr int kElement = 2;  // bytes of an activation

// What both GEMMs run on, but for the lists: the chunk's tokens as they are, sorted ones where it says so later.
ExpertRows rows_of(const LayerArgs& a, const Workspace& ws, int64_t first, int64_t tokens, const float* weights) {
  const Experts& e = a.experts;
  ExpertRows r = {};
  r.rows = tokens * a.top_k;
  r.used = r.rows * e.experts / std::max(e.experts, a.global_experts);  // about, under expert parallelism
  r.x = static_cast<const uint8_t*>(a.x) + first * e.hidden * kElement;
  r.h = a.workspace + ws.h;
  r.out = a.workspace + ws.y;
  r.top_k = a.top_k;
  (a.router_weight_on_input ? r.weight_on_input : r.weight_on_output) = weights;
  return r;
}

void reduce(const LayerArgs& a, const Workspace& ws, int64_t first, int64_t tokens, FusedCounters<kMostFewEntries>* counters, cudaStream_t stream) {
  const Experts& e = a.experts;
  ReduceParams r = {};
  r.y = a.workspace + ws.y;
  r.out = static_cast<uint8_t*>(a.out) + first * e.hidden * kElement;
  r.topk_ids = a.topk_ids + first * a.top_k;
  r.expert_map = a.expert_map;
  r.tokens = int(tokens);
  r.top_k = int(a.top_k);
  r.columns = int(e.hidden);
  r.global_experts = int(a.global_experts);
  r.local_experts = int(e.experts);
  r.counters = counters;
  launch_reduce(e.dtype, r, stream);
}

// Whether both GEMMs run in one kernel: where the caller wants one tile for both that can.
bool fused(const LayerArgs& a) {
  const Experts& e = a.experts;
  return e.tile_up == e.tile_down && a.tokens * a.top_k <= kMostFusedEntries && tile_for(e.format, e.tile_up).launch_fused;
}

// Whether the GEMMs of few entries do without the routing.
//
// In one kernel: always. No kernel before it could zero its counters, so these are kept zero by the reduction of the layer that used them.
//
// In two kernels, where the caller wants two 64-row tiles: that saves the routing, about 2 us; but the up GEMM's tiles are then dealt, which costs
// more the more of them a CTA runs. Whole layers in us, with routing -> without, by most up tiles over CTAs at once (MXFP4, H200): 0.4 18.0 -> 15.5,
// 0.7 22.0 -> 19.9, 0.9 31.4 -> 29.5, 1.0 57.8 -> 56.6, 1.5 37.5 -> 33.4, 1.9 53.2 -> 51.5 and 42.7 -> 40.6; 2.9 65.8 -> 71.8 (and 48.1 -> 46.7), 3.7
// 65.3 -> 67.3.
bool routes_itself(const LayerArgs& a) {
  const Experts& e = a.experts;
  const Tile &up = tile_for(e.format, e.tile_up), &down = tile_for(e.format, e.tile_down);
  const int64_t entries = a.tokens * a.top_k;
  if (entries > kMostFewEntries) return false;
  if (fused(a)) return up.few_entries;
  const int64_t most_tiles = entries * blocks(e.up_rows(), up.blocks * kBlockRows), at_once = int64_t(up.ctas) * multiprocessors();
  return up.few_apart && down.few_apart && most_tiles <= 2 * at_once;
}

void run_few(const LayerArgs& a, const Workspace& ws, cudaStream_t stream) {
  const Experts& e = a.experts;
  ExpertRows r = rows_of(a, ws, 0, a.tokens, a.topk_weights);
  FewEntries few = {a.topk_ids, a.expert_map, int(r.rows), int(a.global_experts), int(e.experts)};
  FusedCounters<kMostFewEntries>* counters = nullptr;
  if (fused(a)) {
    counters = few_counters(stream);
    launch_fused(e, r, {few, &counters->next, counters->ready}, stream);
  } else {
    few.next_down = &reinterpret_cast<TileLists*>(a.workspace + ws.lists)->next[1];
    r.few = few;
    launch_experts(e, r, stream);
  }
  reduce(a, ws, 0, a.tokens, counters, stream);
}

void run_chunk(const LayerArgs& a, const Workspace& ws, int64_t first, int64_t tokens, cudaStream_t stream) {
  const Experts& e = a.experts;
  const int64_t entries = tokens * a.top_k;
  const Tile &up = tile_for(e.format, e.tile_up), &down = tile_for(e.format, e.tile_down);
  uint8_t* w = a.workspace;
  const int* ids = a.topk_ids + first * a.top_k;

  RouteParams route = {};
  route.topk_ids = ids;
  route.topk_weights = a.topk_weights + first * a.top_k;
  route.expert_map = a.expert_map;
  route.entries = int(entries);
  route.top_k = int(a.top_k);
  route.global_experts = int(a.global_experts);
  route.local_experts = int(e.experts);
  route.slots = reinterpret_cast<int*>(w + ws.slots);
  route.row_weight = reinterpret_cast<float*>(w + ws.row_weight);
  if (e.fp8()) route.row_of_slot = reinterpret_cast<int*>(w + ws.row_of_slot);
  route.counts = reinterpret_cast<int*>(w + ws.counts);
  route.block_base = reinterpret_cast<int*>(w + ws.block_base);
  route.lists = reinterpret_cast<TileLists*>(w + ws.lists);
  for (int i = 0; i < 2; ++i) {
    route.tiles[i] = reinterpret_cast<TokenTile*>(w + ws.tiles[i]);
    route.widths[i] = (i ? down : up).widths;
  }
  const bool fuse = fused(a);
  if (fuse) {
    route.ready = reinterpret_cast<int*>(w + ws.ready);
    route.most_tiles = int(ws.most_tiles);
  }
  const bool sorts = !e.fp8() && up.sorted_tokens && !(fuse && up.few_entries) && sorting_makes_rows(entries, e.hidden);
  if (sorts) launch_tile_lists(route, stream);
  else launch_route(route, stream);

  ExpertRows r = rows_of(a, ws, first, tokens, route.row_weight);
  r.slots = route.slots;
  r.lists = route.lists;
  for (int i = 0; i < 2; ++i) r.tiles[i] = route.tiles[i];
  // The sorted tokens live where y will, since the up GEMM is done with them before the down GEMM writes; but where one kernel runs both.
  const RowList list = {route.slots, nullptr, &route.lists->rows, int(entries), int(a.top_k)};
  if (e.fp8()) {
    QuantizeParams q = {};
    q.x = r.x;
    q.out = w + ws.y;
    q.scale = reinterpret_cast<float*>(w + ws.x_scale);
    q.list = list;
    q.columns = int(e.hidden);
    q.scale_stride = int(entries);
    q.row_of_slot = route.row_of_slot;
    q.sparse = e.experts < a.global_experts;
    launch_quantize(token_type(e.dtype), q, stream);
    r.x = w + ws.y;
    r.x_scale = q.scale;
    r.h_scale = reinterpret_cast<float*>(w + ws.h_scale);
  } else if (up.sorted_tokens && !(fuse && up.few_entries)) {
    uint8_t* sorted = w + (fuse ? ws.sorted : ws.y);
    if (sorts) launch_sort(r.x, sorted, route, e.hidden, stream);
    else launch_permute(r.x, sorted, list, e.hidden, stream);
    r.x = sorted;
  }
  if (fuse) launch_fused(e, r, {{}, &route.lists->next[0], route.ready}, stream);
  else launch_experts(e, r, stream);

  reduce(a, ws, first, tokens, nullptr, stream);
}

}  // namespace

int64_t layer_workspace_bytes(int64_t tokens, int64_t top_k, int64_t experts, int64_t hidden, int64_t intermediate, bool fp8) {
  return Workspace(tokens, top_k, experts, hidden, intermediate, fp8).bytes;
}

void run_layer(const LayerArgs& a, cudaStream_t stream) {
  const Experts& e = a.experts;
  if (e.experts > kMostExperts) throw std::runtime_error("vllm_humming: more than 1024 local experts are not supported");
  const Workspace ws(a.tokens, a.top_k, e.experts, e.hidden, e.intermediate, e.fp8());
  if (routes_itself(a)) return run_few(a, ws, stream);
  for (int64_t first = 0; first < a.tokens; first += kChunkTokens) run_chunk(a, ws, first, std::min(kChunkTokens, a.tokens - first), stream);
}

}  // namespace vllm_humming
