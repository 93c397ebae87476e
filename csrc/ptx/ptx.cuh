// SPDX-License-Identifier: Apache-2.0
// Thin names for the SM90 instructions the kernels use. Each wraps one PTX instruction (PTX ISA 8.x names in the comments).
#pragma once
#include <cstdint>

namespace vllm_humming::ptx {

__device__ __forceinline__ uint32_t smem_address(const void* p) { return static_cast<uint32_t>(__cvta_generic_to_shared(p)); }

// The same value, but unknown to the optimiser: keeps what depends on it from being hoisted out of the tile loop, where one copy a
// token width would exhaust the registers.
__device__ __forceinline__ uint32_t opaque(uint32_t v) {
  asm volatile("" : "+r"(v));
  return v;
}

// A copy that the compiler leaves behind its branch instead of making it a select.
__device__ __forceinline__ float move(float v) {
  float d;
  asm volatile("mov.b32 %0, %1;" : "=f"(d) : "f"(v));
  return d;
}

// One half of a register twice; the compiler folds it into the operand of a packed multiply (.H0_H0, .H1_H1).
__device__ __forceinline__ uint32_t repeat_half(uint32_t v, int half) {
  uint32_t d;
  if (half) asm("{.reg .b16 l, h; mov.b32 {l, h}, %1; mov.b32 %0, {h, h};}" : "=r"(d) : "r"(v));
  else asm("{.reg .b16 l, h; mov.b32 {l, h}, %1; mov.b32 %0, {l, l};}" : "=r"(d) : "r"(v));
  return d;
}

// A condition that is the same in all lanes, said so that the compiler keeps what depends on it in uniform registers.
__device__ __forceinline__ bool uniform(bool condition) { return __any_sync(~0u, condition); }

// min and max that keep a NaN (fminf and fmaxf drop it).
__device__ __forceinline__ float min_nan(float a, float b) {
  float d;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(d) : "f"(a), "f"(b));
  return d;
}
__device__ __forceinline__ float max_nan(float a, float b) {
  float d;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(d) : "f"(a), "f"(b));
  return d;
}

// 1 / v to within one unit in the last place.
__device__ __forceinline__ float reciprocal(float v) {
  float d;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(d) : "f"(v));
  return d;
}

// ---- mbarrier ----
__device__ __forceinline__ void mbarrier_init(uint32_t bar, uint32_t count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(count) : "memory");
}
__device__ __forceinline__ void mbarrier_arrive(uint32_t bar) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(bar) : "memory");
}
__device__ __forceinline__ void mbarrier_arrive_expect_tx(uint32_t bar, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes) : "memory");
}
// More bytes to come in a phase that still lacks this thread's arrival.
__device__ __forceinline__ void mbarrier_expect_tx(uint32_t bar, uint32_t bytes) {
  asm volatile("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(bytes) : "memory");
}
__device__ __forceinline__ void mbarrier_wait(uint32_t bar, uint32_t parity) {
  asm volatile(
      "{\n.reg .pred done;\n"
      "VH_WAIT:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@done bra VH_DONE;\n"
      "bra VH_WAIT;\n"
      "VH_DONE:\n}\n" ::"r"(bar), "r"(parity) : "memory");
}
// The same for a whole warp at once: in the middle of a loop another wait would look divergent, and what lies in uniform registers leave them.
__device__ __forceinline__ void mbarrier_wait_warp(uint32_t bar, uint32_t parity) {
  asm volatile(
      "{\n.reg .pred done;\n"
      "VH_WAIT:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "vote.sync.all.pred done, done, -1;\n"
      "@done bra VH_DONE;\n"
      "bra VH_WAIT;\n"
      "VH_DONE:\n}\n" ::"r"(bar), "r"(parity) : "memory");
}
// Whether that phase has ended, 0 or 1; the answer takes a while, which other instructions can hide.
__device__ __forceinline__ uint32_t mbarrier_ready(uint32_t bar, uint32_t parity) {
  uint32_t ready;
  asm volatile(
      "{\n.reg .pred done;\n"
      "mbarrier.test_wait.parity.shared::cta.b64 done, [%1], %2;\n"
      "selp.u32 %0, 1, 0, done;\n}\n"
      : "=r"(ready)
      : "r"(bar), "r"(parity)
      : "memory");
  return ready;
}
// mbarrier_wait unless `ready`. One piece of asm: a branch around it would look divergent; and not what mbarrier_wait calls: with a constant
// `ready` its machine code was another.
__device__ __forceinline__ void mbarrier_wait_unless(uint32_t ready, uint32_t bar, uint32_t parity) {
  asm volatile(
      "{\n.reg .pred done;\n"
      "setp.ne.u32 done, %2, 0;\n"
      "@done bra VH_DONE;\n"
      "VH_WAIT:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@done bra VH_DONE;\n"
      "bra VH_WAIT;\n"
      "VH_DONE:\n}\n" ::"r"(bar), "r"(parity), "r"(ready) : "memory");
}
__device__ __forceinline__ void mbarrier_init_fence() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

// ---- copies ----
__device__ __forceinline__ uint64_t policy_evict_first() {
  uint64_t policy;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}
__device__ __forceinline__ uint64_t policy_evict_normal() {
  uint64_t policy;
  asm volatile("createpolicy.fractional.L2::evict_normal.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}
// cp.async.bulk: `bytes` contiguous bytes, a multiple of 16, completes on `bar`.
__device__ __forceinline__ void bulk_load(uint32_t dst, const void* src, uint32_t bytes, uint32_t bar, uint64_t policy) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::"r"(dst), "l"(src),
      "r"(bytes), "r"(bar), "l"(policy)
      : "memory");
}
__device__ __forceinline__ void bulk_load(uint32_t dst, const void* src, uint32_t bytes, uint32_t bar) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(dst), "l"(src), "r"(bytes),
               "r"(bar)
               : "memory");
}
// Before bulk copies or wgmma read shared memory that this thread has written by ordinary stores.
__device__ __forceinline__ void async_proxy_fence() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
// `bytes` contiguous bytes of shared memory to global memory, a multiple of 16; the thread that issued it commits and waits.
__device__ __forceinline__ void bulk_store(void* dst, uint32_t src, uint32_t bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(dst), "r"(src), "r"(bytes) : "memory");
}
__device__ __forceinline__ void bulk_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
template <int Pending>
__device__ __forceinline__ void bulk_wait() {
  asm volatile("cp.async.bulk.wait_group %0;" ::"n"(Pending) : "memory");
}
template <int Pending>
__device__ __forceinline__ void bulk_wait_read() {  // until the shared memory has been read
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(Pending) : "memory");
}
// One box of a two-dimensional tensor map at (column, row); what lies outside the tensor reads as zero.
__device__ __forceinline__ void tensor_load(uint32_t dst, const void* map, int column, int row, uint32_t bar) {
  asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::"r"(dst), "l"(map),
               "r"(column), "r"(row), "r"(bar)
               : "memory");
}
// Brings a tensor map, a kernel's parameter, to where the copy engine reads it.
__device__ __forceinline__ void tensor_map_prefetch(const void* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}
// cp.async of 16 bytes; `valid` false writes zeros and reads nothing.
__device__ __forceinline__ void copy16(uint32_t dst, const void* src, bool valid) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(dst), "l"(src), "r"(valid ? 16 : 0) : "memory");
}
// Waits for this thread's cp.async, committed or not (wait_group knows the committed ones only).
__device__ __forceinline__ void copy16_wait_all() { asm volatile("cp.async.wait_all;" ::: "memory"); }
// Arrives on `bar` once all earlier cp.async of this thread have landed.
__device__ __forceinline__ void copy16_arrive(uint32_t bar) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(bar) : "memory");
}

