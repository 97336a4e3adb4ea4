//! The cross-entropy of logits and classes, compared with libtorch's own loss.

use crate::common::{Case, Provider, Work};
use crate::draw::Draw;
use tch::{Device, Kind, Tensor};
use tch_extension::Result;
use tch_extension::ops::{CrossEntropyOptions, cross_entropy_reference, f_cross_entropy};

/// (M, V).
const ON_CUDA: [(i64, i64); 4] = [(4096, 1024), (8192, 32_000), (16_384, 50_304), (4096, 128_256)];
const ON_CPU: [(i64, i64); 4] = [(64, 10), (1024, 1000), (256, 32_000), (4096, 100)];
const KINDS: [Kind; 2] = [Kind::Float, Kind::BFloat16];

type Op = fn(&Tensor, &Tensor, &CrossEntropyOptions<'_>) -> Result<Tensor>;

fn libtorch(
    logits: &Tensor,
    targets: &Tensor,
    options: &CrossEntropyOptions<'_>,
) -> Result<Tensor> {
    let CrossEntropyOptions { weight, reduction, ignore_index, label_smoothing, .. } = *options;
    Ok(logits.f_cross_entropy_loss(targets, weight, reduction, ignore_index, label_smoothing)?)
}

fn provider(name: &'static str, op: Op) -> Provider {
    Provider::new(name, move |inputs| {
        let logits = &inputs[0];
        let (rows, classes) = logits.size2()?;
        let targets =
            Tensor::f_arange(rows, (Kind::Int64, logits.device()))?.f_remainder(classes)?;
        Ok(vec![op(logits, &targets, &CrossEntropyOptions::default())?])
    })
}

pub fn of_size((m, v): (i64, i64), kind: Kind, device: Device) -> Case {
    Case {
        operator: "cross_entropy",
        point: format!("{:?}", (m, v)),
        kind,
        device,
        tf32: false,
        inputs: vec![(vec![m, v], 1.0)],
        // Forward reads the logits, and with a gradient writes as many; backward has nothing to do.
        work: [1, 2].map(|arrays| Work::new(kind, arrays * m * v, 0)),
        providers: vec![
            provider("composite", cross_entropy_reference),
            provider("libtorch", libtorch),
            provider("fused", f_cross_entropy),
        ],
    }
}

/// A case with drawn sizes.
pub fn drawn(draw: &mut Draw, kind: Kind, device: Device) -> Case {
    of_size(draw.rows_and_columns(250_000), kind, device)
}

pub fn cases(device: Device) -> Vec<Case> {
    let sizes: &[(i64, i64)] = if device.is_cuda() { &ON_CUDA } else { &ON_CPU };
    let of = |kind| sizes.iter().map(move |&size| of_size(size, kind, device));
    KINDS.into_iter().flat_map(of).collect()
}
