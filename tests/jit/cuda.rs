//! Tests of CUDA sources. They are compiled if there is an nvcc, and run if there is also a GPU.

use super::*;
use tch_extension::cuda;
use tch_extension::testing::cuda_or_skip;

#[test]
fn cuda_jit_inline() {
    let name = "cuda_jit_inline";
    if !cuda::is_compiled() {
        assert!(cuda_or_skip(name).is_none());
        return;
    }
    let module = inline();
    let twice = module.operator("twice_").unwrap();
    let on_cpu = Tensor::from_slice(&[1.0]);
    assert_says(&message(twice.call::<()>(args![&on_cpu])), &["wants a contiguous CUDA tensor"]);
    let Some(device) = cuda_or_skip(name) else { return };
    let tensor = Tensor::arange(1000, (Kind::Double, device));
    let expected = &tensor * 2;
    twice.call::<()>(args![&tensor]).unwrap();
    assert_eq!(tensor, expected);
}

/// The texts of two tests, which are slow to compile and compiled once.
fn inline() -> &'static Module {
    static MODULE: OnceLock<Result<Module>> = OnceLock::new();
    MODULE.get_or_init(|| with_reductions(twice()).load()).as_ref().expect("a module")
}

fn twice() -> Extension {
    // The kernel includes no header of libtorch's, which makes nvcc fast.
    extension("cuda_inline")
        .cuda(
            "#include <tch_extension/launch.h>\n\
             __global__ void kernel(double* values, int size) {\n\
               const int i = blockIdx.x * blockDim.x + threadIdx.x;\n\
               if (i < size) values[i] *= 2;\n\
             }\n\
             void launch_twice(double* values, int size, cudaStream_t stream) {\n\
               kernel<<<(size + 255) / 256, 256, 0, stream>>>(values, size);\n\
             }",
        )
        .cpp(
            "#include <c10/cuda/CUDAStream.h>\n\
             void launch_twice(double* values, int size, cudaStream_t stream);\n\
             void twice_(torch::Tensor& tensor) {\n\
               TORCH_CHECK(tensor.is_cuda() && tensor.is_contiguous(), \"wants a contiguous CUDA tensor\");\n\
               launch_twice(tensor.data_ptr<double>(), tensor.numel(), c10::cuda::getCurrentCUDAStream());\n\
             }",
        )
        .functions(["twice_"])
}

fn with_reductions(extension: Extension) -> Extension {
    extension
        .cuda(
            "#include <tch_extension/cuda_reduce.h>\n\
             using namespace tch_extension;\n\
             struct Sum { template <typename T> __device__ T operator()(T a, T b) const { return a + b; } };\n\
             struct Largest { template <typename T> __device__ T operator()(T a, T b) const { return a > b ? a : b; } };\n\
             template <typename T>\n\
             __global__ void reduce(const T* x, T* y, int64_t size) {\n\
               const T own = x[blockIdx.x * blockDim.x + threadIdx.x];\n\
               T* to = y + blockIdx.x * blockDim.x + threadIdx.x;\n\
               to[0] = warp_reduce<8>(own, Sum{});\n\
               to[size] = warp_reduce<1>(own, Sum{});\n\
               to[2 * size] = warp_reduce(own, Largest{});\n\
               // One call after the other, whose values share memory.\n\
               to[3 * size] = block_reduce(own, Sum{});\n\
               to[4 * size] = block_reduce(own, Largest{});\n\
               to[5 * size] = block_reduce(-own, Sum{});\n\
             }\n\
             void launch_reduce(const float* x, float* y, int rows, int columns, cudaStream_t stream) {\n\
               reduce<<<rows, columns, 0, stream>>>(x, y, int64_t(rows) * columns);\n\
             }\n\
             void launch_reduce(const double* x, double* y, int rows, int columns, cudaStream_t stream) {\n\
               reduce<<<rows, columns, 0, stream>>>(x, y, int64_t(rows) * columns);\n\
             }",
        )
        .cpp(
            "#include <c10/cuda/CUDAStream.h>\n\
             void launch_reduce(const float* x, float* y, int rows, int columns, cudaStream_t stream);\n\
             void launch_reduce(const double* x, double* y, int rows, int columns, cudaStream_t stream);\n\
             torch::Tensor reduce(torch::Tensor x) {\n\
               TORCH_CHECK(x.is_cuda() && x.is_contiguous() && x.dim() == 2, \"wants a CUDA matrix\");\n\
               auto y = torch::empty({6, x.size(0), x.size(1)}, x.options());\n\
               AT_DISPATCH_FLOATING_TYPES(x.scalar_type(), \"reduce\", [&] {\n\
                 launch_reduce(x.data_ptr<scalar_t>(), y.data_ptr<scalar_t>(), x.size(0), x.size(1),\n\
                               c10::cuda::getCurrentCUDAStream());\n\
               });\n\
               return y;\n\
             }",
        )
        .functions(["reduce"])
}

