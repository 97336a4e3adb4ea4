//! Compiles the kernels: `cargo run -p kernels -- sm_90` writes `images/*.cubin`. It needs no GPU.

mod kernels;

use cutile_compiler::compile_api::KernelCompiler;
use cutile_compiler::cuda_tile_runtime_utils::compile_tile_ir_module;
use cutile_compiler::specialization::{DivHint, SpecializationBits};
use std::path::Path;
use std::time::Instant;

/// The kinds: the name, that of the elements, and that of what is computed in.
const KINDS: [(&str, &str, &str); 4] =
    [("f16", "f16", "f32"), ("bf16", "bf16", "f32"), ("f32", "f32", "f32"), ("f64", "f64", "f64")];

/// What is known of a contiguous tensor. Aligned, its address and its rows are multiples of 16 bytes;
/// how many rows there are does not matter.
fn facts(rank: usize, element_bytes: i32, aligned: bool) -> SpecializationBits {
    let multiple = |divisor| DivHint { divisor, max: 16 };
    let row = if aligned { 16 / element_bytes } else { 1 };
    let last = |dim| dim + 1 == rank;
    SpecializationBits {
        shape_div: (0..rank).map(|dim| multiple(if last(dim) { row } else { 1 })).collect(),
        stride_div: (0..rank).map(|dim| multiple(if last(dim) { 1 } else { row })).collect(),
        stride_one: (0..rank).map(last).collect(),
        base_ptr_div: multiple(if aligned { 16 } else { element_bytes }),
        elements_disjoint: true,
    }
}

struct Image<'a> {
    /// The kernel's name in Rust.
    function: &'a str,
    kind: (&'a str, &'a str, &'a str),
    /// The sizes of the tiles.
    tile: &'a [i32],
    /// The tensors and their ranks.
    tensors: &'a [(&'a str, usize)],
    /// Whether addresses and rows are multiples of 16 bytes. With these facts the compiler loads by
    /// TMA or 16 bytes at a time; without them one element at a time.
    aligned: bool,
}

impl Image<'_> {
    fn compile(&self, target: &str, folder: &Path) -> Result<(), Box<dyn std::error::Error>> {
        let start = Instant::now();
        let (kind, element, computed) = self.kind;
        let bytes = match kind {
            "f64" => 8,
            "f32" => 4,
            _ => 2,
        };
        let mut generics = vec![element.to_string(), computed.to_string()];
        generics.extend(self.tile.iter().map(i32::to_string));
        let strides: Vec<(&str, Vec<i32>)> = self
            .tensors
            .iter()
            .map(|(name, rank)| {
                (*name, (1..=*rank).map(|dim| if dim == *rank { 1 } else { -1 }).collect())
            })
            .collect();
        let strides: Vec<_> = strides.iter().map(|(name, strides)| (*name, &strides[..])).collect();
        let specs: Vec<_> = self
            .tensors
            .iter()
            .map(|(name, rank)| (*name, facts(*rank, bytes, self.aligned)))
            .collect();
        let compiled = KernelCompiler::new(kernels::tile::__module_ast_self, "tile", self.function)
            .generics(generics)
            .strides(&strides)
            .spec_args(&specs)
            .target(target)
            .compile()?;
        // What the compiler leaves to whoever launches the kernel: that the grid and the tensors' sizes
        // fit one another. The operators see to it.
        if std::env::var_os("PRINT_IR").is_some() {
            println!("{:#?}\n{}", compiled.launch_checks(), compiled.ir_text());
        }
        let cubin = compile_tile_ir_module(compiled.module(), target)?;
        let suffix = if self.aligned { "aligned" } else { "any" };
        let name = format!("{}_{kind}_{suffix}_{target}.cubin", self.function);
        println!("{name}: {} bytes, {:.1?}", cubin.len(), start.elapsed());
        Ok(std::fs::write(folder.join(name), cubin)?)
    }
}

fn run() -> Result<(), Box<dyn std::error::Error>> {
    let target = std::env::args().nth(1).unwrap_or_else(|| "sm_90".to_string());
    let only = std::env::args().nth(2).unwrap_or_default();
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../images");
    std::fs::create_dir_all(&folder)?;
    for kind in KINDS {
        for aligned in [true, false] {
            let matmul_tile: &[i32] = match (kind.0, aligned) {
                ("f16" | "bf16", true) => &[128, 128, 64],
                ("f16" | "bf16", false) | (_, true) => &[64, 64, 32],
                (_, false) => &[32, 32, 32],
            };
            let images = [
                ("silu", &[1024][..], &[("y", 1), ("x", 1)][..]),
                ("silu_backward", &[1024], &[("dx", 1), ("x", 1), ("g", 1)]),
                ("matmul_add_relu", matmul_tile, &[("z", 2), ("x", 2), ("y", 2), ("bias", 1)]),
            ];
            for (function, tile, tensors) in images {
                if function.starts_with(&only) || format!("{function}_{}", kind.0) == only {
                    Image { function, kind, tile, tensors, aligned }.compile(&target, &folder)?;
                }
            }
        }
    }
    Ok(())
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    // The compiler's recursion is deep.
    let thread = std::thread::Builder::new()
        .stack_size(64 << 20)
        .spawn(|| run().map_err(|error| error.to_string()))?;
    Ok(thread.join().map_err(|_| "the compiler panicked")??)
}
