//! Level 4: our own kernels for the CPU and CUDA (`csrc/linear/kernels.{h,cpp,cu}`), for kinds f32
//! and f64 and any strides.

use super::function::second_derivative;
use tch::{Kind, Tensor};
use tch_extension::autograd::{Context, Function, Inputs, Saver, Tensors, apply};
use tch_extension::strided::{Strided, StridedMut};
use tch_extension::{Result, check, kernels};

/// y = x Wᵀ + b
#[repr(C)]
struct Forward<'a> {
    /// `[M, K]`
    x: Strided<'a, 2>,
    /// `[K, N]`
    wt: Strided<'a, 2>,
    /// `[N]`
    b: Strided<'a, 1>,
    /// `[M, N]`
    y: StridedMut<'a, 2>,
}

/// c = a b
#[repr(C)]
struct Product<'a> {
    /// `[M, K]`
    a: Strided<'a, 2>,
    /// `[K, N]`
    b: Strided<'a, 2>,
    /// `[M, N]`
    c: StridedMut<'a, 2>,
}

kernels! {
    "linear":
    // SAFETY: the kernels go over the elements of `y` and `c`, and over K of the other operands.
    // `linear` checked the shapes and kinds of its arguments, and the autograd engine gives the
    // incoming gradient the output's.
    unsafe fn run_forward(Forward { x, wt, b, y }) =
        extension_linear_forward_cpu, extension_linear_forward_cuda;
    unsafe fn run_product(Product { a, b, c }) =
        extension_linear_product_cpu, extension_linear_product_cuda;
}

/// Computes `x Wᵀ + b`.
///
/// # Errors
/// If shapes, kinds or devices do not fit. The error names the argument.
pub fn linear(x: &Tensor, w: &Tensor, b: &Tensor) -> Result<Tensor> {
    const OP: &str = "linear";
    let x_check = check!(OP, x)
        .kind_in(&[Kind::Float, Kind::Double])?
        .supported_device()?
        .dim(2, "[M, K]")?;
    let columns = x.size2()?.1;
    check!(OP, w).like(&x_check)?.dim(2, "[N, K]")?;
    let rows = w.size2()?.0;
    check!(OP, w).shape("[N, K]", &[rows, columns])?;
    check!(OP, b).like(&x_check)?.shape("[N]", &[rows])?;
    apply(Linear, &[Some(x), Some(w), Some(b)])?.single()
}

struct Linear;

impl Function for Linear {
    const NAME: &'static str = "extension::linear_kernels";
    const DOUBLE_BACKWARD: bool = true;

    fn forward(&mut self, saver: &mut Saver<'_>, inputs: Inputs<'_>) -> Result<Tensors> {
        let (x, w, b) = (inputs.get(0)?, inputs.get(1)?, inputs.get(2)?);
        saver.save(x);
        saver.save(w);
        saver.save(b);
        Ok(forward(x, w, b)?.into())
    }

    fn backward(&self, ctx: &Context<'_>, grads: &Tensors) -> Result<Tensors> {
        // Kernels have no derivative, but the same maths in tch operations has one.
        if ctx.create_graph() {
            return second_derivative(ctx, grads);
        }
        let (x, w) = (ctx.saved(0)?, ctx.saved(1)?);
        let dy = grads.get(0)?;
        let needs = |index| ctx.needs_input_grad(index);
        let dx = needs(0).then(|| product(dy, &w)).transpose()?;
        let dw = needs(1).then(|| product(&dy.f_transpose(0, 1)?, &x)).transpose()?;
        let db = needs(2).then(|| dy.f_sum_dim_intlist([0_i64].as_slice(), false, dy.kind()));
        Ok([dx, dw, db.transpose()?].into())
    }
}

fn forward(x: &Tensor, w: &Tensor, b: &Tensor) -> Result<Tensor> {
    let wt = w.f_transpose(0, 1)?;
    let mut y = Tensor::f_empty([x.size()[0], w.size()[0]], (x.kind(), x.device()))?;
    let params = Forward {
        x: Strided::new(x)?,
        wt: Strided::new(&wt)?,
        b: Strided::new(b)?,
        y: StridedMut::new(&mut y)?,
    };
    run_forward(&params)?;
    Ok(y)
}

/// Computes `a b`.
fn product(a: &Tensor, b: &Tensor) -> Result<Tensor> {
    let mut c = Tensor::f_empty([a.size()[0], b.size()[1]], (a.kind(), a.device()))?;
    let params = Product { a: Strided::new(a)?, b: Strided::new(b)?, c: StridedMut::new(&mut c)? };
    run_product(&params)?;
    Ok(c)
}
