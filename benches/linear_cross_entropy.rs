//! A linear layer and the cross-entropy of its outputs, compared with the two in libtorch.

use crate::common::{Case, Provider, Work};
use crate::draw::{Draw, MOST_PRODUCTS};
use tch::{Device, Kind, Tensor};
use tch_extension::Result;
use tch_extension::ops::{
    LinearCrossEntropyOptions, f_linear_cross_entropy, linear_cross_entropy_reference,
};

/// (N, D, V).
const ON_CUDA: [(i64, i64, i64); 5] = [
    (4096, 512, 1000),
    (16_384, 768, 50_304),
    (16_384, 768, 50_257),
    (8192, 4096, 128_256),
    (16_384, 2048, 248_320),
];
const ON_CPU: [(i64, i64, i64); 3] = [(64, 64, 100), (512, 128, 5000), (256, 256, 32_000)];

type Op =
    fn(&Tensor, &Tensor, &Tensor, Option<&Tensor>, &LinearCrossEntropyOptions) -> Result<Tensor>;

fn provider(name: &'static str, op: Op) -> Provider {
    Provider::new(name, move |inputs| {
        let [input, weight] = inputs else { panic!("two inputs") };
        let (rows, classes) = (input.size2()?.0, weight.size2()?.0);
        let targets =
            Tensor::f_arange(rows, (Kind::Int64, input.device()))?.f_remainder(classes)?;
        Ok(vec![op(input, weight, &targets, None, &LinearCrossEntropyOptions::default())?])
    })
}

fn case((n, d, v): (i64, i64, i64), kind: Kind, device: Device) -> Case {
    Case {
        operator: "linear_cross_entropy",
        point: format!("{:?}", (n, d, v)),
        kind,
        device,
        tf32: false,
        inputs: vec![(vec![n, d], 0.5), (vec![v, d], (d as f64).sqrt().recip())],
        // Forward is one product, or three with the gradients; backward has nothing to do. The logits
        // need not touch memory.
        work: [1, 3].map(|products| Work::new(kind, (n + v) * d, products * 2 * n * d * v)),
        providers: vec![
            provider("composite", linear_cross_entropy_reference),
            provider("fused", f_linear_cross_entropy),
        ],
    }
}

/// A case with drawn sizes. The composite keeps the logits, which have at most 2³⁰ elements.
pub fn drawn(draw: &mut Draw, kind: Kind, device: Device) -> Case {
    loop {
        let [n, d, v] = draw.sizes([32_768, 4096, 200_000], MOST_PRODUCTS);
        if n * v <= 1 << 30 {
            return case((n, d, v), kind, device);
        }
    }
}

pub fn cases(device: Device) -> Vec<Case> {
    let (sizes, kind): (&[_], _) = match device.is_cuda() {
        true => (&ON_CUDA, Kind::BFloat16),
        false => (&ON_CPU, Kind::Float),
    };
    sizes.iter().map(|&size| case(size, kind, device)).collect()
}
