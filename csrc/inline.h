// SPDX-License-Identifier: Apache-2.0
// Functions for the device that tests compile for the host, without CUDA's headers.
#pragma once

#ifdef __CUDACC__
#define VLLM_HUMMING_INLINE __host__ __device__ __forceinline__
#else
#define VLLM_HUMMING_INLINE inline
#endif
