//! Mixed kinds, as libtorch promotes them.

use tch::Kind;

/// The kind of a sum of two floating kinds.
pub(super) fn promote(a: Kind, b: Kind) -> Kind {
    let digits = |kind| match kind {
        Kind::Double => 3,
        Kind::Float => 2,
        _ => 1,
    };
    match digits(a).cmp(&digits(b)) {
        std::cmp::Ordering::Less => b,
        std::cmp::Ordering::Greater => a,
        std::cmp::Ordering::Equal if a == b => a,
        // Half has more digits, BFloat16 more range.
        std::cmp::Ordering::Equal => Kind::Float,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tch::{Device, Tensor};

    #[test]
    fn kinds_are_promoted_as_libtorch_does() {
        let kinds = [Kind::Half, Kind::BFloat16, Kind::Float, Kind::Double];
        for (a, b) in kinds.into_iter().flat_map(|a| kinds.map(|b| (a, b))) {
            let ones = |kind| Tensor::ones([2], (kind, Device::Cpu));
            assert_eq!(promote(a, b), (ones(a) + ones(b)).kind(), "{a:?} {b:?}");
        }
    }
}
