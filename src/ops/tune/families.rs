//! What each family predicts.

use super::{Card, Measured};
use crate::Result;
use crate::ops::costs::{Named, Table};
use crate::ops::gemm::costs as gemm;
use crate::ops::gemm::plan::{Bias, Description, Layout, Way as ProductWay, contiguous};
use crate::ops::kinds::Kind;
use crate::ops::recurrent::Way;
use crate::ops::recurrent::layer::{self, LAYER};
use crate::ops::recurrent::plan::Sizes;
use crate::ops::{gru, lltm, lstm};

/// Operators whose costs are fitted together.
pub(super) struct Family {
    pub operators: &'static [&'static str],
    pub places: &'static [&'static (dyn Named + Sync)],
    pub predict: Predict,
    /// The library's way, which plans leave for a clear gain only.
    pub library: &'static str,
}

/// The times of calls; `None` for a way that does not exist, and for a plan's own choice.
type Predict = fn(&Table, &[&Measured], &Card) -> Result<Vec<Option<f64>>>;

impl Family {
    pub fn rows<'a>(&self, measured: &'a [Measured]) -> Vec<&'a Measured> {
        measured.iter().filter(|row| self.operators.contains(&row.operator.as_str())).collect()
    }
}

pub(super) const FAMILIES: [Family; 2] = [
    Family {
        operators: &["lstm", "gru"],
        places: &[&lstm::COSTS, &lstm::CUDNN, &gru::COSTS, &gru::CUDNN, &LAYER],
        predict: layers,
        library: "Cudnn",
    },
    Family {
        operators: &["linear", "matmul_add_relu"],
        places: &[&gemm::COSTS],
        predict: products,
        library: "Plan",
    },
];

fn products(table: &Table, rows: &[&Measured], card: &Card) -> Result<Vec<Option<f64>>> {
    let costs = gemm::COSTS.fill(table)?;
    let processors = card.processors();
    let of = |row: &&Measured| {
        let way = match row.way.as_str() {
            "Plan" => ProductWay::Plan,
            "Padded" => ProductWay::Padded,
            // Where these have no kernel, libtorch's product takes their place.
            "Hopper" | "Composite" => ProductWay::Composite,
            _ => return None,
        };
        let kinds = (Kind::of(row.kind).ok()?, row.tf32);
        let cost = |product: Description, way| match product.can(way) {
            true => product.cost(way, &costs, processors),
            false => product.cost(ProductWay::Composite, &costs, processors),
        };
        if row.operator == "linear" {
            let (&k, rows) = row.inputs.first()?.split_last()?;
            let (m, n) = (rows.iter().product::<i64>(), *row.inputs.get(1)?.first()?);
            let of = |sizes, bias, offset, layout| {
                contiguous(([1, 1], sizes), bias, kinds, offset, layout)
            };
            let forward = cost(of([m, k, n], Bias::Row, row.offset, Layout::Linear), way)?;
            if !row.both {
                return Some(forward);
            }
            let of_input = cost(of([m, n, k], Bias::None, 0, Layout::Matrices), way)?;
            let of_weight = cost(of([n, m, k], Bias::None, 0, Layout::Transposed), way)?;
            let bytes = (m * n) as f64 * row.kind.elt_size_in_bytes() as f64 / 1e6;
            return Some(forward + of_input + of_weight + costs.columns.of(1.0, bytes));
        }
        let (lhs, rhs, bias) = (row.inputs.first()?, row.inputs.get(1)?, row.inputs.get(2)?);
        let &[.., m, k] = lhs.as_slice() else { return None };
        let n = *rhs.last()?;
        let batch = |of: &[i64]| if of.len() > 2 { of[0] } else { 1 };
        let is_full = bias.len() > 1;
        let product = contiguous(
            ([batch(lhs), batch(rhs)], [m, k, n]),
            if is_full { Bias::Full } else { Bias::Row },
            kinds,
            row.offset,
            Layout::Matrices,
        );
        let is_hopper = row.way == "Hopper" && product.can(ProductWay::Hopper);
        if row.both || is_hopper { None } else { cost(product, way) }
    };
    Ok(rows.iter().map(of).collect())
}

/// Costs that no family predicts yet. They stay as they were.
pub(super) const OTHERS: [&(dyn Named + Sync); 1] = [&lltm::COSTS];

fn layers(table: &Table, rows: &[&Measured], card: &Card) -> Result<Vec<Option<f64>>> {
    let (lstm, gru) = (lstm::COSTS.fill(table)?, gru::COSTS.fill(table)?);
    let cudnn = [lstm::CUDNN.fill(table)?, gru::CUDNN.fill(table)?];
    let layer = LAYER.fill(table)?;
    let of = |row: &&Measured| {
        let way = match row.way.as_str() {
            "Cudnn" => Way::Cudnn,
            "Step" => Way::Step,
            "Block" => Way::Block,
            "Cluster" => Way::Cluster,
            "Grid" => Way::Grid,
            "WideGrid" => Way::WideGrid,
            _ => return None,
        };
        let (&[steps, batch, features], &[_, hidden]) =
            (row.inputs.first()?.as_slice(), row.inputs.get(2)?.as_slice())
        else {
            return None;
        };
        let sizes = Sizes { steps, batch, features, hidden };
        let kind = Kind::of(row.kind).ok()?;
        let call = layer::Forced { way, sizes, kind, tf32: row.tf32, keep: row.both };
        match row.operator.as_str() {
            "lstm" => layer::predicted::<lstm::Lstm>(&call, (&lstm, &cudnn[0], &layer), card.rows),
            _ => layer::predicted::<gru::Gru>(&call, (&gru, &cudnn[1], &layer), card.rows),
        }
    };
    Ok(rows.iter().map(of).collect())
}
