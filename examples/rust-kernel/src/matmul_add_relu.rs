//! `z = relu(x @ y + bias)`.

use crate::images::kernel;
use crate::tensors::{Tile, are_aligned};
use tch::{Device, Kind, Tensor};
use tch_extension::autograd::{Context, Function, Inputs, Saver, Tensors, apply};
use tch_extension::cuda::{Grid, device_properties};
use tch_extension::strided::contiguous;
use tch_extension::{Error, Result};

const OP: &str = "matmul_add_relu";

/// The rows and columns of a tile, as in `kernels/src/main.rs`.
fn tile(kind: Kind, aligned: bool) -> [i32; 2] {
    match (kind, aligned) {
        (Kind::Half | Kind::BFloat16, true) => [128, 128],
        (Kind::Half | Kind::BFloat16, false) | (_, true) => [64, 64],
        (_, false) => [32, 32],
    }
}

/// The number of blocks. A large tile keeps a multiprocessor busy, and its block computes one tile after
/// another. Of smaller tiles, a multiprocessor needs several that wait for memory in turns.
fn blocks(device: Device, tiles: u32, tile: [i32; 2]) -> Result<u32> {
    if tile[0] * tile[1] < 128 * 128 {
        return Ok(tiles);
    }
    Ok(tiles.min(device_properties(device)?.multi_processor_count))
}

struct MatmulAddRelu;

impl Function for MatmulAddRelu {
    const NAME: &'static str = OP;
    const DOUBLE_BACKWARD: bool = true;

    fn forward(&mut self, saver: &mut Saver<'_>, inputs: Inputs<'_>) -> Result<Tensors> {
        let (x, y, bias) = (inputs.get(0)?, inputs.get(1)?, inputs.get(2)?);
        let z = match x.device() {
            Device::Cpu => on_cpu(x, y, bias)?,
            device => forward(device, x, y, bias)?,
        };
        saver.save(x);
        saver.save(y);
        // A gradient flows where the result is positive; this needs no graph.
        saver.save(&z);
        Ok(z.into())
    }

    fn backward(&self, ctx: &Context<'_>, grads: &Tensors) -> Result<Tensors> {
        let (x, y, z) = (ctx.saved(0)?, ctx.saved(1)?, ctx.saved(2)?);
        // As libtorch's relu: 0 where z is 0, and the gradient itself where z is NaN.
        let g = grads.get(0)?.f_masked_fill(&z.detach().f_le(0.0)?, 0.0)?;
        let wanted = |index| ctx.needs_input_grad(index);
        Ok(vec![
            wanted(0).then(|| g.f_matmul(&y.f_transpose(0, 1)?)).transpose()?,
            wanted(1).then(|| x.f_transpose(0, 1)?.f_matmul(&g)).transpose()?,
            wanted(2).then(|| g.f_sum_dim_intlist(&[0i64][..], false, g.kind())).transpose()?,
        ]
        .into())
    }
}

/// `relu(x @ y + bias)` of `[M, K]`, `[K, N]` and `[N]`, in f64, f32, f16 or bf16, of any strides. Half
/// kinds are summed in f32 and rounded once. NaN stays NaN.
///
/// Equivalent to: `(x.matmul(y) + bias).relu()`.
///
/// # Errors
/// When shapes, kinds or devices do not fit, there is no image for the kind, or libtorch or CUDA
/// fails.
pub fn matmul_add_relu(x: &Tensor, y: &Tensor, bias: &Tensor) -> Result<Tensor> {
    let (sizes, kind, device) = (x.size(), x.kind(), x.device());
    let argument = |name, expected: String, got: &Tensor| {
        Error::argument(OP, name, expected, format!("{got:?}"), "")
    };
    let is_known = matches!(kind, Kind::Half | Kind::BFloat16 | Kind::Float | Kind::Double);
    let &[_, k] = sizes.as_slice() else {
        return Err(argument("x", "[M, K]".into(), x));
    };
    if !is_known {
        return Err(argument("x", "f64, f32, f16 or bf16".into(), x));
    }
    let fits = |tensor: &Tensor| tensor.kind() == kind && tensor.device() == device;
    if !fits(y) || y.dim() != 2 || y.size()[0] != k {
        return Err(argument("y", format!("[{k}, N] of {kind:?} on {device:?}"), y));
    }
    let n = y.size()[1];
    if !fits(bias) || bias.size() != [n] {
        return Err(argument("bias", format!("[{n}] of {kind:?} on {device:?}"), bias));
    }
    apply(MatmulAddRelu, &[Some(x), Some(y), Some(bias)])?.single()
}

/// Half kinds are computed in f32 and rounded once, as the kernel does.
fn on_cpu(x: &Tensor, y: &Tensor, bias: &Tensor) -> Result<Tensor> {
    let kind = x.kind();
    let wide = if kind == Kind::Double { Kind::Double } else { Kind::Float };
    let product = x.f_to_kind(wide)?.f_matmul(&y.f_to_kind(wide)?)?;
    Ok(product.f_add(&bias.f_to_kind(wide)?)?.f_relu()?.f_to_kind(kind)?)
}

fn forward(device: Device, x: &Tensor, y: &Tensor, bias: &Tensor) -> Result<Tensor> {
    let kind = x.kind();
    let (x, y, bias) = (contiguous(x)?, contiguous(y)?, contiguous(bias)?);
    let z = Tensor::f_empty([x.size()[0], y.size()[1]], (kind, device))?;
    if z.numel() == 0 {
        return Ok(z);
    }
    if x.size()[1] == 0 {
        // A tensor without elements has no address that a kernel could be given.
        return Ok(z.f_zeros_like()?.f_add(&bias)?.f_relu()?);
    }
    let aligned = are_aligned(&[&x, &y, &z, &bias]);
    let kernel = kernel(OP, kind, aligned, device)?;
    let tile = tile(kind, aligned);
    let z_tile = Tile::new(OP, &z, tile)?;
    let (x, y) = (Tile::new(OP, &x, [1, 1])?, Tile::new(OP, &y, [1, 1])?);
    let bias = Tile::new(OP, &bias, [1])?;
    let mut params = z_tile.output();
    for input in [x.input(), y.input(), bias.input()] {
        params.extend(input);
    }
    let [rows, columns] = z_tile.tiles();
    let blocks = blocks(device, rows.saturating_mul(columns), tile)?;
    let grid = Grid::new([blocks, 1, 1], [1, 1, 1]);
    // SAFETY: these are the kernel's parameters: contiguous tensors on this device, of its kind, whose
    // sizes fit, aligned as it was compiled for. It accesses nothing outside of them. libtorch keeps
    // memory that was dropped for later work on the same stream.
    unsafe { kernel.launch(device, grid, &params)? };
    Ok(z)
}
