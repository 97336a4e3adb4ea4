// The kernel of the images in this folder, which were made by nvcc 13.0:
//   nvcc -cubin -arch=sm_75 add.cu -o add_sm_75.cubin
//   nvcc -cubin -arch=sm_90a add.cu -o add_sm_90a.cubin
//   nvcc -fatbin -gencode arch=compute_75,code=sm_75 -gencode arch=compute_90a,code=sm_90a add.cu
//   -o add.fatbin
extern "C" __global__ void add(const float* x, float* y, float a, long long n) {
  const long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x;
  if (i < n) y[i] = x[i] + a;
}
