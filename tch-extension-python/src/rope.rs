//! `rope`.

use crate::meta::{Shapes, nothing as no_fake};
use crate::node::{below, call, is_eager, kernel, nothing};
use tch::Tensor;
use tch_extension::autograd::{Context, Function, Inputs, Saver, Tensors, apply};
use tch_extension::library::{below_autograd, sizes};
use tch_extension::ops::{RopeOptions, f_rope, parts, rope_reference};
use tch_extension::{Error, Result};

tch_extension::operators! {
    namespace tch_extension;

    /// Rotary position embedding of `q`, `[B, T, H, D]`, and `k`, `[B, T, Hk, D]`, by the tables `cos` and
    /// `sin`, `[P, R / 2]`, from row `offset` on. The pairs are (i, i + R / 2) or, if `interleaved`,
    /// (2i, 2i + 1). A graph of torch.compile holds for one `offset`: in a loop of single tokens pass
    /// `cos[offset:]` and `sin[offset:]` in its place.
    fn rope(
        q: &Tensor,
        k: &Tensor,
        cos: &Tensor,
        sin: &Tensor,
        interleaved: bool = false,
        offset: i64 = 0,
    ) -> (Tensor, Tensor) {
        cpu, cuda = own,
        fake = |q, k, cos, sin, _interleaved, offset| {
            check(Some(q), Some(k), [cos, sin], offset)?;
            Ok((q.f_empty_like()?, k.f_empty_like()?))
        },
        autograd = autograd,
    }

    /// The rotation of those of `q` and `k` that are there, or its inverse, which is its gradient.
    fn rope_rotate(
        q: Option<&Tensor>,
        k: Option<&Tensor>,
        cos: &Tensor,
        sin: &Tensor,
        interleaved: bool,
        offset: i64,
        inverse: bool,
    ) -> (Tensor, Tensor) {
        cpu, cuda = rotate,
        fake = |q, k, cos, sin, _interleaved, offset, _inverse| {
            check(q, k, [cos, sin], offset)?;
            let like = |tensor: Option<&Tensor>| match tensor {
                Some(tensor) => Ok(tensor.f_empty_like()?),
                None => no_fake(cos),
            };
            Ok((like(q)?, like(k)?))
        },
        autograd = rotate_autograd,
    }
}

/// What the fake kernels check.
fn check(
    q: Option<&Tensor>,
    k: Option<&Tensor>,
    [cos, sin]: [&Tensor; 2],
    offset: i64,
) -> Result<()> {
    if offset < 0 {
        return Err(Error::argument("rope", "offset", "0 or more", offset.to_string(), ""));
    }
    let (name, first) = match (q, k) {
        (Some(q), _) => ("q", q),
        (None, k) => ("k", k.unwrap_or(cos)),
    };
    let shapes = Shapes::of("rope", name, first)?
        .has("q", q, &["B", "T", "H", "D"])?
        .has("k", k, &["B", "T", "Hk", "D"])?
        .has("cos", cos, &["P", "pairs"])?
        .has("sin", sin, &["P", "pairs"])?;
    let [positions, steps, pairs, size] = ["P", "T", "pairs", "D"].map(|name| shapes.known(name));
    let is_short = positions.zip(steps).is_some_and(|(p, steps)| p - steps < offset);
    let is_wide = pairs.zip(size).is_some_and(|(pairs, size)| 2 * pairs > size);
    if is_short || is_wide {
        let expected = "shape [P, R / 2] with P ≥ offset + T and R ≤ D";
        return Err(Error::argument("rope", "cos", expected, format!("{:?}", sizes(cos)), ""));
    }
    Ok(())
}

fn own(
    q: &Tensor,
    k: &Tensor,
    cos: &Tensor,
    sin: &Tensor,
    interleaved: bool,
    offset: i64,
) -> Result<(Tensor, Tensor)> {
    let options = RopeOptions { interleaved, offset, in_place: false };
    below(|| {
        let (new_q, new_k) = f_rope(q, k, cos, sin, &options)?;
        Ok((laid_out_like(new_q, q)?, laid_out_like(new_k, k)?))
    })
}

fn autograd(
    q: &Tensor,
    k: &Tensor,
    cos: &Tensor,
    sin: &Tensor,
    interleaved: bool,
    offset: i64,
) -> Result<(Tensor, Tensor)> {
    let options = RopeOptions { interleaved, offset, in_place: false };
    if is_eager(&[Some(q), Some(k), Some(cos), Some(sin)]) {
        return f_rope(q, k, cos, sin, &options);
    }
    if cos.requires_grad() || sin.requires_grad() {
        return rope_reference(q, k, cos, sin, &options);
    }
    rotated(Rotation { interleaved, offset, inverse: false }, [Some(q), Some(k)], [cos, sin])
}

