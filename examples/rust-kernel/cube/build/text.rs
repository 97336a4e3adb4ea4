//! `#[cube]` kernels as CUDA text. Neither a GPU nor CUDA is needed.

use crate::kernels::{silu_backward, silu_forward};
use cubecl::ir::{
    AddressType, DeviceIdentity, DeviceProperties, HardwareProperties, MemoryDeviceProperties,
    TargetProperties, VectorSize,
};
use cubecl::prelude::*;
use cubecl::profile::TimingMethod;
use cubecl::{Compiler, CubeKernel};
use cubecl_cpp::shared::{
    CompilationOptions, CppCompiler, CppSupportedFeatures, register_supported_types,
};
use cubecl_cpp::target;
use std::sync::Arc;

/// The threads of a block.
pub const THREADS: u32 = 256;

/// A kernel's text, and its name in it.
pub struct Text {
    pub name: String,
    pub source: String,
}

/// `y = silu(x)` for elements of type `F`.
pub fn forward<F: Float>() -> Result<Text, String> {
    let (settings, device, target) = surroundings();
    text(silu_forward::SiluForward::<F>::new(settings, device, target, slice(), slice()))
}

/// `dx` of `x` and of the gradient of `y`.
pub fn backward<F: Float>() -> Result<Text, String> {
    let (settings, device, target) = surroundings();
    text(silu_backward::SiluBackward::<F>::new(settings, device, target, slice(), slice(), slice()))
}

/// A slice that is no other one's memory.
fn slice() -> BufferCompilationArg {
    BufferCompilationArg { inplace: None }
}

fn surroundings() -> (KernelSettings, Arc<DeviceProperties>, Arc<TargetProperties>) {
    let size = CubeDim::new_1d(THREADS);
    let settings = KernelSettings::new(size.into(), ExecutionMode::Checked, AddressType::U32);
    (settings, device(), Arc::default())
}

fn text(kernel: impl CubeKernel) -> Result<Text, String> {
    // The lengths of the slices are then a parameter by value, the last one.
    let supports_features = CppSupportedFeatures { grid_constants: true, ..Default::default() };
    let options = CompilationOptions { supports_features, ..Default::default() };
    let compiled = CppCompiler::<target::Cuda>::default()
        .compile(kernel.define(), &options)
        .map_err(|error| format!("{error:?}"))?;
    // `extern "C" __global__ void __launch_bounds__(256) name(`
    let name = compiled
        .source
        .split_once("__launch_bounds__")
        .and_then(|(_, rest)| rest.split_once(") "))
        .and_then(|(_, rest)| rest.split_once('('))
        .map(|(name, _)| name.trim().to_string())
        .ok_or_else(|| format!("no kernel in this text:\n{}", compiled.source))?;
    Ok(Text { name, source: alone(&compiled.source) })
}

/// Its typedefs clash with the system's headers, so that the text gets a namespace, and what it
/// includes comes before, for nvcc only: a compiler for the CPU gets `src/shim.h` instead.
fn alone(source: &str) -> String {
    let (includes, body): (Vec<&str>, Vec<&str>) =
        source.lines().partition(|line| line.trim_start().starts_with("#include"));
    let (includes, body) = (includes.join("\n"), body.join("\n"));
    format!("#ifdef __CUDACC__\n{includes}\n#endif\nnamespace cube_text {{\n{body}\n}}\n")
}

/// What cubecl otherwise asks a GPU for.
fn device() -> Arc<DeviceProperties> {
    let hardware = HardwareProperties {
        load_width: 128,
        vector_register_count: None,
        plane_size_min: 32,
        plane_size_max: 32,
        max_bindings: 1024,
        max_shared_memory_size: 48 << 10,
        max_cube_count: (i32::MAX as u32, 65535, 65535),
        max_units_per_cube: 1024,
        max_cube_dim: (1024, 1024, 64),
        num_streaming_multiprocessors: None,
        num_cpu_cores: None,
        last_level_cache_size: None,
        num_tensor_cores: Some(4),
        min_tensor_cores_dim: Some(8),
        max_vector_size: VectorSize::MAX,
        cube_mma_reserved_shared_memory: 0,
    };
    let memory = MemoryDeviceProperties::new(1 << 34, 512);
    let identity = DeviceIdentity { name: "tch".into(), fingerprint: "tch".into(), physical: None };
    let mut properties =
        DeviceProperties::new(Default::default(), memory, hardware, TimingMethod::Device, identity);
    register_supported_types(&mut properties);
    Arc::new(properties)
}
