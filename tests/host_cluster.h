// SPDX-License-Identifier: Apache-2.0
// What the schedulers of a pair tile (csrc/moe/pair/pair_producer.cuh) need of CUDA, on the host, and a model of what they feed: one cluster whose
// schedulers and consumers are coroutines, run one at a time. Warps have one lane. test_pair_scheduler.py puts the kernel's own text behind this.
#pragma once
#include <algorithm>
#include <cstdint>
#include <functional>
#include <map>
#include <numeric>
#include <random>
#include <vector>
#include <ucontext.h>

#define __device__
#define __forceinline__ inline

// ---- coroutines: the first in order of those that can go on runs until it has to wait ----
struct Actor {
  ucontext_t context;
  std::vector<char> stack = std::vector<char>(1 << 18);
  std::function<void()> body;
  std::function<bool()> ready;  // what it waits for
  int rank;
  bool done = false;
};
static std::vector<Actor> actors;
static Actor* now;
static ucontext_t outside;

static void wait_until(std::function<bool()> ready) {
  now->ready = std::move(ready);
  swapcontext(&now->context, &outside);
}
static void enter() {
  now->body();
  now->done = true;
  swapcontext(&now->context, &outside);
}
// Whether all came to their end. order: of actors, the first that can runs; none: any of them, by `random`.
static bool run_all(const std::vector<int>& order, std::mt19937& random) {
  for (Actor& a : actors) {
    getcontext(&a.context);
    a.context.uc_stack.ss_sp = a.stack.data();
    a.context.uc_stack.ss_size = a.stack.size();
    makecontext(&a.context, enter, 0);
    a.ready = [] { return true; };
  }
  std::vector<int> turn(actors.size());
  std::iota(turn.begin(), turn.end(), 0);
  while (true) {
    if (order.empty()) std::shuffle(turn.begin(), turn.end(), random);
    else turn = order;
    now = nullptr;
    for (int i : turn)
      if (!now && !actors[i].done && actors[i].ready()) now = &actors[i];
    if (!now) break;
    swapcontext(&outside, &now->context);
  }
  return std::all_of(actors.begin(), actors.end(), [](const Actor& a) { return a.done; });
}

// ---- shared memory of both CTAs, with its barriers ----
struct Barrier {
  int arrivals = 0, bytes = 0;
  uint32_t phase = 0;
  void step(int arrived, int more_bytes) {
    arrivals += arrived, bytes += more_bytes;
    if (arrivals == 1 && bytes == 0) arrivals = 0, ++phase;  // all of the schedulers' barriers wait for one
  }
};
static std::map<uint32_t, uint32_t> memory[2];
static std::map<uint32_t, Barrier> barriers[2];

namespace ptx {
constexpr uint32_t kRemote = 1u << 24;
inline uint32_t map_shared(uint32_t a, uint32_t rank) { return a | kRemote << rank; }
inline int rank_of(uint32_t a) { return a & kRemote << 1 ? 1 : a & kRemote ? 0 : now->rank; }
inline uint32_t place(uint32_t a) { return a & (kRemote - 1); }
inline Barrier& at(uint32_t bar) { return barriers[rank_of(bar)][place(bar)]; }
inline void mbarrier_arrive(uint32_t bar) { at(bar).step(1, 0); }
inline void mbarrier_arrive_expect_tx(uint32_t bar, int bytes) { at(bar).step(1, bytes); }
inline void mbarrier_wait(uint32_t bar, uint32_t parity) {
  Barrier& b = at(bar);
  wait_until([&b, parity] { return b.phase % 2 != parity; });
}
inline void mbarrier_wait_cluster(uint32_t bar, uint32_t parity) { mbarrier_wait(bar, parity); }
inline void store_async_4(uint32_t a, uint32_t v, uint32_t bar) {
  memory[rank_of(a)][place(a)] = v;
  at(bar).step(0, -4);
}
inline uint32_t load_shared_4(uint32_t a) { return memory[rank_of(a)][place(a)]; }
}  // namespace ptx

struct { unsigned x; } static gridDim = {2}, blockIdx = {0};
inline int atomicAdd(int* p, int v) { return (*p += v) - v; }
template <typename T>
T __shfl_sync(uint32_t, T v, int) { return v; }

// ---- what the schedulers work on ----
enum class Stage { kUp, kDown };
struct TokenTile {
  int expert, row, count, width;
};
struct GemmParams {
  const void* tiles;
  int* next_tile;
  int column_tiles;
};
struct PairShared {
  uint32_t next = 0, next_full = 256, info_full = 512, info_empty = 768;
};
struct Tiles {
  int tiles;
  int total() const { return tiles; }
  TokenTile at(int index) const { return {0, index, 1, 64}; }
};
static TokenTile infos_of[2][8];
static std::vector<int> published[2];  // tiles that a CTA's loaders know, as row * 1000 + column

template <typename C, typename Ring, typename T>
void publish(const GemmParams&, const PairShared& s, const Ring& ring, const T&, const TokenTile& tile, int block0, int, Stage, bool) {
  infos_of[now->rank][ring.at] = tile;
  if (tile.expert >= 0) published[now->rank].push_back(tile.row * 1000 + block0 / C::kTileBlocks / 2);
  ptx::mbarrier_arrive(s.info_full + ring.at * 8);
}
