//! The least time that a GPU needs for an operator's work: the time of copying as many bytes, or
//! the time of as many operations at the rate of a large product, whichever is longer. Both are
//! measured in the same run.

use crate::clock::{OnTheGpu, median};
use crate::common::{Case, Direction};
use std::fmt;
use tch::{Device, Kind, Tensor};
use tch_extension::cuda::Stream;

const ROUNDS: usize = 9;

/// What limits the operator.
#[derive(Clone, Copy)]
pub enum Bound {
    Memory,
    Products,
}

impl fmt::Display for Bound {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Bound::Memory => "a copy of as many bytes",
            Bound::Products => "as many operations at a large product's rate",
        })
    }
}

pub struct Floor {
    pub bound: Bound,
    pub micros: f64,
}

/// Measures floors, and keeps the rate of each kind of product so that it is measured only once.
#[derive(Default)]
pub struct Floors {
    rates: Vec<(String, Option<f64>)>,
}

impl Floors {
    /// The floor of a case; `None` on the CPU, where caches make the time of a copy meaningless.
    pub fn of(&mut self, case: &Case, direction: Direction) -> Option<Floor> {
        if !case.device.is_cuda() {
            return None;
        }
        let work = case.work(direction);
        if work.bytes == 0 {
            return None;
        }
        let memory = Floor { bound: Bound::Memory, micros: copy(case.device, work.bytes)? };
        if work.operations == 0 {
            return Some(memory);
        }
        let micros = work.operations as f64 / self.rate(case)?;
        let products = Floor { bound: Bound::Products, micros };
        Some(if memory.micros > products.micros { memory } else { products })
    }

    /// The number of operations in a microsecond, in the case's arithmetic.
    fn rate(&mut self, case: &Case) -> Option<f64> {
        let arithmetic = case.arithmetic();
        if let Some((_, rate)) = self.rates.iter().find(|(known, _)| *known == arithmetic) {
            return *rate;
        }
        let rate = large_product(case.device, case.kind);
        self.rates.push((arithmetic, rate));
        rate
    }
}

/// The time, in microseconds, of a copy that reads and writes `bytes` bytes in total: the shorter of
/// the driver's copy and an elementwise kernel. On some machines the driver's copy of a gigabyte is
/// slower than kernels that compute something.
fn copy(device: Device, bytes: usize) -> Option<f64> {
    let array = || Tensor::zeros([bytes.div_ceil(8) as i64], (Kind::Float, device));
    let (from, mut to) = (array(), array());
    let by_driver = time(device, bytes, &mut || to.copy_(&from))?;
    let by_kernel = time(device, bytes, &mut || drop(from.neg_out(&to)))?;
    Some(by_driver.min(by_kernel))
}

/// The rate of a product that fills the chip. Its values are random as in real use; with zeros the
/// rate would be higher.
fn large_product(device: Device, kind: Kind) -> Option<f64> {
    let size = if kind.elt_size_in_bytes() < 4 { 8192 } else { 4096 };
    let factor = || Tensor::randn([size, size], (kind, device));
    let (lhs, rhs) = (factor(), factor());
    let micros = time(device, usize::MAX, &mut || drop(lhs.matmul(&rhs)))?;
    Some(2.0 * (size as f64).powi(3) / micros)
}

fn time(device: Device, bytes: usize, call: &mut impl FnMut()) -> Option<f64> {
    call();
    let mut graph = OnTheGpu::capture(&Stream::new(device).ok()?, bytes, call).ok()?;
    Some(median((0..ROUNDS).map(|_| graph.time()).collect()))
}
