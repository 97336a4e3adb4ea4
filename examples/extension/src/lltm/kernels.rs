//! Level 4: our own kernels for the CPU and CUDA (`csrc/lltm/kernels.{h,cpp,cu}`), which follow
//! libtorch's product. They support kinds f32 and f64.

use super::function::{Pointwise, step};
use tch::{Kind, Tensor};
use tch_extension::strided::{Strided, StridedMut};
use tch_extension::{Result, check, kernels};

/// Everything in a step that follows the product for the gates, which are in the order i, o, g.
#[repr(C)]
struct Forward<'a> {
    /// `[B, 3H]`; σ(i) and σ(o) are written back for the backward.
    gates: StridedMut<'a, 2>,
    /// `[B, H]`
    c: Strided<'a, 2>,
    /// `[B, H]`
    new_h: StridedMut<'a, 2>,
    /// `[B, H]`
    new_c: StridedMut<'a, 2>,
}

/// The backward of that.
#[repr(C)]
struct Backward<'a> {
    /// `[B, 3H]`: σ(i), σ(o), g
    activations: Strided<'a, 2>,
    /// `[B, H]`
    new_c: Strided<'a, 2>,
    /// `[B, H]`
    grad_new_h: Strided<'a, 2>,
    /// `[B, H]`
    grad_new_c: Strided<'a, 2>,
    /// `[B, 3H]`
    grad_gates: StridedMut<'a, 2>,
    /// `[B, H]`
    grad_c: StridedMut<'a, 2>,
}

kernels! {
    "lltm":
    // SAFETY: the kernels go over the elements of `c`. `lltm` checked the shapes and kinds of its
    // arguments, the other tensors are made to fit, and the autograd engine gives incoming
    // gradients the outputs' shapes and kinds.
    unsafe fn run_forward(Forward { gates, c, new_h, new_c }) =
        extension_lltm_forward_cpu, extension_lltm_forward_cuda;
    unsafe fn run_backward(
        Backward { activations, new_c, grad_new_h, grad_new_c, grad_gates, grad_c }
    ) = extension_lltm_backward_cpu, extension_lltm_backward_cuda;
}

/// Computes one step.
///
/// # Errors
/// If shapes, kinds or devices do not fit. The error names the argument.
pub fn lltm(
    x: &Tensor,
    w: &Tensor,
    b: &Tensor,
    (h, c): (&Tensor, &Tensor),
) -> Result<(Tensor, Tensor)> {
    const OP: &str = "lltm";
    let x_check = check!(OP, x)
        .kind_in(&[Kind::Float, Kind::Double])?
        .supported_device()?
        .dim(2, "[B, F]")?;
    let (batch, features) = x.size2()?;
    check!(OP, h).like(&x_check)?.dim(2, "[B, H]")?;
    let hidden = h.size2()?.1;
    check!(OP, h).shape("[B, H]", &[batch, hidden])?;
    check!(OP, c).like(&x_check)?.shape("[B, H]", &[batch, hidden])?;
    check!(OP, w).like(&x_check)?.shape("[3H, H + F]", &[3 * hidden, hidden + features])?;
    check!(OP, b).like(&x_check)?.shape("[3H]", &[3 * hidden])?;
    step::<Kernels>([x, w, b, h, c])
}

struct Kernels;

impl Pointwise for Kernels {
    const NAME: &'static str = "extension::lltm_kernels";

    fn forward(mut gates: Tensor, c: &Tensor) -> Result<[Tensor; 3]> {
        let empty = || Tensor::f_empty(c.size(), (c.kind(), c.device()));
        let (mut new_h, mut new_c) = (empty()?, empty()?);
        let params = Forward {
            gates: StridedMut::new(&mut gates)?,
            c: Strided::new(c)?,
            new_h: StridedMut::new(&mut new_h)?,
            new_c: StridedMut::new(&mut new_c)?,
        };
        run_forward(&params)?;
        Ok([new_h, new_c, gates])
    }

    fn backward(
        dh: &Tensor,
        dc: &Tensor,
        activations: &Tensor,
        new_c: &Tensor,
    ) -> Result<[Tensor; 2]> {
        let empty = |like: &Tensor| Tensor::f_empty(like.size(), (like.kind(), like.device()));
        let (mut grad_gates, mut grad_c) = (empty(activations)?, empty(new_c)?);
        let params = Backward {
            activations: Strided::new(activations)?,
            new_c: Strided::new(new_c)?,
            grad_new_h: Strided::new(dh)?,
            grad_new_c: Strided::new(dc)?,
            grad_gates: StridedMut::new(&mut grad_gates)?,
            grad_c: StridedMut::new(&mut grad_c)?,
        };
        run_backward(&params)?;
        Ok([grad_gates, grad_c])
    }
}
