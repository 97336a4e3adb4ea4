// A macro for a function that runs on the host and on the device.
//
//   TCH_EXTENSION_HOST_DEVICE float half_of(float x) { return 0.5f * x; }
//
// The function is always inlined. Otherwise a source that is compiled once for each instruction set
// (cpu.h) would emit a copy of it with AVX-512 instructions, and the whole program might use that
// copy.
//
// Needs: nothing.
#pragma once

#if defined(__CUDACC__)
#define TCH_EXTENSION_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define TCH_EXTENSION_HOST_DEVICE inline __attribute__((always_inline))
#endif
