//! What a call of ours and of cuDNN cost: products, kernels per step and the host.

use super::tf32::Tf32;
use crate::ops::recurrent::plan::{Direction, Sizes};
use tch::Kind;

/// A cost in microseconds, forward and backward.
#[derive(Clone, Copy, Debug)]
pub(super) struct Both(pub(super) [f64; 2]);

impl Both {
    pub(super) fn of(self, direction: Direction) -> f64 {
        self.0[if direction == Direction::Forward { 0 } else { 1 }]
    }
}

/// What all steps of a call cost in microseconds: the GPU, and the host for its launches of single
/// steps.
#[derive(Clone, Copy, Debug)]
pub(super) struct Call {
    pub(super) gpu: f64,
    pub(super) launches: f64,
}

impl Call {
    /// `of` says what a step costs both.
    pub(super) fn of_all(
        directions: &[Direction],
        steps: i64,
        of: impl Fn(Direction) -> (f64, f64),
    ) -> Call {
        let none = Call { gpu: 0.0, launches: 0.0 };
        directions.iter().fold(none, |sum, &direction| {
            let (gpu, host) = of(direction);
            let all = |of_step: f64| steps as f64 * of_step;
            Call { gpu: sum.gpu + all(gpu), launches: sum.launches + all(host) }
        })
    }

    /// The GPU waits for the host, or the host for the GPU.
    pub(super) fn time(self, host: f64) -> f64 {
        self.gpu.max(host + self.launches)
    }
}

/// What a call takes the host, in microseconds, apart from launches of single steps.
pub(super) struct Host {
    pub(super) of_ours: f64,
    pub(super) of_cudnn: f64,
    /// What cuDNN takes in addition if the parameters have to be moved to one piece of memory.
    pub(super) flattening: f64,
}

// The host's times were measured next to an H200 and an H100 (docs/lab/lstm.md).

/// The forward alone, and both directions.
pub(super) const HOST: [Host; 2] = [
    Host { of_ours: 50.0, of_cudnn: 70.0, flattening: 350.0 },
    Host { of_ours: 480.0, of_cudnn: 630.0, flattening: 850.0 },
];

/// Its launches for a step: by our kernels, a product and a kernel; by cuDNN.
pub(super) const STEP_OF_OURS: Both = Both([22.0, 30.0]);
pub(super) const STEP_OF_CUDNN: Both = Both([14.0, 22.0]);

/// What products cost, and what those ways cost that have no tables, all per step in microseconds.
/// These are lines through measurements on an H200 (docs/lab/lstm.md).
#[derive(Clone, Copy, Debug)]
pub(super) struct Products {
    pub(super) kind: Kind,
    pub(super) tf32: Tf32,
    pub(super) gates: i64,
    pub(super) batch: f64,
    pub(super) hidden: i64,
    /// The product with h in half kinds, forward. The one with the input takes as long if there are
    /// as many features; there are two of each, backward.
    pub(super) one: f64,
    pub(super) of_input: f64,
}

impl Products {
    pub(super) fn new(gates: i64, sizes: Sizes, kind: Kind, tf32: Tf32) -> Products {
        const OPERATIONS: f64 = 550e6;
        let Sizes { batch, features, hidden, .. } = sizes;
        let column = 2.0 * batch as f64 * (gates * hidden) as f64 / OPERATIONS;
        Products {
            kind,
            tf32,
            gates,
            batch: batch as f64,
            hidden,
            one: column * hidden as f64,
            of_input: column * features as f64,
        }
    }

    /// How many times as long libtorch's products take in this kind as in half kinds.
    pub(super) fn slowdown(self) -> f64 {
        if matches!(self.kind, Kind::Half | Kind::BFloat16) { 1.0 } else { 13.0 }
    }

    /// How many times as long a product of a step takes as its share of a large one: in strict `Float`
    /// tiles have more rows than there are.
    pub(super) fn share_of_tiles(self, is_tf32: bool) -> f64 {
        const OTHER_ROWS: f64 = 32.0;
        const MOST: f64 = 2.0;
        let is_strict = self.kind == Kind::Float && !is_tf32;
        if is_strict { 1.0 + (OTHER_ROWS / self.batch.max(1.0)).min(MOST) } else { 1.0 }
    }

