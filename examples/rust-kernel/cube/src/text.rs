//! `#[cube]` kernels as CUDA text. No GPU, no CUDA and no cubecl runtime is needed.

use cubecl::prelude::*;
use cubecl_common::profile::TimingMethod;
use cubecl_core::ir::*;
use cubecl_cpp::shared::{
    CompilationOptions, CppCompiler, CppSupportedFeatures, register_supported_types,
};
use cubecl_cpp::target;
use cubecl_runtime::compiler::Compiler;
use std::sync::Arc;

/// The threads of a block.
pub const THREADS: u32 = 256;

// No text has bounds checks, whatever the execution mode is: each kernel makes its own.

#[cube(launch)]
fn silu_forward<F: Float>(x: &[F], y: &mut [F]) {
    if ABSOLUTE_POS < y.len() {
        let v = x[ABSOLUTE_POS];
        y[ABSOLUTE_POS] = v / (F::new(1.0) + F::exp(-v));
    }
}

#[cube(launch)]
fn silu_backward<F: Float>(x: &[F], g: &[F], dx: &mut [F]) {
    if ABSOLUTE_POS < dx.len() {
        let v = x[ABSOLUTE_POS];
        let s = F::new(1.0) / (F::new(1.0) + F::exp(-v));
        dx[ABSOLUTE_POS] = g[ABSOLUTE_POS] * s * (F::new(1.0) + v * (F::new(1.0) - s));
    }
}

/// A kernel's text, and its name in it.
pub struct Text {
    pub source: String,
    pub name: String,
}

/// The texts of both kernels for elements of type `F`.
pub fn silu<F: Float>() -> Result<[Text; 2], String> {
    let (device, properties) = (device(), Arc::<TargetProperties>::default());
    let settings = || {
        let size = CubeDim::new_1d(THREADS);
        KernelSettings::new(size.into(), ExecutionMode::Checked, AddressType::U32)
    };
    let slice = || BufferCompilationArg { inplace: None };
    Ok([
        text(silu_forward::SiluForward::<F>::new(
            settings(),
            device.clone(),
            properties.clone(),
            slice(),
            slice(),
        ))?,
        text(silu_backward::SiluBackward::<F>::new(
            settings(),
            device,
            properties,
            slice(),
            slice(),
            slice(),
        ))?,
    ])
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
        .ok_or("the text has no kernel")?;
    Ok(Text { source: compiled.source, name })
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
