// One function for the host and for the device.
//
//   TCH_EXTENSION_HOST_DEVICE float half_of(float x) { return 0.5f * x; }
//
// Always inlined: a source that is compiled once for each instruction set (cpu.h) would otherwise
// lend its copy, full of AVX-512, to the whole program.
//
// Needs: nothing.
#pragma once

#if defined(__CUDACC__)
#define TCH_EXTENSION_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define TCH_EXTENSION_HOST_DEVICE inline __attribute__((always_inline))
#endif