fn rotate(
    q: Option<&Tensor>,
    k: Option<&Tensor>,
    cos: &Tensor,
    sin: &Tensor,
    interleaved: bool,
    offset: i64,
    inverse: bool,
) -> Result<(Tensor, Tensor)> {
    let options = RopeOptions { interleaved, offset, in_place: false };
    kernel(|| {
        let [new_q, new_k] = parts::rope_rotate([q, k], [cos, sin], &options, inverse)?;
        let laid_out = |made: Option<Tensor>, like: Option<&Tensor>| match made.zip(like) {
            Some((made, like)) => laid_out_like(made, like),
            None => nothing(cos),
        };
        Ok((laid_out(new_q, q)?, laid_out(new_k, k)?))
    })
}

fn rotate_autograd(
    q: Option<&Tensor>,
    k: Option<&Tensor>,
    cos: &Tensor,
    sin: &Tensor,
    interleaved: bool,
    offset: i64,
    inverse: bool,
) -> Result<(Tensor, Tensor)> {
    if cos.requires_grad() || sin.requires_grad() {
        let expected = "tables without gradient";
        let got = "one that requires grad";
        return Err(Error::argument("rope_rotate", "cos and sin", expected, got, "call rope"));
    }
    rotated(Rotation { interleaved, offset, inverse }, [q, k], [cos, sin])
}

/// A result in the strides that libtorch gives to a result of an elementwise operation on this tensor,
/// which a fake kernel can compute. They differ only where the values of a head are not adjacent.
fn laid_out_like(result: Tensor, tensor: &Tensor) -> Result<Tensor> {
    if result.is_contiguous() && tensor.is_contiguous() {
        return Ok(result);
    }
    let mut wanted = tensor.f_empty_like()?;
    let strides = wanted.stride().into_iter().zip(result.stride());
    let are_equal =
        wanted.size().into_iter().zip(strides).all(|(size, (a, b))| size <= 1 || a == b);
    if are_equal {
        return Ok(result);
    }
    wanted.f_copy_(&result)?;
    Ok(wanted)
}

/// A rotation or its inverse, which is its gradient.
struct Rotation {
    interleaved: bool,
    offset: i64,
    inverse: bool,
}

/// The rotated tensors that are there; an empty one (`[0]`) in the place of another.
fn rotated(
    rotation: Rotation,
    [q, k]: [Option<&Tensor>; 2],
    [cos, sin]: [&Tensor; 2],
) -> Result<(Tensor, Tensor)> {
    Ok(apply(rotation, &[q, k, Some(cos), Some(sin)])?.exactly::<2>()?.into())
}

impl Rotation {
    fn call(&self, tensors: Inputs<'_>) -> Result<Vec<Tensor>> {
        let (q, k) = (tensors.optional(0), tensors.optional(1));
        let (cos, sin) = (tensors.get(2)?, tensors.get(3)?);
        let Rotation { interleaved, offset, inverse } = *self;
        if let (Some(q), Some(k), false) = (q, k, inverse) {
            return call!("rope", q, k, cos, sin, interleaved, offset);
        }
        call!("rope_rotate", q, k, cos, sin, interleaved, offset, inverse)
    }
}

impl Function for Rotation {
    const NAME: &'static str = "rope";
    const DOUBLE_BACKWARD: bool = true;
    const WITHOUT_AUTOCAST: bool = true;

    fn forward(&mut self, saver: &mut Saver<'_>, inputs: Inputs<'_>) -> Result<Tensors> {
        let results = below_autograd(|| self.call(inputs))?;
        (2..4).for_each(|place| saver.save_optional(inputs.optional(place)));
        let absent = (0..2).filter(|&place| inputs.optional(place).is_none());
        absent.for_each(|place| saver.mark_non_differentiable(place));
        saver.set_materialize_grads(false);
        Ok(results.into())
    }

    fn backward(&self, ctx: &Context<'_>, grads: &Tensors) -> Result<Tensors> {
        let wanted =
            [0, 1].map(|place| grads.optional(place).filter(|_| ctx.needs_input_grad(place)));
        if wanted.iter().all(Option::is_none) {
            return Ok([None, None, None, None].into());
        }
        let (cos, sin) = (ctx.saved(0)?.f_detach()?, ctx.saved(1)?.f_detach()?);
        let Rotation { interleaved, offset, inverse } = *self;
        // By the dispatcher, because a backward pass runs above the levels of torch.func, each of which
        // records the call then. From here, `rotated` would be recorded by the innermost one only.
        let [q, k] = wanted;
        let (q, k): (Tensor, Tensor) =
            call!("rope_rotate", q, k, &cos, &sin, interleaved, offset, !inverse)?;
        let there = |made: Tensor, wanted: Option<&Tensor>| wanted.map(|_| made);
        Ok([there(q, wanted[0]), there(k, wanted[1]), None, None].into())
    }
}
