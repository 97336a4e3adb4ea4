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
    // The kernel includes no header of libtorch's, which makes nvcc fast.
    let module = extension("cuda_inline")
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
        .flag("-O0")
        .load()
        .unwrap();
    let twice = module.operator("twice_").unwrap();
    let on_cpu = Tensor::from_slice(&[1.0]);
    assert_says(&message(twice.call::<()>(args![&on_cpu])), &["wants a contiguous CUDA tensor"]);
    let Some(device) = cuda_or_skip(name) else { return };
    let tensor = Tensor::arange(1000, (Kind::Double, device));
    let expected = &tensor * 2;
    twice.call::<()>(args![&tensor]).unwrap();
    assert_eq!(tensor, expected);
}

#[test]
fn cuda_jit_lltm() {
    let name = "cuda_jit_lltm";
    if !cuda::is_compiled() {
        assert!(cuda_or_skip(name).is_none());
        return;
    }
    let module = extension("lltm_cuda")
        .sources(["lltm_cuda.cpp", "lltm_cuda_kernel.cu"].map(python_source))
        .flag("-O0")
        .load()
        .unwrap();
    let inputs = python_sources::lltm_inputs(Device::Cpu).map(|input| input.detach());
    let call = module
        .operator("forward")
        .unwrap()
        .call::<Vec<Tensor>>(args![&inputs[0], &inputs[1], &inputs[2], &inputs[3], &inputs[4]]);
    assert_says(&message(call), &["lltm_cuda::forward", "input must be a CUDA tensor"]);
    let Some(device) = cuda_or_skip(name) else { return };
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
        .flag("-O0")
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
