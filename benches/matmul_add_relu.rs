//! `relu(lhs @ rhs + bias)`: our fused operator compared with the composite of three operations.
//! libtorch has a fused operator for the forward pass of matrices and a bias row; there it is
//! compared, too.

use crate::common::{Case, Provider, Work};
use crate::draw::Draw;
use crate::linear::product;
use tch::{Device, Kind, Tensor};
use tch_extension::Result;
use tch_extension::ops::{f_matmul_add_relu, matmul_add_relu_reference};

/// The sizes of lhs, rhs and bias.
type Size = (&'static [i64], &'static [i64], &'static [i64]);

/// Sizes that are measured in `Float` on the CPU and on CUDA.
const SIZES: [Size; 6] = [
    (&[16, 32], &[32, 128], &[128]),
    (&[512, 256], &[256, 512], &[512]),
    (&[1024, 1024], &[1024, 1024], &[1024]),
    (&[4096, 64], &[64, 1024], &[1024]),
    // The sizes of Burn's example.
    (&[1, 32, 32], &[32, 32, 32], &[32, 32, 32]),
    (&[16, 256, 256], &[256, 256], &[16, 256, 256]),
];

/// Sizes that are measured on the CPU only, from short K, where the product is a small part of the
/// work, to long K, where it is most of it.
const ON_CPU: [Size; 6] = [
    (&[64, 16], &[16, 256], &[256]),
    (&[1024, 64], &[64, 256], &[256]),
    (&[256, 128], &[128, 256], &[256]),
    (&[64, 256], &[256, 1024], &[1024]),
    (&[128, 512], &[512, 512], &[512]),
    (&[37, 101], &[101, 75], &[75]),
];

/// Products of matrices with a bias row on CUDA, where libtorch has a fused operator: (M, K, N).
const MATRICES: [(i64, i64, i64); 23] = [
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
    (4096, 512, 2048),
    (4096, 2048, 2048),
    (8192, 4096, 4096),
    (16384, 256, 1024),
];

/// Batches that are measured in `BFloat16` on CUDA.
const BATCHES: [Size; 3] = [
    (&[16, 1024, 1024], &[16, 1024, 1024], &[16, 1024, 1024]),
    (&[16, 1024, 1024], &[1, 1024, 1024], &[1, 1, 1024]),
    (&[1, 1024, 1024], &[16, 1024, 1024], &[16, 1024, 1024]),
];

/// Sizes that are measured in `BFloat16` on CUDA, including the backward pass.
const TRAINING: [Size; 2] =
    [(&[4096, 1024], &[1024, 1024], &[1024]), (&[8192, 1024], &[1024, 4096], &[4096])];

type Operator = fn(&Tensor, &Tensor, &Tensor) -> Result<Tensor>;

fn libtorch(lhs: &Tensor, rhs: &Tensor, bias: &Tensor) -> Result<Tensor> {
    // torch-sys 0.24 passes `use_gelu` on as the factor of the bias. `true` means a factor of 1,
    // and the activation stays ReLU.
    Ok(bias.f_internal_addmm_activation(lhs, rhs, true)?)
}

fn provider(name: &'static str, operator: Operator) -> Provider {
    Provider::new(name, move |inputs| Ok(vec![operator(&inputs[0], &inputs[1], &inputs[2])?]))
}

/// The forward pass reads the inputs and writes y. The backward pass reads the factors, y and dY,
/// and writes the gradients of the inputs.
fn work(kind: Kind, lhs: &[i64], rhs: &[i64], bias: &[i64]) -> [Work; 2] {
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

fn case((lhs, rhs, bias): (&[i64], &[i64], &[i64]), kind: Kind, device: Device) -> Case {
    let mut providers = vec![provider("composite", matmul_add_relu_reference)];
    if (lhs.len(), rhs.len(), bias.len()) == (2, 2, 1) {
        providers.push(provider("libtorch", libtorch).without_backward());
    }
    providers.push(provider("fused", f_matmul_add_relu));
    let scale = 1.0 / (lhs[lhs.len() - 1] as f64).sqrt();
    Case {
        operator: "matmul_add_relu",
        point: format!("{lhs:?} {rhs:?} {bias:?}"),
        kind,
        device,
        tf32: false,
        inputs: vec![(lhs.to_vec(), 1.0), (rhs.to_vec(), scale), (bias.to_vec(), 1.0)],
        work: work(kind, lhs, rhs, bias),
        providers,
    }
}

/// A case with drawn sizes.
pub fn drawn(draw: &mut Draw, kind: Kind, device: Device) -> Case {
    let [batch, m, k, n] = product(draw);
    let has_full_bias = draw.one_in(5);
    match (batch, has_full_bias) {
        (1, _) => case((&[m, k], &[k, n], &[n]), kind, device),
        (_, true) => case((&[batch, m, k], &[batch, k, n], &[batch, m, n]), kind, device),
        (_, false) => case((&[batch, m, k], &[batch, k, n], &[n]), kind, device),
    }
}

/// The sizes of `MATRICES`. There are many, so only the forward pass is measured.
fn matrices(kind: Kind, tf32: bool, device: Device) -> impl Iterator<Item = Case> {
    // In strict f32, some of these sizes are already in `SIZES`.
    let new = move |&(m, k, n): &(i64, i64, i64)| {
        kind != Kind::Float || tf32 || SIZES.iter().all(|size| size.0 != [m, k] || size.2 != [n])
    };
    MATRICES.into_iter().filter(new).map(move |(m, k, n)| {
        let case = case((&[m, k], &[k, n], &[n]), kind, device);
        let providers = case.providers.into_iter().map(Provider::without_backward).collect();
        Case { providers, tf32, ..case }
    })
}

pub fn cases(device: Device) -> Vec<Case> {
    let mut cases: Vec<Case> =
        SIZES.into_iter().map(|size| case(size, Kind::Float, device)).collect();
    if !device.is_cuda() {
        cases.extend(ON_CPU.into_iter().map(|size| case(size, Kind::Float, device)));
        return cases;
    }
    cases
        .extend(BATCHES.into_iter().chain(TRAINING).map(|size| case(size, Kind::BFloat16, device)));
    for (kind, tf32) in
        [(Kind::Float, false), (Kind::Float, true), (Kind::Half, false), (Kind::BFloat16, false)]
    {
        cases.extend(matrices(kind, tf32, device));
    }
    cases
}
