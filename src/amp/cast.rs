//! What autocast does to the inputs of this crate's own operators.

use super::Autocast;
use crate::Result;
use crate::ffi::amp::cached_cast;
use tch::{Kind, Tensor};

/// libtorch's list that an operator is on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Policy {
    /// Runs in autocast's kind: matrix products.
    LowerPrecision,
    /// Runs in `Float`: what needs the digits.
    Float,
}

/// An operator's inputs as autocast has them: cast by the policy on the first one's device, if autocast is on there
/// and the kind is one that it casts (floating, not `Double`). The casts are differentiable, and those of weights are
/// kept for the region. `None` when there is nothing to do.
pub(crate) fn autocast_inputs(
    policy: Policy,
    inputs: &[Option<&Tensor>],
) -> Result<Option<Vec<Option<Tensor>>>> {
    let Some(device) = inputs.iter().flatten().find(|input| input.defined()).map(|input| input.device())
    else {
        return Ok(None);
    };
    let Some(lower) = Autocast::kind(device) else { return Ok(None) };
    let kind = if policy == Policy::Float { Kind::Float } else { lower };
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
        assert_eq!(found(Policy::LowerPrecision), None);
        let _autocast = Autocast::new(Device::Cpu, Kind::BFloat16).unwrap();
        let (half, float, double, int) =
            (Some(Kind::BFloat16), Some(Kind::Float), Some(Kind::Double), Some(Kind::Int64));
        assert_eq!(found(Policy::LowerPrecision), Some(vec![half, double, half, half, int, None]));
        assert_eq!(found(Policy::Float), Some(vec![float, double, float, float, int, None]));
        assert!(autocast_inputs(Policy::Float, &[None, None]).unwrap().is_none());
        let weight = cpu(Kind::Float).set_requires_grad(true);
        let once = |weight: &Tensor| {
            let cast = autocast_inputs(Policy::LowerPrecision, &[Some(weight)]).unwrap().unwrap();
            cast.into_iter().flatten().next().unwrap()
        };
        assert_eq!(once(&weight).data_ptr(), once(&weight).data_ptr(), "kept");
        assert!(once(&weight).requires_grad());
    }
}
