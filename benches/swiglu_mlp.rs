//! The feed-forward part of a transformer with a gate, compared with libtorch's operations.

use crate::common::{Case, Provider, Work};
use crate::draw::Draw;
use crate::gelu_mlp::drawn_size;
use tch::{Device, Kind};
use tch_extension::ops::{SwigluMlpOptions, f_swiglu_mlp, swiglu_mlp_reference};

/// (M, D, H).
const ON_CUDA: [(i64, i64, i64); 3] =
    [(4096, 512, 2048), (16_384, 768, 3072), (8192, 4096, 16_384)];
const ON_CPU: [(i64, i64, i64); 3] = [(16, 64, 256), (128, 256, 1024), (1024, 64, 256)];

fn composite() -> Provider {
    Provider::new("composite", |inputs| {
        let [x, gate, up, down] = inputs else { panic!("four inputs") };
        Ok(vec![swiglu_mlp_reference(x, gate, up, down)?])
    })
}

fn fused(name: &'static str, save_activations: bool) -> Provider {
    let options = SwigluMlpOptions { save_activations };
    Provider::new(name, move |inputs| {
        let [x, gate, up, down] = inputs else { panic!("four inputs") };
        Ok(vec![f_swiglu_mlp(x, gate, up, down, &options)?])
    })
}

fn case((m, d, h): (i64, i64, i64), kind: Kind, device: Device) -> Case {
    let [of_d, of_h] = [d, h].map(|size| (size as f64).sqrt().recip());
    Case {
        operator: "swiglu_mlp",
        point: format!("{:?}", (m, d, h)),
        kind,
        device,
        tf32: false,
        inputs: vec![(vec![m, d], 1.0), (vec![h, d], of_d), (vec![h, d], of_d), (vec![d, h], of_h)],
        // Three products and six. [M, H] need not touch memory.
        work: [1, 2]
            .map(|times| Work::new(kind, times * (2 * m * d + 3 * h * d), times * 6 * m * d * h)),
        providers: vec![composite(), fused("without h", false), fused("fused", true)],
    }
}

/// A case with drawn sizes.
pub fn drawn(draw: &mut Draw, kind: Kind, device: Device) -> Case {
    case(drawn_size(draw), kind, device)
}

pub fn cases(device: Device) -> Vec<Case> {
    let (sizes, kind) = match device.is_cuda() {
        true => (&ON_CUDA, Kind::BFloat16),
        false => (&ON_CPU, Kind::Float),
    };
    sizes.iter().map(|&size| case(size, kind, device)).collect()
}