    /// Those over all steps at once.
    pub(super) fn at_once(self, direction: Direction) -> f64 {
        let slowdown = |is_tf32| if is_tf32 { 2.0 } else { self.slowdown() };
        let of_input = slowdown(self.tf32.input) * self.of_input;
        let of_weights = slowdown(self.tf32.weights) * (self.of_input + self.one);
        match direction {
            Direction::Forward => of_input,
            Direction::Backward => of_input + of_weights,
        }
    }

    /// A product and a kernel for each step, without what is done at once.
    pub(super) fn step_by_step(self, direction: Direction) -> f64 {
        let product = self.slowdown() * self.one * self.share_of_tiles(self.tf32.steps(direction));
        match direction {
            Direction::Forward => 11.0 + product,
            Direction::Backward => 12.0 + product,
        }
    }

    /// cuDNN's whole step, and what its launches take the host.
    pub(super) fn of_cudnn(self) -> [Both; 2] {
        match self.of_cudnns_persistent() {
            Some(costs) => [Both(costs), Both([0.0; 2])],
            None => [Both(self.of_cudnns()), STEP_OF_CUDNN],
        }
    }

    /// Its kernels that keep small weights on the chip, if it has any, forward and backward.
    pub(super) fn of_cudnns_persistent(self) -> Option<[f64; 2]> {
        const NARROWEST: i64 = 64;
        const NARROW: i64 = 128;
        const WIDE: i64 = 1024;
        const FEW_ROWS: f64 = 32.0;
        let (rows, is_lstm) = (self.batch, self.gates == 4);
        let line = |fixed: f64, rows_per_microsecond: f64| fixed + rows / rows_per_microsecond;
        // Wide ones have whole tiles.
        let is_tiled = self.hidden % 128 == 0 && rows % 8.0 == 0.0;
        match (self.kind, self.hidden) {
            (Kind::Half, ..=NARROWEST) if is_lstm => Some([line(1.0, 2500.0), line(1.4, 95.0)]),
            (Kind::Half, ..=NARROWEST) => Some([line(1.0, 2000.0), line(1.0, 39.0)]),
            (Kind::Half, ..=NARROW) if is_lstm => Some([line(1.4, 88.0), line(2.3, 36.0)]),
            (Kind::Half, ..=NARROW) => Some([line(0.6, 165.0), line(1.0, 34.0)]),
            (Kind::Half, ..=WIDE) if is_lstm && is_tiled && rows <= FEW_ROWS => {
                let columns = self.hidden as f64;
                Some([1.1 + columns / 1000.0, 2.2 + columns / 300.0])
            }
            (Kind::Float, ..=NARROWEST) if is_lstm => Some([line(0.4, 400.0), line(1.5, 110.0)]),
            (Kind::Float, ..=NARROWEST) => Some([line(0.45, 400.0), line(1.0, 22.0)]),
            (Kind::Float, ..=NARROW) if is_lstm => Some([line(1.6, 78.0), line(2.2, 36.0)]),
            (Kind::Float, ..=NARROW) => Some([line(0.6, 150.0), line(1.6, 20.0)]),
            _ => None,
        }
    }

    /// Its kernels for each step, forward and backward.
    pub(super) fn of_cudnns(self) -> [f64; 2] {
        const SOME_ROWS: f64 = 128.0;
        const WIDE: i64 = 1024;
        let is_tf32 = self.tf32.is_allowed;
        let once = (self.one + self.of_input) * self.share_of_tiles(is_tf32);
        let rows = self.batch;
        let is_tiled = self.hidden % 128 == 0 && self.hidden <= WIDE && rows % 8.0 == 0.0;
        match self.kind {
            Kind::Half if self.gates == 4 && is_tiled && rows < SOME_ROWS => {
                [4.8 + 1.5 * once, 8.5 + 2.5 * once]
            }
            Kind::Half | Kind::BFloat16 => [8.0 + once, 10.0 + 2.0 * once + rows / 100.0],
            Kind::Float if is_tf32 => [8.0 + 2.2 * once, 18.0 + 5.0 * once],
            _ => [13.0 + 11.5 * once, 25.0 + 23.5 * once],
        }
    }
}
