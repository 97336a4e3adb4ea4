//! The LLTM cell: fused against the composite of tch operations.

use crate::common::{Case, Provider, Work};
use tch::{Device, Kind, Tensor};
use tch_extension::Result;
use tch_extension::ops::{f_lltm_cell, lltm_cell_reference};

/// (B, F, H).
const SIZES: [(i64, i64, i64); 3] = [(16, 32, 128), (64, 256, 512), (128, 1024, 1024)];

type Cell = fn(&Tensor, &Tensor, Option<&Tensor>, (&Tensor, &Tensor)) -> Result<(Tensor, Tensor)>;

fn provider(name: &'static str, cell: Cell) -> Provider {
    Provider::new(name, move |inputs| {
        let (h, c) = cell(&inputs[0], &inputs[1], Some(&inputs[2]), (&inputs[3], &inputs[4]))?;
        Ok(vec![h, c])
    })
}

pub fn cases(device: Device) -> Vec<Case> {
    let case = |(b, f, h): (i64, i64, i64)| {
        let scale = 1.0 / (h as f64).sqrt();
        let weight = (vec![3 * h, h + f], scale);
        Case {
            operator: "lltm_cell",
            point: format!("{:?}", (b, f, h)),
            kind: Kind::Float,
            device,
            inputs: vec![(vec![b, f], 1.0), weight, (vec![3 * h], 1.0), (vec![b, h], 1.0), (vec![b, h], 1.0)],
            // x, W, h, c, h' and c'; x, W and h with their gradients, three gates, c', and the gradients of the state.
            work: [
                Work::new(Kind::Float, b * f + 3 * h * (h + f) + 4 * b * h, 2 * b * 3 * h * (h + f)),
                Work::new(Kind::Float, 2 * (b * f + 3 * h * (h + f)) + 9 * b * h, 4 * b * 3 * h * (h + f)),
            ],
            providers: vec![provider("composite", lltm_cell_reference), provider("fused", f_lltm_cell)],
        }
    };
    SIZES.into_iter().map(case).collect()
}
