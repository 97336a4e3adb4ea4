//! Autocast for your own operators.

use super::Autocast;
use crate::Result;
use crate::ffi::amp::cached_cast;
use tch::{Kind, Tensor};

/// The kind to which an operator's inputs are cast when autocast is on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CastPolicy {
    /// The kind of the autocast region. Use it for matrix products.
    LowerPrecision,
    /// `Float`. Use it for operations that need the precision, such as sums and exponentials.
    Float,
}

/// Casts an operator's inputs as autocast casts them. Returns `None` if autocast is off and nothing
/// has to be cast. This is `torch.amp.custom_fwd` in Python, but it uses the device of the first
/// input, and its casts are differentiable: call it before [`apply`](crate::autograd::apply), not
/// in the forward pass. Then set
/// [`Function::WITHOUT_AUTOCAST`](crate::autograd::Function::WITHOUT_AUTOCAST), so that autocast changes
/// nothing in the forward and backward pass.
///
/// As for libtorch's own operators, inputs of floating-point kinds other than `Double` on that
/// device are cast, and casts of leaves that require grad are cached for the region.
///
/// ```
/// use tch::{Device, Kind, Tensor};
/// use tch_extension::amp::{Autocast, CastPolicy, autocast_inputs};
///
/// fn my_product(x: &Tensor, w: &Tensor) -> tch_extension::Result<Tensor> {
///     if let Some(cast) = autocast_inputs(CastPolicy::LowerPrecision, &[Some(x), Some(w)])? {
///         let [Some(x), Some(w)] = &cast[..] else { unreachable!("as many as came") };
///         return Ok(x.f_mm(w)?); // stands for the operator
///     }
///     Ok(x.f_mm(w)?)
/// }
///
/// let x = Tensor::ones([2, 2], (Kind::Float, Device::Cpu));
/// let _autocast = Autocast::new(Device::Cpu, Kind::BFloat16)?;
/// assert_eq!(my_product(&x, &x)?.kind(), Kind::BFloat16);
/// # Ok::<(), tch_extension::Error>(())
/// ```
///
/// # Errors
/// An error of libtorch.
pub fn autocast_inputs(
    policy: CastPolicy,
    inputs: &[Option<&Tensor>],
) -> Result<Option<Vec<Option<Tensor>>>> {
    let Some(device) =
        inputs.iter().flatten().find(|input| input.defined()).map(|input| input.device())
    else {
        return Ok(None);
    };
    let Some(lower) = Autocast::kind(device) else { return Ok(None) };
    let kind = if policy == CastPolicy::Float { Kind::Float } else { lower };
    let cast = |input: &Option<&Tensor>| match input {
        Some(input) if input.defined() => cached_cast(input, kind, device).map(Some),
        other => Ok(other.map(Tensor::shallow_clone)),
    };
    inputs.iter().map(cast).collect::<Result<Vec<_>>>().map(Some)
}

#[cfg(test)]
mod tests {
    use super::*;
    use tch::Device;

    #[test]
    fn inputs_are_cast_as_libtorch_casts_them() {
        let cpu = |kind| Tensor::ones([2], (kind, Device::Cpu));
        let kinds = [Kind::Float, Kind::Double, Kind::Half, Kind::BFloat16, Kind::Int64];
        let inputs: Vec<Tensor> = kinds.into_iter().map(cpu).collect();
        let inputs: Vec<Option<&Tensor>> = inputs.iter().map(Some).chain([None]).collect();
        let found = |policy| {
            let cast = autocast_inputs(policy, &inputs).unwrap()?;
            Some(cast.iter().map(|input| input.as_ref().map(Tensor::kind)).collect::<Vec<_>>())
        };
        assert_eq!(found(CastPolicy::LowerPrecision), None);
        let _autocast = Autocast::new(Device::Cpu, Kind::BFloat16).unwrap();
        let (half, float, double, int) =
            (Some(Kind::BFloat16), Some(Kind::Float), Some(Kind::Double), Some(Kind::Int64));
        assert_eq!(
            found(CastPolicy::LowerPrecision),
            Some(vec![half, double, half, half, int, None])
        );
        assert_eq!(found(CastPolicy::Float), Some(vec![float, double, float, float, int, None]));
        assert!(autocast_inputs(CastPolicy::Float, &[None, None]).unwrap().is_none());
        let weight = cpu(Kind::Float).set_requires_grad(true);
        let once = |weight: &Tensor| {
            let cast =
                autocast_inputs(CastPolicy::LowerPrecision, &[Some(weight)]).unwrap().unwrap();
            cast.into_iter().flatten().next().unwrap()
        };
        assert_eq!(once(&weight).data_ptr(), once(&weight).data_ptr(), "kept");
        assert!(once(&weight).requires_grad());
    }
}
