//! What each family predicts.

use super::{Card, Measured};
use crate::Result;
use crate::ops::costs::{Named, Table, cheapest, is_clearly_cheaper};
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
    pub choose: Choose,
}

/// Of the ways of a call and what they are predicted to cost, the time of the one that plans take.
type Choose = fn(&[(&Measured, f64)]) -> Option<f64>;

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
        choose: of_layer,
    },
    Family {
        operators: &["linear", "matmul_add_relu"],
        places: &[&gemm::COSTS],
        predict: products,
        choose: of_product,
    },
];

fn products(table: &Table, rows: &[&Measured], card: &Card) -> Result<Vec<Option<f64>>> {
    let costs = gemm::COSTS.fill(table)?;
    let processors = card.processors();
    let of = |row: &&Measured| {
        let way = match row.way.as_str() {
            "Plan" => ProductWay::Plan,
            "Padded" => ProductWay::Padded,
            "Small" => ProductWay::Small,
            "Skinny" => ProductWay::Skinny,
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

/// The cheapest of some ways, with its cost.
fn cheapest_of(group: &[(&Measured, f64)], ways: &[&str]) -> Option<(f64, f64)> {
    let of = |way: &&str| group.iter().find(|(row, _)| row.way == **way);
    cheapest(ways.iter().filter_map(of).map(|(row, cost)| (row.micros, *cost)))
}

/// As `layer::plan` does, except that it also knows where both are single steps.
fn of_layer(group: &[(&Measured, f64)]) -> Option<f64> {
    let ours = cheapest_of(group, &["Step", "Block", "Cluster", "Grid", "WideGrid"]);
    unless_clearly_cheaper(cheapest_of(group, &["Cudnn"]), ours)
}

/// As `gemm::plan` does where its library is cuBLASLt.
fn of_product(group: &[(&Measured, f64)]) -> Option<f64> {
    let simple = cheapest_of(group, &["Plan", "Small", "Skinny"]);
    unless_clearly_cheaper(simple, cheapest_of(group, &["Padded"]))
}

/// The time of the second one if its cost is clearly less, else of the first one.
fn unless_clearly_cheaper(first: Option<(f64, f64)>, second: Option<(f64, f64)>) -> Option<f64> {
    let is_second = match (first, second) {
        (Some((_, first)), Some((_, second))) => is_clearly_cheaper(second, first),
        (first, _) => first.is_none(),
    };
    if is_second { second } else { first }.map(|(micros, _)| micros)
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