// ---- shared memory ----
__device__ __forceinline__ uint4 load_shared_16(uint32_t a) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(a));
  return v;
}
__device__ __forceinline__ uint2 load_shared_8(uint32_t a) {
  uint2 v;
  asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(a));
  return v;
}
__device__ __forceinline__ uint32_t load_shared_4(uint32_t a) {
  uint32_t v;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(a));
  return v;
}
__device__ __forceinline__ uint32_t load_shared_1(uint32_t a) {
  uint32_t v;
  asm volatile("ld.shared.u8 %0, [%1];" : "=r"(v) : "r"(a));
  return v;
}
__device__ __forceinline__ void store_shared_16(uint32_t a, uint4 v) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(a), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}
__device__ __forceinline__ void store_shared_4(uint32_t a, uint32_t v) { asm volatile("st.shared.u32 [%0], %1;" ::"r"(a), "r"(v) : "memory"); }
__device__ __forceinline__ void store_shared_1(uint32_t a, uint32_t v) { asm volatile("st.shared.u8 [%0], %1;" ::"r"(a), "r"(v) : "memory"); }
// Four 8x8 tiles of 16-bit values: lane i gives the address of row i % 8 of tile i / 8.
__device__ __forceinline__ uint4 load_matrix_4(uint32_t a) {
  uint4 v;
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(a));
  return v;
}
// One 8x8 tile of 16-bit values, transposed: lane i < 8 gives the address of row i.
__device__ __forceinline__ void store_matrix_transposed(uint32_t a, uint32_t v) {
  asm volatile("stmatrix.sync.aligned.m8n8.x1.trans.shared.b16 [%0], {%1};" ::"r"(a), "r"(v) : "memory");
}
__device__ __forceinline__ void store_matrix_4(uint32_t a, uint32_t v0, uint32_t v1, uint32_t v2, uint32_t v3) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(a), "r"(v0), "r"(v1), "r"(v2), "r"(v3) : "memory");
}
template <int Id>
__device__ __forceinline__ void named_barrier(int threads) {
  asm volatile("bar.sync %0, %1;" ::"n"(Id), "r"(threads) : "memory");
}

// ---- warpgroup MMA ----
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int Pending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(Pending) : "memory");
}
// Low word of the descriptor of a K-major operand in 128-byte rows with the 128-byte swizzle, 8-row atoms 1024 bytes apart; moving
// by b bytes adds b / 16. The high word is the constant kDescriptorHigh.
constexpr uint32_t kDescriptorHigh = (1u << 30) | (1024 >> 4);
__device__ __forceinline__ uint32_t wgmma_descriptor(uint32_t a) { return (1u << 16) | ((a & 0x3FFFF) >> 4); }
template <int Registers>
__device__ __forceinline__ void registers_release() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(Registers));
}
template <int Registers>
__device__ __forceinline__ void registers_acquire() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(Registers));
}

// ---- programmatic dependent launch ----
// What this thread, and those it has met at a barrier, have written is visible to whoever sees the sum by load_acquire.
__device__ __forceinline__ void add_release(int* at, int v) { asm volatile("red.release.gpu.global.add.s32 [%0], %1;" ::"l"(at), "r"(v) : "memory"); }
__device__ __forceinline__ int load_acquire(const int* at) {
  int v;
  asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(v) : "l"(at) : "memory");
  return v;
}
// Between ordinary accesses to global memory and those of bulk and tensor copies.
__device__ __forceinline__ void async_proxy_fence_global() { asm volatile("fence.proxy.async.global;" ::: "memory"); }

__device__ __forceinline__ void grid_dependency_wait() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
__device__ __forceinline__ void grid_dependency_launch() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

}  // namespace vllm_humming::ptx
