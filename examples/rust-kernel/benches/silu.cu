// SiLU in CUDA C++, with which the benchmark compares: 16 bytes at a time.
//   nvcc -cubin -arch=sm_90 -O3 benches/silu.cu -o images/nvcc_silu_sm_90.cubin
#include <cuda_fp16.h>

__device__ float silu(float x) { return x / (1.0f + expf(-x)); }

extern "C" __global__ void __launch_bounds__(256)
    silu_f32(const float4* x, float4* y, long long n) {
  const long long i = blockIdx.x * 256ll + threadIdx.x;
  if (i >= n) return;
  float4 v = x[i];
  y[i] = {silu(v.x), silu(v.y), silu(v.z), silu(v.w)};
}

struct alignas(16) Half8 {
  __half lane[8];
};

extern "C" __global__ void __launch_bounds__(256) silu_f16(const Half8* x, Half8* y, long long n) {
  const long long i = blockIdx.x * 256ll + threadIdx.x;
  if (i >= n) return;
  Half8 v = x[i];
#pragma unroll
  for (int lane = 0; lane < 8; ++lane) {
    v.lane[lane] = __float2half_rn(silu(__half2float(v.lane[lane])));
  }
  y[i] = v;
}
