//! Two linear layers with a GELU between them, compared with libtorch's operations.

use crate::common::{Case, Provider, Work};
use crate::draw::{Draw, MOST_PRODUCTS};
use tch::{Device, Kind, Tensor};
use tch_extension::Result;
use tch_extension::ops::{Activation, GeluMlpOptions, f_gelu_mlp, gelu_mlp_reference};

/// (M, D, H).
const ON_CUDA: [(i64, i64, i64); 3] =
    [(4096, 512, 2048), (16_384, 768, 3072), (8192, 4096, 16_384)];
const ON_CPU: [(i64, i64, i64); 3] = [(16, 64, 256), (128, 256, 1024), (1024, 64, 256)];

type Op = fn(
    &Tensor,
    &Tensor,
    Option<&Tensor>,
    &Tensor,
    Option<&Tensor>,
    &GeluMlpOptions,
) -> Result<Tensor>;

fn provider(name: &'static str, op: Op, options: GeluMlpOptions) -> Provider {
    Provider::new(name, move |inputs| {
        let [x, w1, b1, w2, b2] = inputs else { panic!("five inputs") };
        Ok(vec![op(x, w1, Some(b1), w2, Some(b2), &options)?])
    })
}

/// The size and the standard deviation of each tensor.
pub fn inputs((m, d, h): (i64, i64, i64)) -> Vec<(Vec<i64>, f64)> {
    let [of_d, of_h] = [d, h].map(|size| (size as f64).sqrt().recip());
    vec![
        (vec![m, d], 1.0),
        (vec![h, d], of_d),
        (vec![h], of_h),
        (vec![d, h], of_h),
        (vec![d], of_d),
    ]
}

/// The work of a forward pass and of a backward pass: two products and four. [M, H] need not touch
/// memory.
pub fn work((m, d, h): (i64, i64, i64), kind: Kind) -> [Work; 2] {
    [1, 2].map(|times| Work::new(kind, times * (2 * m * d + 2 * h * d), times * 4 * m * d * h))
}

fn case(size: (i64, i64, i64), activation: Activation, kind: Kind, device: Device) -> Case {
    let options = GeluMlpOptions { activation, save_activations: true };
    let lean = GeluMlpOptions { save_activations: false, ..options };
    let name = match activation {
        Activation::GeluTanh => String::new(),
        other => format!(" {other:?}"),
    };
    Case {
        operator: "gelu_mlp",
        point: format!("{size:?}{name}"),
        kind,
        device,
        tf32: false,
        inputs: inputs(size),
        work: work(size, kind),
        providers: vec![
            provider("composite", gelu_mlp_reference, options),
            provider("without a", f_gelu_mlp, lean),
            provider("fused", f_gelu_mlp, options),
        ],
    }
}

/// A case with drawn sizes.
pub fn drawn(draw: &mut Draw, kind: Kind, device: Device) -> Case {
    let activations = [Activation::GeluTanh, Activation::Gelu, Activation::ReluSquared];
    let activation = activations[draw.size(3, 1) as usize - 1];
    case(drawn_size(draw), activation, kind, device)
}

/// (M, D, H).
pub fn drawn_size(draw: &mut Draw) -> (i64, i64, i64) {
    draw.sizes([16_384, 8192, 16_384], MOST_PRODUCTS).into()
}

pub fn cases(device: Device) -> Vec<Case> {
    let (sizes, kind) = match device.is_cuda() {
        true => (&ON_CUDA, Kind::BFloat16),
        false => (&ON_CPU, Kind::Float),
    };
    let of = |activation| sizes.iter().map(move |&size| case(size, activation, kind, device));
    let all = of(Activation::GeluTanh).chain(of(Activation::Gelu));
    all.chain(of(Activation::ReluSquared)).collect()
}