/// Sums and largest values of rows, by parts of warps, warps and blocks. Each thread writes what it
/// got, so that a thread with other bits is seen.
#[test]
fn cuda_jit_reductions() {
    let name = "cuda_jit_reductions";
    if !cuda::is_compiled() {
        assert!(cuda_or_skip(name).is_none());
        return;
    }
    let module = inline();
    let reduce = module.operator("reduce").unwrap();
    let on_cpu = Tensor::zeros([1, 32], (Kind::Float, Device::Cpu));
    assert_says(&message(reduce.call::<Tensor>(args![&on_cpu])), &["wants a CUDA matrix"]);
    let Some(device) = cuda_or_skip(name) else { return };
    for kind in [Kind::Float, Kind::Double] {
        for columns in [32, 96, 256, 1024] {
            // Whole numbers, whose sums are exact in any order.
            let x = Tensor::randint_low(-999, 999, [5, columns], (kind, device));
            let y: Tensor = reduce.call(args![&x]).unwrap();
            let groups = |lanes: i64| x.view([5, columns / lanes, lanes]);
            let all =
                |of_groups: Tensor| of_groups.expand([5, -1, columns / of_groups.size()[1]], false);
            let sum = |lanes| all(groups(lanes).sum_dim_intlist(-1, true, kind));
            let largest = |lanes| all(groups(lanes).amax([-1], true));
            let expected =
                [sum(8), sum(1), largest(32), sum(columns), largest(columns), -sum(columns)];
            let expected: Vec<Tensor> =
                expected.iter().map(|one| one.reshape([5, columns])).collect();
            assert_eq!(y, Tensor::stack(&expected, 0), "{kind:?}, {columns}");
        }
    }
}

#[test]
fn cuda_jit_lltm() {
    let name = "cuda_jit_lltm";
    if !cuda::is_compiled() {
        assert!(cuda_or_skip(name).is_none());
        return;
    }
    // tests/downstream compiles this source in any case, which takes more than a minute.
    let device = cuda_or_skip(name);
    if device.is_none() && std::env::var_os("TCH_EXTENSION_FULL").is_none() {
        return;
    }
    let module = extension("lltm_cuda")
        .sources(["lltm_cuda.cpp", "lltm_cuda_kernel.cu"].map(python_source))
        .load()
        .unwrap();
    let inputs = python_sources::lltm_inputs(Device::Cpu).map(|input| input.detach());
    let call = module
        .operator("forward")
        .unwrap()
        .call::<Vec<Tensor>>(args![&inputs[0], &inputs[1], &inputs[2], &inputs[3], &inputs[4]]);
    assert_says(&message(call), &["lltm_cuda::forward", "input must be a CUDA tensor"]);
    let Some(device) = device else { return };
    python_sources::check_lltm(&module, device);
}

#[test]
fn cuda_jit_older_source() {
    let name = "cuda_jit_older_source";
    if !cuda::is_compiled() {
        assert!(cuda_or_skip(name).is_none());
        return;
    }
    let module = extension("clip_cuda")
        .sources(["clip.cpp", "clip_kernel.cu"].map(python_source))
        .define("WITH_CUDA", None)
        .load()
        .unwrap();
    python_sources::check_clip(&module, Device::Cpu, &[Kind::Float]);
    let Some(device) = cuda_or_skip(name) else { return };
    python_sources::check_clip(&module, device, &[Kind::Double, Kind::Float, Kind::Half]);
}

#[test]
fn cuda_jit_says_what_nvcc_says() {
    let name = "cuda_jit_says_what_nvcc_says";
    if !cuda::is_compiled() {
        assert!(cuda_or_skip(name).is_none());
        return;
    }
    let text = message(
        extension("cuda_broken").cuda("__global__ void kernel() { undeclared_thing(); }").load(),
    );
    assert_says(&text, &["jit: cuda_broken: ", "main.cu does not compile", "undeclared_thing"]);
}
