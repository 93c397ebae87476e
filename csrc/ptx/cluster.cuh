// SPDX-License-Identifier: Apache-2.0
// Thin names for the instructions of thread block clusters. Addresses are shared::cta ones; `remote` ones come from map_shared.
#pragma once
#include <cstdint>

namespace vllm_humming::ptx {

__device__ __forceinline__ uint32_t cluster_rank() {
  uint32_t rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}
// Of all threads of the cluster that have not ended. Not .aligned: warps come from different roles.
__device__ __forceinline__ void cluster_barrier() {
  asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;" ::: "memory");
}
// The same place in the shared memory of another CTA of the cluster.
__device__ __forceinline__ uint32_t map_shared(uint32_t a, uint32_t rank) {
  uint32_t d;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(rank));
  return d;
}
// Four bytes to `remote`, which completes on the barrier `bar` (remote, too) as a copy does.
__device__ __forceinline__ void store_async_4(uint32_t remote, uint32_t v, uint32_t bar) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.u32 [%0], %1, [%2];" ::"r"(remote), "r"(v), "r"(bar) : "memory");
}
// For what the other CTA may overwrite from now on. (With .release.cluster it would be preceded by a fence of hundreds of clocks.)
__device__ __forceinline__ void mbarrier_arrive_remote(uint32_t remote) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(remote) : "memory");
}
// By a whole warp; also sees what other CTAs stored asynchronously.
__device__ __forceinline__ void mbarrier_wait_cluster(uint32_t bar, uint32_t parity) {
  asm volatile(
      "{\n.reg .pred done;\n"
      "VH_WAIT:\n"
      "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], %1;\n"
      "vote.sync.all.pred done, done, -1;\n"
      "@done bra VH_DONE;\n"
      "bra VH_WAIT;\n"
      "VH_DONE:\n}\n" ::"r"(bar), "r"(parity) : "memory");
}
// One box of a two-dimensional tensor map to the same place of each CTA in `mask`, where it completes on the same barrier.
__device__ __forceinline__ void tensor_load_multicast(uint32_t dst, const void* map, int column, int row, uint32_t bar, uint16_t mask) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, {%2, %3}], [%4], %5;" ::"r"(dst),
      "l"(map), "r"(column), "r"(row), "r"(bar), "h"(mask)
      : "memory");
}

}  // namespace vllm_humming::ptx
