// One function for the host and for the device.
//
//   TCH_EXTENSION_HOST_DEVICE float half_of(float x) { return 0.5f * x; }
//
// Needs: nothing.
#pragma once

#if defined(__CUDACC__)
#define TCH_EXTENSION_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define TCH_EXTENSION_HOST_DEVICE inline
#endif
