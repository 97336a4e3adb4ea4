//! The linear layer: our fused operator compared with libtorch's own and with the composite of
//! product and sum.

use crate::common::{Case, Provider, Work};
use crate::draw::{Draw, MOST_PRODUCTS};
use tch::{Device, Kind, Tensor};
use tch_extension::Result;
use tch_extension::ops::{f_linear, linear_reference};

/// (M, K, N).
const SIZES: [(i64, i64, i64); 4] =
    [(16, 32, 128), (512, 256, 512), (1024, 1024, 1024), (4096, 64, 1024)];

type Linear = fn(&Tensor, &Tensor, Option<&Tensor>) -> Result<Tensor>;

fn composite(input: &Tensor, weight: &Tensor, bias: Option<&Tensor>) -> Result<Tensor> {
    let product = input.f_matmul(&weight.f_transpose(0, 1)?)?;
    Ok(bias.map_or_else(|| Ok(product.shallow_clone()), |bias| product.f_add(bias))?)
}

fn provider(name: &'static str, linear: Linear) -> Provider {
    Provider::new(name, move |inputs| Ok(vec![linear(&inputs[0], &inputs[1], Some(&inputs[2]))?]))
}

/// Sizes that are measured in `BFloat16` on CUDA.
const HALF_SIZES: [(i64, i64, i64); 4] =
    [(16, 32, 128), (256, 1024, 1024), (4096, 1024, 1024), (8192, 1024, 4096)];

pub fn of_size((m, k, n): (i64, i64, i64), kind: Kind, device: Device) -> Case {
    Case {
        operator: "linear",
        point: format!("{:?}", (m, k, n)),
        kind,
        device,
        tf32: false,
        inputs: vec![(vec![m, k], 1.0), (vec![n, k], 1.0 / (k as f64).sqrt()), (vec![n], 1.0)],
        // The forward pass reads x and W and writes y. The backward pass reads x, W and dy and
        // writes the gradients of x and W.
        work: [1, 2]
            .map(|times| Work::new(kind, times * (m * k + k * n) + m * n, times * 2 * m * k * n)),
        providers: vec![
            provider("composite", composite),
            provider("libtorch", linear_reference),
            provider("fused", f_linear),
        ],
    }
}

/// A case with drawn sizes; a batch adds a leading dimension.
pub fn drawn(draw: &mut Draw, kind: Kind, device: Device) -> Case {
    let [batch, m, k, n] = product(draw);
    let mut case = of_size((batch * m, k, n), kind, device);
    if batch > 1 {
        case.point = format!("{:?}", (batch, m, k, n));
        case.inputs[0].0 = vec![batch, m, k];
    }
    case
}

/// (batch, M, K, N). Half of the products have no batch.
pub fn product(draw: &mut Draw) -> [i64; 4] {
    let batch = if draw.one_in(2) { 1 } else { draw.size(32, 1) };
    let [m, k, n] = draw.sizes([8192; 3], MOST_PRODUCTS / batch);
    [batch, m, k, n]
}

pub fn cases(device: Device) -> Vec<Case> {
    let mut cases: Vec<Case> =
        SIZES.into_iter().map(|size| of_size(size, Kind::Float, device)).collect();
    if device.is_cuda() {
        cases.extend(HALF_SIZES.into_iter().map(|size| of_size(size, Kind::BFloat16, device)));
    }
    cases
}
