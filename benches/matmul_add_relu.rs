//! `relu(lhs @ rhs + bias)`: fused against the composite of three operations, and against libtorch's fused one where
//! it has one: forward, of matrices and a row.

use crate::common::{Case, Provider};
use criterion::Throughput;
use tch::{Device, Kind, Tensor};
use tch_extension::Result;
use tch_extension::ops::{f_matmul_add_relu, matmul_add_relu_reference};

/// The sizes of lhs, rhs and bias.
type Size = (&'static [i64], &'static [i64], &'static [i64]);

/// In `Float`, on the CPU, too.
const SIZES: [Size; 6] = [
    (&[16, 32], &[32, 128], &[128]),
    (&[512, 256], &[256, 512], &[512]),
    (&[1024, 1024], &[1024, 1024], &[1024]),
    (&[4096, 64], &[64, 1024], &[1024]),
    // Burn's example.
    (&[1, 32, 32], &[32, 32, 32], &[32, 32, 32]),
    (&[16, 256, 256], &[256, 256], &[16, 256, 256]),
];

/// Of matrices and a row on CUDA, where libtorch has a fused operator: (M, K, N).
const MATRICES: [(i64, i64, i64); 22] = [
    (1, 1024, 1024),
    (8, 1024, 1024),
    (16, 32, 128),
    (32, 1024, 4096),
    (48, 2048, 48),
    (64, 256, 256),
    (64, 4096, 512),
    (100, 300, 200),
    (128, 512, 512),
    (192, 3072, 768),
    (256, 1024, 1024),
    (333, 555, 777),
    (512, 256, 512),
    (512, 2048, 1024),
    (1000, 1000, 1000),
    (1024, 1024, 1024),
    (2048, 512, 256),
    (2048, 768, 3072),
    (4096, 64, 1024),
    (4096, 1024, 1024),
    (8192, 1024, 4096),
    (16384, 256, 1024),
];

/// Batches in `BFloat16` on CUDA.
const BATCHES: [Size; 3] = [
    (&[16, 1024, 1024], &[16, 1024, 1024], &[16, 1024, 1024]),
    (&[16, 1024, 1024], &[1, 1024, 1024], &[1, 1, 1024]),
    (&[1, 1024, 1024], &[16, 1024, 1024], &[16, 1024, 1024]),
];

type Operator = fn(&Tensor, &Tensor, &Tensor) -> Result<Tensor>;

fn libtorch(lhs: &Tensor, rhs: &Tensor, bias: &Tensor) -> Result<Tensor> {
    // torch-sys 0.24 hands `use_gelu` on as the factor of the bias: true is 1, and the activation stays ReLU.
    Ok(bias.f_internal_addmm_activation(lhs, rhs, true)?)
}

fn provider(name: &'static str, operator: Operator) -> Provider {
    Provider::new(name, move |inputs| Ok(vec![operator(&inputs[0], &inputs[1], &inputs[2])?]))
}

/// The multiplications and additions of the product.
fn operations(lhs: &[i64], rhs: &[i64]) -> u64 {
    let matrices = |size: &[i64]| size[..size.len() - 2].iter().product::<i64>();
    let (rows, inner, columns) = (lhs[lhs.len() - 2], lhs[lhs.len() - 1], rhs[rhs.len() - 1]);
    (2 * matrices(lhs).max(matrices(rhs)) * rows * inner * columns) as u64
}

fn case((lhs, rhs, bias): (&[i64], &[i64], &[i64]), kind: Kind, device: Device) -> Case {
    let mut providers = vec![provider("composite", matmul_add_relu_reference)];
    if (lhs.len(), rhs.len(), bias.len()) == (2, 2, 1) {
        providers.push(provider("libtorch", libtorch).without_backward());
    }
    providers.push(provider("fused", f_matmul_add_relu));
    let scale = 1.0 / (lhs[lhs.len() - 1] as f64).sqrt();
    // Where a product in a half kind and a bias cancel, providers that round it and those that do not differ in the
    // sign, and so in the whole derivative. With small products that happens to few, and counts for little.
    let lhs_scale = if kind == Kind::Float { 1.0 } else { 1e-6 };
    Case {
        operator: "matmul_add_relu",
        point: format!("{lhs:?} {rhs:?} {bias:?}"),
        kind,
        device,
        inputs: vec![(lhs.to_vec(), lhs_scale), (rhs.to_vec(), scale), (bias.to_vec(), 1.0)],
        work: Throughput::Elements(operations(lhs, rhs)),
        traffic: None,
        providers,
    }
}

pub fn cases(device: Device) -> Vec<Case> {
    let mut cases: Vec<Case> = SIZES.into_iter().map(|size| case(size, Kind::Float, device)).collect();
    if device.is_cuda() {
        for kind in [Kind::BFloat16, Kind::Half, Kind::Float] {
            let matrices = MATRICES.into_iter().filter(|&(m, k, n)| {
                kind != Kind::Float || SIZES.iter().all(|size| size.0 != [m, k] || size.2 != [n])
            });
            cases.extend(matrices.map(|(m, k, n)| case((&[m, k], &[k, n], &[n]), kind, device)));
        }
        cases.extend(BATCHES.into_iter().map(|size| case(size, Kind::BFloat16, device)));
    }
    cases
}
