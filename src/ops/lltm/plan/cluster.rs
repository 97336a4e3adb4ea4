//! What LLTM's clusters cost, and when they are faster than other ways.

use super::step::cost_step_by_step;
use crate::ops::recurrent::kernels::device::Clusters;
use crate::ops::recurrent::plan::cluster::{Entry, Kernel};
use crate::ops::recurrent::plan::{Direction, Product, Sizes};
use tch::Kind;

/// The kernels by their products and hidden sizes. Those with the smallest sufficient H are
/// compared. In strict `Float` and `Double`, two blocks per multiprocessor have not been measured
/// in the backward pass.
#[rustfmt::skip]
const KERNELS: [Entry; 14] = {
    use Product::{Double, Float, Half, Scaled};
    [
        Entry::new(Half,   128, 8,  [2, 2], [Some(48),  Some(68)]),
        Entry::new(Half,   256, 8,  [2, 2], [Some(112), Some(95)]),
        Entry::new(Half,   512, 16, [1, 1], [Some(109), Some(98)]),
        Entry::new(Half,   512, 8,  [1, 1], [Some(150), Some(139)]),
        Entry::new(Half,   768, 16, [1, 1], [Some(174), Some(160)]),
        Entry::new(Scaled, 128, 8,  [2, 2], [Some(50),  Some(77)]),
        Entry::new(Scaled, 256, 8,  [2, 2], [Some(109), Some(109)]),
        Entry::new(Scaled, 512, 16, [1, 1], [Some(115), Some(107)]),
        Entry::new(Scaled, 512, 8,  [1, 1], [Some(156), Some(166)]),
        Entry::new(Scaled, 768, 16, [1, 1], [Some(175), Some(182)]),
        Entry::new(Float,  128, 8,  [2, 1], [Some(91),  Some(139)]),
        Entry::new(Float,  256, 16, [1, 1], [Some(112), None]),
        Entry::new(Double, 128, 8,  [2, 1], [Some(175), Some(287)]),
        Entry::new(Double, 256, 16, [1, 1], [Some(181), None]),
    ]
};

/// The fastest kernel for these sizes, if there is one.
pub(super) fn new(
    direction: Direction,
    sizes: Sizes,
    product: Kind,
    tf32: bool,
    clusters: Clusters,
) -> Option<Kernel> {
    Kernel::new((&KERNELS, super::VALUES), direction, sizes, product, tf32, clusters)
}

/// Whether it beats per-step kernels.
pub(super) fn is_faster(
    kernel: &Kernel,
    direction: Direction,
    sizes: Sizes,
    product: Kind,
) -> bool {
    /// Fewer steps are over before the weights have been loaded.
    const FEW: i64 = 8;
    /// What a step costs the other ways at least, forward and backward, in the same hundredths
    /// of a microsecond and in two launches. With so many rows that the GPU takes longer than
    /// the host, clusters take longer, too.
    const OTHERS: [i64; 2] = [900, 1100];

    let [forward, backward] = OTHERS;
    let is_plain = product == Kind::Double || product == Kind::Float && !kernel.tf32;
    let others = match direction {
        _ if is_plain => cost_step_by_step(direction, sizes),
        Direction::Forward => forward,
        Direction::Backward => backward,
    };
    sizes.steps >= FEW && kernel.cost(sizes.batch) <= others
}

#[cfg(test)]
mod tests {
    use super::*;

    const H200: Clusters = Clusters::H200;

    fn sizes(steps: i64, batch: i64, hidden: i64) -> Sizes {
        Sizes { steps, batch, features: hidden, hidden }
    }

    fn kernel(
        direction: Direction,
        sizes: Sizes,
        kind: Kind,
        tf32: bool,
        clusters: Clusters,
    ) -> Option<i64> {
        new(direction, sizes, kind, tf32, clusters).map(|kernel| kernel.cluster)
    }

