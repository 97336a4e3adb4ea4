//! `relu(lhs @ rhs + bias)`: fused against the composite of three operations, and against libtorch's fused one where
//! it has one: forward, of matrices and a row.

use crate::common::{Case, Provider, Work};
use tch::{Device, Kind, Tensor};
use tch_extension::Result;
use tch_extension::ops::{f_matmul_add_relu, matmul_add_relu_reference};

/// The sizes of lhs, rhs and bias.
type Size = (&'static [i64], &'static [i64], &'static [i64]);

const SIZES: [Size; 6] = [
    (&[16, 32], &[32, 128], &[128]),
    (&[512, 256], &[256, 512], &[512]),
    (&[1024, 1024], &[1024, 1024], &[1024]),
    (&[4096, 64], &[64, 1024], &[1024]),
    // Burn's example.
    (&[1, 32, 32], &[32, 32, 32], &[32, 32, 32]),
    (&[16, 256, 256], &[256, 256], &[16, 256, 256]),
];

type Operator = fn(&Tensor, &Tensor, &Tensor) -> Result<Tensor>;

fn libtorch(lhs: &Tensor, rhs: &Tensor, bias: &Tensor) -> Result<Tensor> {
    // torch-sys 0.24 hands `use_gelu` on as the factor of the bias: true is 1, and the activation stays ReLU.
    Ok(bias.f_internal_addmm_activation(lhs, rhs, true)?)
}

fn provider(name: &'static str, operator: Operator) -> Provider {
    Provider::new(name, move |inputs| Ok(vec![operator(&inputs[0], &inputs[1], &inputs[2])?]))
}

/// The inputs and y are read or written; in the backward the factors with their gradients, y and dY.
fn work(kind: Kind, (lhs, rhs, bias): Size) -> [Work; 2] {
    let elements = |size: &[i64]| size.iter().product::<i64>();
    let matrices = |size: &[i64]| elements(&size[..size.len() - 2]);
    let (rows, inner, columns) = (lhs[lhs.len() - 2], lhs[lhs.len() - 1], rhs[rhs.len() - 1]);
    let outputs = matrices(lhs).max(matrices(rhs)) * rows * columns;
    let (factors, operations) = (elements(lhs) + elements(rhs), 2 * outputs * inner);
    [
        Work::new(kind, factors + elements(bias) + outputs, operations),
        Work::new(kind, 2 * (factors + outputs) + elements(bias), 2 * operations),
    ]
}

pub fn cases(device: Device) -> Vec<Case> {
    let case = |size: Size| {
        let (lhs, rhs, bias) = size;
        let mut providers = vec![provider("composite", matmul_add_relu_reference)];
        if (lhs.len(), rhs.len(), bias.len()) == (2, 2, 1) {
            providers.push(provider("libtorch", libtorch).without_backward());
        }
        providers.push(provider("fused", f_matmul_add_relu));
        let scale = 1.0 / (lhs[lhs.len() - 1] as f64).sqrt();
        Case {
            operator: "matmul_add_relu",
            point: format!("{lhs:?} {rhs:?} {bias:?}"),
            kind: Kind::Float,
            device,
            tf32: false,
            inputs: vec![(lhs.to_vec(), 1.0), (rhs.to_vec(), scale), (bias.to_vec(), 1.0)],
            work: work(Kind::Float, size),
            providers,
        }
    };
    SIZES.into_iter().map(case).collect()
}
