//! Layer normalisation: our fused operator compared with the composite of tch operations and with
//! libtorch's own operator.

use crate::common::{Case, Provider, Work};
use crate::draw::Draw;
use tch::{Device, Kind, Tensor};
use tch_extension::Result;
use tch_extension::ops::{f_layer_norm, layer_norm_reference};

/// (M, N). The small sizes fit in the caches. The large ones, on CUDA, are as large as those with
/// which libtorch, Liger and Quack are measured.
const SMALL: [(i64, i64); 2] = [(256, 1024), (8192, 1024)];
const LARGE: [(i64, i64); 5] =
    [(65536, 256), (32768, 1024), (16384, 4096), (8192, 8192), (4096, 16384)];

const EPS: f64 = 1e-5;

type Op = fn(&Tensor, &[i64], Option<&Tensor>, Option<&Tensor>, f64) -> Result<Tensor>;

fn libtorch(
    input: &Tensor,
    normalized_shape: &[i64],
    weight: Option<&Tensor>,
    bias: Option<&Tensor>,
    eps: f64,
) -> Result<Tensor> {
    Ok(input.f_layer_norm(normalized_shape, weight, bias, eps, true)?)
}

/// Takes a weight and a bias if there are any among the inputs.
fn provider(name: &'static str, op: Op) -> Provider {
    Provider::new(name, move |inputs| match inputs {
        [x, w, b] => Ok(vec![op(x, &w.size(), Some(w), Some(b), EPS)?]),
        [x, ..] => Ok(vec![op(x, &x.size()[1..], None, None, EPS)?]),
        [] => unreachable!("a tensor"),
    })
}

struct Point {
    size: (i64, i64),
    kind: Kind,
    affine: bool,
}

/// These sizes fit in the caches: short and long rows, few and many rows, and rows that are not a
/// whole number of vectors.
const ON_CPU: [(i64, i64); 6] =
    [(1, 1024), (64, 4096), (256, 1024), (8192, 64), (1000, 777), (2048, 1024)];

fn points(device: Device) -> Vec<Point> {
    let affine = |size, kind| Point { size, kind, affine: true };
    if device.is_cuda() {
        let sizes = || SMALL.iter().chain(&LARGE).copied();
        let kinds = [Kind::Float, Kind::BFloat16];
        return kinds
            .iter()
            .flat_map(|&kind| sizes().map(move |size| affine(size, kind)))
            .collect();
    }
    let of = |size: (i64, i64)| {
        let plain = Point { size, kind: Kind::Float, affine: false };
        // libtorch sums the parameters' gradients in bf16. With more rows its result would be too
        // inaccurate to compare.
        let half = (size.0 < 4096).then(|| affine(size, Kind::BFloat16));
        [affine(size, Kind::Float), plain].into_iter().chain(half)
    };
    ON_CPU.into_iter().flat_map(of).chain([affine((8192, 1024), Kind::Float)]).collect()
}

pub fn cases(device: Device) -> Vec<Case> {
    points(device).into_iter().map(|point| case(point, device)).collect()
}

/// A case with drawn sizes.
pub fn drawn(draw: &mut Draw, kind: Kind, device: Device) -> Case {
    case(Point { size: draw.rows_and_columns(70_000), kind, affine: !draw.one_in(8) }, device)
}

/// With a weight and a bias.
pub fn of_size(size: (i64, i64), kind: Kind, device: Device) -> Case {
    case(Point { size, kind, affine: true }, device)
}

fn case(Point { size: (m, n), kind, affine }: Point, device: Device) -> Case {
    let parameters = [(vec![n], 1.0), (vec![n], 1.0)];
    let mut providers = vec![
        provider("composite", layer_norm_reference),
        provider("libtorch", libtorch),
        provider("fused", f_layer_norm),
    ];
    if !device.is_cuda() {
        // On the CPU, libtorch's own operator is the rival; the composite is many times slower than
        // both.
        providers.remove(0);
    }
    Case {
        operator: "layer_norm",
        point: format!("{:?}{}", (m, n), if affine { "" } else { " not affine" }),
        kind,
        device,
        tf32: false,
        inputs: [(vec![m, n], 1.0)]
            .into_iter()
            .chain(parameters.into_iter().filter(|_| affine))
            .collect(),
        // The forward pass reads x and writes y; the backward pass reads x and dy and writes dx.
        work: [2, 3].map(|arrays| Work::new(kind, arrays * m * n, 0)),
        providers,
    }
}
