//! Tests of random cases: `ops::lstm` and `ops::gru` against libtorch's own layers.

use crate::rnn::{Rnn, strict};
use proptest::prelude::*;
use support::KINDS;
use support::property::{Argument, Case, Property, size, style};
use tch::{Device, Kind, Tensor};
use tch_extension::Result;
use tch_extension::ops::{RnnWay, force};
use tch_extension::testing::devices;

/// x, w_ih, w_hh, b_ih, b_hh, h and, for an LSTM, c.
const MOST: usize = 7;
const WEIGHTS: [usize; 2] = [1, 2];

/// The arguments that are there, with weights so small that rounding errors do not grow from step to
/// step.
fn present(inputs: &[Option<Tensor>]) -> Vec<Tensor> {
    // This number is exact in every kind.
    const SMALL: f64 = 1.0 / 16.0;
    let all = inputs.iter().enumerate().filter_map(|(place, input)| {
        let input = input.as_ref()?;
        Some(match WEIGHTS.contains(&place) && KINDS.contains(&input.kind()) {
            true => input * SMALL,
            false => input.shallow_clone(),
        })
    });
    all.collect()
}

impl Rnn {
    /// libtorch's own layer, or tch's operations for what it has no layer for, which is empty tensors,
    /// and for wrong sizes: oneDNN does not check them and writes beyond its tensors.
    fn by_libtorch(&self, inputs: &[Option<Tensor>]) -> Result<Vec<Tensor>> {
        let mut arguments = present(inputs);
        let is_empty = arguments.iter().any(|argument| argument.numel() == 0);
        let given = inputs.iter().map(|input| input.as_ref().map(|of| (of.size(), of.kind())));
        if is_empty || !self.is_documented(&given.collect::<Vec<_>>()) {
            return (self.reference)(&arguments);
        }
        // It has both biases or none.
        if let (Some(b_ih), None) = (&inputs[3], &inputs[4]) {
            arguments.insert(4, b_ih.zeros_like().detach());
        }
        (self.libtorch)(&arguments)
    }

    /// Whether the docs say that the layer accepts such arguments: exact shapes, all of one kind.
    fn is_documented(&self, arguments: &[Option<(Vec<i64>, Kind)>]) -> bool {
        let [Some(x), Some(w_ih), Some(w_hh), b_ih, b_hh, Some(h), c @ ..] = arguments else {
            return false;
        };
        let (&[_, batch, features], &[_, hidden]) = (&x.0[..], &h.0[..]) else { return false };
        let rows = self.gates * hidden;
        let is = |argument: &Option<(Vec<i64>, Kind)>, size: &[i64]| {
            argument.as_ref().is_none_or(|of| of.0 == size)
        };
        let kinds = arguments.iter().flatten().all(|argument| argument.1 == x.1);
        let states = h.0 == [batch, hidden] && c.iter().all(|c| is(c, &h.0));
        let weights = w_ih.0 == [rows, features] && w_hh.0 == [rows, hidden];
        let biases = is(b_ih, &[rows]) && is(b_hh, &[rows]);
        KINDS.contains(&x.1) && kinds && states && weights && biases
    }

    /// Cases of this many steps and rows, with hidden sizes that the kernels for all steps have.
    fn cases(
        &self,
        steps: std::ops::Range<i64>,
        rows: BoxedStrategy<i64>,
    ) -> impl Strategy<Value = Case> {
        let (gates, states) = (self.gates, self.states);
        let sizes = (steps, rows, size(), size(), 0..3usize);
        (sizes, 0..3usize, style(MOST)).prop_map(move |((t, b, f, h, eighths), biases, style)| {
            let h = if eighths == 1 { h * 8 } else { h };
            let rows = gates * h;
            let bias = |is_there: bool| is_there.then(|| vec![rows]);
            let mut sizes = vec![
                Some(vec![t, b, f]),
                Some(vec![rows, f]),
                Some(vec![rows, h]),
                bias(biases > 0),
                bias(biases > 1),
            ];
            sizes.extend(vec![Some(vec![b, h]); states]);
            style.case(sizes)
        })
    }

    fn hold_for(
        &self,
        name: &str,
        way: RnnWay,
        (cases, count): (impl Strategy<Value = Case>, u32),
        device: Device,
    ) {
        let ours = |inputs: &[Option<Tensor>]| force(way, || (self.fused)(&present(inputs)));
        let property = Property {
            name,
            fused: &ours,
            reference: &|inputs| self.by_libtorch(inputs),
            excluded: &|Case(arguments)| {
                let of = |argument: &Argument| (argument.size.clone(), argument.kind);
                let given = arguments.iter().map(|argument| argument.as_ref().map(of));
                !self.is_documented(&given.collect::<Vec<_>>())
            },
        };
        property.holds_for(cases, count, device);
    }

    pub fn random_cases(&self, name: &str) {
        let _strict = strict();
        for device in devices() {
            let ways: &[RnnWay] = match device.is_cuda() {
                true => &[RnnWay::Automatic, RnnWay::Cudnn],
                // oneDNN has LSTMs only.
                false if self.gates == 4 => &[RnnWay::Packed, RnnWay::Step, RnnWay::Onednn],
                false => &[RnnWay::Packed, RnnWay::Step],
            };
            for &way in ways {
                self.hold_for(name, way, (self.cases(1..5, size().boxed()), 800), device);
            }
        }
    }

    pub fn random_cases_of_many_steps(&self, name: &str) {
        let _strict = strict();
        for device in devices() {
            let ways: &[RnnWay] = match device.is_cuda() {
                true => &[RnnWay::Block, RnnWay::Cluster, RnnWay::Grid, RnnWay::WideGrid],
                false => &[RnnWay::Automatic],
            };
            for &way in ways {
                self.hold_for(name, way, (self.cases(8..12, (1..20i64).boxed()), 250), device);
            }
        }
    }
}

/// The tests of an operator, given its name and its `Rnn`.
macro_rules! random_tests {
    ($name:literal, $rnn:expr) => {
        #[test]
        fn random_cases() {
            $rnn.random_cases($name);
        }

        #[test]
        fn random_cases_of_many_steps() {
            $rnn.random_cases_of_many_steps($name);
        }
    };
}
pub(crate) use random_tests;
