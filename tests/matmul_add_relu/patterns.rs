//! The combinations in which two factors and a bias can broadcast.

use super::*;

/// The sizes of lhs, rhs and bias.
pub type Pattern = (&'static [i64], &'static [i64], &'static [i64]);

pub const SMALL: &[Pattern] = &[
    // Matrices with different K, M and N.
    (&[3, 4], &[4, 5], &[5]),
    (&[3, 4], &[4, 5], &[1, 5]),
    (&[3, 4], &[4, 5], &[3, 1]),
    (&[3, 4], &[4, 5], &[3, 5]),
    (&[3, 4], &[4, 5], &[1, 1, 3, 5]),
    (&[3, 4], &[4, 5], &[1]),
    (&[3, 4], &[4, 5], &[]),
    (&[3, 4], &[4, 5], &[1, 1]),
    // The bias enlarges the product.
    (&[3, 4], &[4, 5], &[2, 3, 5]),
    (&[3, 4], &[4, 5], &[2, 1, 5]),
    (&[3, 4], &[4, 5], &[2, 3, 1]),
    (&[3, 4], &[4, 5], &[2, 1, 1]),
    (&[3, 4], &[4, 5], &[2, 3, 1, 5]),
    (&[1, 4], &[4, 5], &[3, 5]),
    (&[3, 4], &[4, 1], &[5]),
    (&[3, 4], &[4, 1], &[3, 5]),
    (&[1, 4], &[4, 1], &[3, 5]),
    (&[3, 4], &[4, 1], &[1]),
    (&[3, 4], &[4, 1], &[]),
    (&[3, 4], &[4, 1], &[3, 1]),
    // Vectors.
    (&[4], &[4], &[]),
    (&[4], &[4], &[1]),
    (&[4], &[4], &[3]),
    (&[4], &[4], &[2, 3]),
    (&[4], &[4, 5], &[5]),
    (&[4], &[4, 5], &[1]),
    (&[4], &[4, 5], &[]),
    (&[4], &[4, 5], &[3, 5]),
    (&[4], &[4, 5], &[2, 3, 1]),
    (&[3, 4], &[4], &[3]),
    (&[3, 4], &[4], &[1]),
    (&[3, 4], &[4], &[2, 3]),
    (&[3, 4], &[4], &[2, 1]),
    (&[4], &[2, 4, 5], &[5]),
    (&[4], &[2, 4, 5], &[2, 5]),
    (&[4], &[2, 4, 5], &[2, 1]),
    (&[4], &[1, 4, 5], &[5]),
    (&[4], &[3, 1, 4, 5], &[2, 1]),
    (&[2, 3, 4], &[4], &[3]),
    (&[2, 3, 4], &[4], &[2, 1]),
    (&[2, 3, 4], &[4], &[5, 1, 1]),
    // Batches of the same size.
    (&[2, 3, 4], &[2, 4, 5], &[5]),
    (&[2, 3, 4], &[2, 4, 5], &[3, 5]),
    (&[2, 3, 4], &[2, 4, 5], &[3, 1]),
    (&[2, 3, 4], &[2, 4, 5], &[2, 1, 5]),
    (&[2, 3, 4], &[2, 4, 5], &[2, 3, 1]),
    (&[2, 3, 4], &[2, 4, 5], &[2, 1, 1]),
    (&[2, 3, 4], &[2, 4, 5], &[2, 3, 5]),
    (&[2, 3, 4], &[2, 4, 5], &[3, 1, 1, 5]),
    (&[2, 3, 3, 4], &[2, 3, 4, 5], &[3, 1, 5]),
    // Batch sizes of 1, and missing batch dimensions.
    (&[1, 3, 4], &[2, 4, 5], &[5]),
    (&[1, 3, 4], &[2, 4, 5], &[2, 3, 5]),
    (&[3, 4], &[2, 4, 5], &[5]),
    (&[3, 4], &[2, 4, 5], &[2, 1, 5]),
    (&[2, 3, 4], &[4, 5], &[5]),
    (&[2, 3, 4], &[4, 5], &[3, 5]),
    (&[2, 3, 4], &[1, 4, 5], &[5]),
    (&[2, 1, 3, 4], &[6, 4, 5], &[5]),
    (&[2, 1, 3, 4], &[1, 6, 4, 5], &[6, 1, 5]),
    (&[6, 3, 4], &[2, 1, 4, 5], &[2, 1, 1, 1]),
    (&[1, 1, 3, 4], &[4, 5], &[5]),
    (&[3, 4], &[1, 1, 4, 5], &[5]),
    (&[1, 3, 4], &[1, 1, 4, 5], &[2, 1, 1, 1]),
    (&[2, 6, 3, 4], &[6, 4, 5], &[6, 3, 5]),
    // Tensors without elements.
    (&[0, 4], &[4, 5], &[5]),
    (&[0, 4], &[4, 5], &[0, 5]),
    (&[3, 0], &[0, 5], &[5]),
    (&[3, 0], &[0, 5], &[3, 1]),
    (&[3, 4], &[4, 0], &[0]),
    (&[3, 4], &[4, 0], &[1]),
    (&[3, 4], &[4, 0], &[3, 1]),
    (&[3, 4], &[4, 1], &[0]),
    (&[1, 4], &[4, 5], &[0, 5]),
    (&[0, 3, 4], &[4, 5], &[5]),
    (&[0, 3, 4], &[0, 4, 5], &[3, 5]),
    (&[0, 3, 4], &[1, 4, 5], &[5]),
    (&[3, 4], &[0, 4, 5], &[5]),
    (&[3, 4], &[4, 5], &[0, 3, 5]),
    (&[0], &[0], &[3]),
    (&[0], &[0, 5], &[5]),
    (&[3, 0], &[0], &[3]),
    // Rows about as long as a vector.
    (&[3, 4], &[4, 7], &[7]),
    (&[3, 4], &[4, 8], &[8]),
    (&[3, 4], &[4, 8], &[3, 1]),
    (&[3, 4], &[4, 8], &[3, 8]),
    (&[3, 4], &[4, 8], &[2, 3, 8]),
    (&[2, 3, 4], &[4, 8], &[2, 1, 8]),
    (&[3, 4], &[4, 9], &[9]),
    (&[3, 4], &[4, 16], &[16]),
    (&[3, 4], &[4, 17], &[17]),
    (&[3, 4], &[4, 17], &[3, 1]),
    (&[7, 4], &[4, 8], &[7, 1]),
];

pub const LARGE: &[Pattern] = &[
    (&[64, 32], &[32, 128], &[128]),
    (&[300, 8], &[8, 65], &[65]),  // one column after a tile
    (&[2500, 3], &[3, 64], &[64]), // several slabs of rows, with whole vectors
    (&[2500, 3], &[3, 71], &[71]), // several slabs, without whole vectors
    (&[9000, 2], &[2, 1], &[1]),   // a single column
    (&[16, 33, 8], &[16, 8, 40], &[16, 33, 40]), // a bias of full shape
    (&[1, 33, 8], &[16, 8, 40], &[16, 33, 40]),
    (&[3, 8], &[8, 2100], &[3, 1]), // a second piece of a row on the CPU
    (&[5, 3], &[3, 1029], &[2, 1, 1029]),
    (&[16, 30, 8], &[8, 24], &[16, 1, 24]),
];

/// A sample in which no sum is near 0, where the derivative does not exist: the products are
/// between -1/2 and 1/2, and the bias is outside that range.
pub fn sample(
    (lhs, rhs, bias): Pattern,
    layouts: [Layout; 3],
    kind: Kind,
    device: Device,
) -> Sample {
    let inner = lhs.last().copied().unwrap_or(1).max(1) as f64;
    let scale = (0.5 / inner).sqrt();
    let bias_values = noise(bias, 2);
    let values = [
        noise(lhs, 0) * scale,
        noise(rhs, 1) * scale,
        bias_values.sign() * (bias_values.abs() * 0.4 + 0.6),
    ];
    let place = |(values, layout): (&Tensor, Layout)| {
        layout.of(&values.to_kind(kind).to_device(device)).expect("a layout")
    };
    let layout =
        if layouts == [Layout::Contiguous; 3] { String::new() } else { format!(", {layouts:?}") };
    Sample {
        name: format!("{lhs:?} @ {rhs:?} + {bias:?}{layout}"),
        inputs: values.iter().zip(layouts).map(place).collect(),
    }
}

pub fn samples(patterns: &[Pattern], kind: Kind, device: Device) -> Vec<Sample> {
    patterns.iter().map(|&pattern| sample(pattern, [Layout::Contiguous; 3], kind, device)).collect()
}

/// Fixed pseudo-random numbers between -1 and 1, none of them 0.
pub fn noise(size: &[i64], seed: i64) -> Tensor {
    let index = Tensor::arange(size.iter().product::<i64>(), (Kind::Int64, Device::Cpu));
    let mixed: Tensor = &index * (&index + 3) * 31 + &index * 7919 + (seed + 1) * 1013;
    (mixed.remainder(10007).to_kind(Kind::Double) / 5003.3 - 1.0).view(size)
}