    #[test]
    fn kernels_suit_the_size() {
        use Direction::{Backward, Forward};
        let of = |direction, batch, hidden| {
            kernel(direction, sizes(512, batch, hidden), Kind::Half, false, H200)
        };
        assert_eq!(of(Forward, 16, 128), Some(8));
        assert_eq!(of(Forward, 4096, 256), Some(8));
        assert_eq!(of(Forward, 56, 512), Some(16));
        assert_eq!(of(Forward, 57, 512), Some(8));
        assert_eq!(of(Backward, 120, 512), Some(8));
        assert_eq!(of(Forward, 57, 768), Some(16));
        let tf32 = |direction, batch, hidden| {
            kernel(direction, sizes(512, batch, hidden), Kind::Float, true, H200)
        };
        for direction in [Forward, Backward] {
            assert_eq!(tf32(direction, 16, 128), Some(8));
            assert_eq!(tf32(direction, 16, 512), Some(16));
            assert_eq!(tf32(direction, 57, 512), Some(8));
            assert_eq!(tf32(direction, 16, 768), Some(16));
            assert_eq!(tf32(direction, 16, 769), None);
        }
    }

    #[test]
    fn float_is_multiplied_in_tf32_where_that_is_allowed() {
        let of = |kind, tf32| {
            new(Direction::Forward, sizes(512, 16, 128), kind, tf32, H200).map(|kernel| kernel.tf32)
        };
        assert_eq!(of(Kind::Float, true), Some(true));
        assert_eq!(of(Kind::Float, false), Some(false));
        assert_eq!(of(Kind::Double, true), Some(false));
        assert_eq!(of(Kind::BFloat16, true), Some(false));
    }

    #[test]
    fn what_may_not_be_rounded_has_larger_kernels_forward() {
        for kind in [Kind::Float, Kind::Double] {
            let of =
                |direction, hidden| kernel(direction, sizes(512, 16, hidden), kind, false, H200);
            assert_eq!(of(Direction::Forward, 128), Some(8));
            assert_eq!(of(Direction::Backward, 128), Some(8));
            assert_eq!(of(Direction::Forward, 129), Some(16));
            assert_eq!(of(Direction::Forward, 256), Some(16));
            assert_eq!(of(Direction::Backward, 129), None);
            assert_eq!(of(Direction::Forward, 257), None);
        }
    }

    #[test]
    fn they_are_taken_where_they_are_faster() {
        let faster = |direction, steps, batch, hidden, kind| {
            let sizes = sizes(steps, batch, hidden);
            new(direction, sizes, kind, false, H200)
                .is_some_and(|kernel| is_faster(&kernel, direction, sizes, kind))
        };
        for direction in [Direction::Forward, Direction::Backward] {
            assert!(faster(direction, 512, 16, 128, Kind::Double));
            assert!(faster(direction, 512, 120, 128, Kind::Float));
            assert!(faster(direction, 512, 1024, 128, Kind::Half));
            assert!(faster(direction, 512, 112, 768, Kind::Half));
            // Too few steps to pay for the weights.
            assert!(!faster(direction, 7, 16, 128, Kind::Half));
            assert!(!faster(direction, 512, 4096, 512, Kind::Half));
            // Clusters that run in several rounds, for a size at which per-step kernels take less
            // time.
            assert!(!faster(direction, 512, 2000, 5, Kind::Float));
        }
    }

    #[test]
    fn there_is_a_kernel_where_the_weights_fit() {
        let cluster = |clusters, batch, hidden| {
            kernel(Direction::Forward, sizes(512, batch, hidden), Kind::Half, false, clusters)
        };
        assert_eq!(cluster(H200, 57, 768), Some(16));
        assert_eq!(cluster(H200, 1, 769), None);
        // A GPU, or a part of one, without clusters of 16; and one without any clusters.
        let part = Clusters { of_8: 1, of_16: 0 };
        assert_eq!(cluster(part, 16, 512), Some(8));
        assert_eq!(cluster(part, 16, 513), None);
        assert_eq!(cluster(Clusters::default(), 16, 4), None);
        // As much as the kernel can count, more than that, and more than any memory holds.
        assert_eq!(cluster(H200, 1 << 18, 4), Some(8));
        assert_eq!(cluster(H200, 1 << 19, 4), None);
        assert_eq!(cluster(H200, i64::MAX, 4), None);
    }
}
