//! `y = x / (1 + exp(-x))`.

use crate::images::kernel;
use crate::tensors::{Tile, are_aligned};
use tch::{Device, Kind, Tensor};
use tch_extension::autograd::{
    Context, Function, Inputs, Saver, Tensors, apply, differentiate_reference,
};
use tch_extension::cuda::Grid;
use tch_extension::strided::contiguous;
use tch_extension::{Error, Result};

/// The elements of a tile, as in `kernels/src/main.rs`.
const TILE: i32 = 1024;

struct Silu;

impl Function for Silu {
    const NAME: &'static str = "silu";
    const DOUBLE_BACKWARD: bool = true;

    fn forward(&mut self, saver: &mut Saver<'_>, inputs: Inputs<'_>) -> Result<Tensors> {
        let x = inputs.get(0)?;
        saver.save(x);
        Ok(match x.device() {
            Device::Cpu => x.f_silu()?,
            device => launch("silu", device, &[x])?,
        }
        .into())
    }

    fn backward(&self, ctx: &Context<'_>, grads: &Tensors) -> Result<Tensors> {
        let x = ctx.saved(0)?;
        if ctx.create_graph() {
            return differentiate_reference(ctx, &[Some(x)], grads, |inputs| match &inputs[0] {
                Some(x) => Ok(x.f_silu()?.into()),
                None => Err(Error::msg("silu: x is missing")),
            });
        }
        let g = grads.get(0)?;
        Ok(match x.device() {
            Device::Cpu => x.f_silu_backward(g)?.into(),
            device => launch("silu_backward", device, &[&x, g])?.into(),
        })
    }
}

/// `x / (1 + exp(-x))`, element by element, in f64, f32, f16 or bf16 and of any shape and strides. On
/// CUDA the result is contiguous.
///
/// Equivalent to: `x.silu()`.
///
/// # Errors
/// When the kind is another, there is no image for it, or libtorch or CUDA fails.
pub fn silu(x: &Tensor) -> Result<Tensor> {
    if !matches!(x.kind(), Kind::Half | Kind::BFloat16 | Kind::Float | Kind::Double) {
        return Err(Error::argument(
            "silu",
            "x",
            "f64, f32, f16 or bf16",
            format!("{:?}", x.kind()),
            "",
        ));
    }
    apply(Silu, &[Some(x)])?.single()
}

/// Calls an elementwise kernel with tensors of one shape and kind.
fn launch(function: &'static str, device: Device, inputs: &[&Tensor]) -> Result<Tensor> {
    let first = inputs[0];
    let output = Tensor::f_empty(first.size(), (first.kind(), device))?;
    if output.numel() == 0 {
        return Ok(output);
    }
    let flat = |tensor: &Tensor| -> Result<Tensor> { Ok(contiguous(tensor)?.f_view([-1])?) };
    let inputs = inputs.iter().map(|tensor| flat(tensor)).collect::<Result<Vec<_>>>()?;
    let y = flat(&output)?;
    let all: Vec<&Tensor> = inputs.iter().chain([&y]).collect();
    let kernel = kernel(function, first.kind(), are_aligned(&all), device)?;
    let y = Tile::new(function, &y, [TILE])?;
    let tiles = inputs
        .iter()
        .map(|tensor| Tile::new(function, tensor, [TILE]))
        .collect::<Result<Vec<_>>>()?;
    let mut params = y.output();
    params.extend(tiles.iter().flat_map(Tile::input));
    let grid = Grid::new([y.tiles()[0], 1, 1], [1, 1, 1]);
    // SAFETY: these are the kernel's parameters: contiguous tensors on this device, of its kind, of
    // one size, aligned as it was compiled for. It accesses nothing outside of them. libtorch keeps
    // memory that was dropped for later work on the same stream.
    unsafe { kernel.launch(device, grid, &params)? };
    Ok(output)
}
