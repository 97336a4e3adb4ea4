//! Tests of every operator in regions of autocast: one table, on each device, for each part of a call
//! that may run in a region.

use super::*;
use tch::nn::{self, RNN, RNNConfig};
use tch_extension::autograd::{GradOptions, Tensors, checkpoint, grad};
use tch_extension::nn as layers;
use tch_extension::ops::*;
use tch_extension::testing::{assert_close, devices};

type Call = fn(&[Tensor]) -> Result<Vec<Tensor>>;

struct Case {
    /// The operator's name, which may be followed by what is special.
    name: &'static str,
    /// The sizes of the inputs that have gradients.
    sizes: &'static [&'static [i64]],
    fused: Call,
    /// The same in operations of libtorch.
    composite: Call,
    /// The kind of the results in a region of this kind, if it is not the composite's.
    kind: Option<fn(Kind, Device) -> Kind>,
}

impl Case {
    const fn new(
        name: &'static str,
        sizes: &'static [&'static [i64]],
        fused: Call,
        composite: Call,
    ) -> Case {
        Case { name, sizes, fused, composite, kind: None }
    }

    const fn of_kind(self, kind: fn(Kind, Device) -> Kind) -> Case {
        Case { kind: Some(kind), ..self }
    }
}

fn targets(rows: &Tensor) -> Tensor {
    Tensor::from_slice(&[1_i64, 0, 4, 2, 3]).to_device(rows.device())
}

fn tables(q: &Tensor) -> (Tensor, Tensor) {
    rope_tables(16, 4, 10_000.0, (Kind::Float, q.device()))
}

fn two((first, second): (Tensor, Tensor)) -> Vec<Tensor> {
    vec![first, second]
}

fn three((first, (second, third)): (Tensor, (Tensor, Tensor))) -> Vec<Tensor> {
    vec![first, second, third]
}

fn weights(t: &[Tensor]) -> RnnWeights<'_> {
    RnnWeights { w_ih: &t[1], w_hh: &t[2], b_ih: Some(&t[3]), b_hh: Some(&t[4]) }
}

/// libtorch's lists have its layers on CUDA, and on the CPU the LSTM, but not that of packed sequences.
fn autocasts_kind(kind: Kind, _: Device) -> Kind {
    kind
}

fn autocasts_kind_on_cuda(kind: Kind, device: Device) -> Kind {
    if device.is_cuda() { kind } else { Kind::Float }
}

const LSTM: &[&[i64]] = &[&[4, 3, 5], &[8, 5], &[8, 2], &[8], &[8], &[3, 2], &[3, 2]];
const GRU: &[&[i64]] = &[&[4, 3, 5], &[6, 5], &[6, 2], &[6], &[6], &[3, 2]];
const LLTM: &[&[i64]] = &[&[4, 3, 5], &[6, 7], &[6], &[3, 2], &[3, 2]];
const WHOLE: RnnOptions<'_> = RnnOptions { lengths: None };
const PADDED: RnnOptions<'_> = RnnOptions { lengths: Some(&[3, 1, 2]) };
const LSTM_FUSED: Call = |t| Ok(three(f_lstm(&t[0], (&t[5], &t[6]), &weights(t), &WHOLE)?));
const LSTM_COMPOSITE: Call =
    |t| Ok(three(lstm_reference(&t[0], (&t[5], &t[6]), &weights(t), &WHOLE)?));
const GRU_FUSED: Call = |t| Ok(two(f_gru(&t[0], &t[5], &weights(t), &WHOLE)?));
const GRU_COMPOSITE: Call = |t| Ok(two(gru_reference(&t[0], &t[5], &weights(t), &WHOLE)?));
const LLTM_FUSED: Call = |t| Ok(three(f_lltm(&t[0], &t[1], Some(&t[2]), (&t[3], &t[4]))?));
const LLTM_COMPOSITE: Call =
    |t| Ok(three(lltm_reference(&t[0], &t[1], Some(&t[2]), (&t[3], &t[4]))?));

const CASES: [Case; 25] = [
    Case::new(
        "linear",
        &[&[2, 7, 6], &[5, 6], &[5]],
        |t| Ok(vec![f_linear(&t[0], &t[1], Some(&t[2]))?]),
        |t| Ok(vec![linear_reference(&t[0], &t[1], Some(&t[2]))?]),
    ),
    Case::new(
        "matmul_add_relu",
        &[&[2, 7, 6], &[6, 5], &[5]],
        |t| Ok(vec![f_matmul_add_relu(&t[0], &t[1], &t[2])?]),
        |t| Ok(vec![matmul_add_relu_reference(&t[0], &t[1], &t[2])?]),
    ),
    Case::new(
        "gelu_mlp",
        &[&[7, 6], &[10, 6], &[10], &[4, 10], &[4]],
        |t| Ok(vec![f_gelu_mlp(&t[0], &t[1], Some(&t[2]), &t[3], Some(&t[4]), &<_>::default())?]),
        |t| {
            let options = Default::default();
            let output =
                gelu_mlp_reference(&t[0], &t[1], Some(&t[2]), &t[3], Some(&t[4]), &options);
            Ok(vec![output?])
        },
    ),
    Case::new(
        "swiglu_mlp",
        &[&[7, 6], &[10, 6], &[10, 6], &[4, 10]],
        |t| Ok(vec![f_swiglu_mlp(&t[0], &t[1], &t[2], &t[3], &Default::default())?]),
        |t| Ok(vec![swiglu_mlp_reference(&t[0], &t[1], &t[2], &t[3])?]),
    ),
    Case::new(
        "layer_norm",
        &[&[7, 6], &[6], &[6]],
        |t| Ok(vec![f_layer_norm(&t[0], &[6], Some(&t[1]), Some(&t[2]), 1e-5)?]),
        |t| Ok(vec![layer_norm_reference(&t[0], &[6], Some(&t[1]), Some(&t[2]), 1e-5)?]),
    ),
    Case::new(
        "rms_norm",
        &[&[7, 6], &[6]],
        |t| Ok(vec![f_rms_norm(&t[0], &[6], Some(&t[1]), None)?]),
        |t| Ok(vec![rms_norm_reference(&t[0], &[6], Some(&t[1]), None)?]),
    ),
    Case::new(
        "add_layer_norm",
        &[&[7, 6], &[7, 6], &[6], &[6]],
        |t| {
            let (weight, bias) = (Some(&t[2]), Some(&t[3]));
            Ok(two(f_add_layer_norm(&t[0], &t[1], &[6], weight, bias, &Default::default())?))
        },
        |t| {
            let (weight, bias) = (Some(&t[2]), Some(&t[3]));
            Ok(two(add_layer_norm_reference(
                &t[0],
                &t[1],
                &[6],
                weight,
                bias,
                &Default::default(),
            )?))
        },
    ),
    Case::new(
        "add_rms_norm",
        &[&[7, 6], &[7, 6], &[6]],
        |t| Ok(two(f_add_rms_norm(&t[0], &t[1], &[6], Some(&t[2]), &Default::default())?)),
        |t| Ok(two(add_rms_norm_reference(&t[0], &t[1], &[6], Some(&t[2]), &Default::default())?)),
    ),
    Case::new(
        "cross_entropy",
        &[&[5, 7]],
        |t| Ok(vec![f_cross_entropy(&t[0], &targets(&t[0]), &Default::default())?]),
        |t| Ok(vec![cross_entropy_reference(&t[0], &targets(&t[0]), &Default::default())?]),
    ),
    Case::new(
        "linear_cross_entropy",
        &[&[5, 6], &[7, 6], &[7]],
        |t| {
            let (targets, options) = (targets(&t[0]), Default::default());
            Ok(vec![f_linear_cross_entropy(&t[0], &t[1], &targets, Some(&t[2]), &options)?])
        },
        |t| {
            let (targets, options) = (targets(&t[0]), Default::default());
            Ok(vec![linear_cross_entropy_reference(&t[0], &t[1], &targets, Some(&t[2]), &options)?])
        },
    ),
    Case::new(
        "linear_cross_entropy, each row",
        &[&[5, 6], &[7, 6]],
        |t| {
            let options =
                LinearCrossEntropyOptions { reduction: tch::Reduction::None, ..Default::default() };
            Ok(vec![f_linear_cross_entropy(&t[0], &t[1], &targets(&t[0]), None, &options)?])
        },
        |t| {
            let options =
                LinearCrossEntropyOptions { reduction: tch::Reduction::None, ..Default::default() };
            Ok(vec![linear_cross_entropy_reference(&t[0], &t[1], &targets(&t[0]), None, &options)?])
        },
    ),
    Case::new(
        "rope",
        &[&[2, 5, 3, 8], &[2, 5, 1, 8]],
        |t| {
            let (cos, sin) = tables(&t[0]);
            Ok(two(f_rope(&t[0], &t[1], &cos, &sin, &Default::default())?))
        },
        |t| {
            let (cos, sin) = tables(&t[0]);
            Ok(two(rope_reference(&t[0], &t[1], &cos, &sin, &Default::default())?))
        },
    ),
    Case::new(
        "lltm_cell",
        &[&[3, 5], &[6, 7], &[6], &[3, 2], &[3, 2]],
        |t| Ok(two(f_lltm_cell(&t[0], &t[1], Some(&t[2]), (&t[3], &t[4]))?)),
        |t| Ok(two(lltm_cell_reference(&t[0], &t[1], Some(&t[2]), (&t[3], &t[4]))?)),
    ),
    Case::new("lltm", LLTM, LLTM_FUSED, LLTM_COMPOSITE),
    Case::new(
        "lltm, one step",
        &[&[1, 3, 5], &[6, 7], &[6], &[3, 2], &[3, 2]],
        LLTM_FUSED,
        LLTM_COMPOSITE,
    ),
    Case::new(
        "lltm, two steps",
        &[&[2, 3, 5], &[6, 7], &[6], &[3, 2], &[3, 2]],
        LLTM_FUSED,
        LLTM_COMPOSITE,
    ),
    Case::new(
        "lltm, many rows",
        &[&[5, 70, 33], &[96, 65], &[96], &[70, 32], &[70, 32]],
        LLTM_FUSED,
        LLTM_COMPOSITE,
    ),
    Case::new("lstm", LSTM, LSTM_FUSED, LSTM_COMPOSITE).of_kind(autocasts_kind),
    Case::new(
        "lstm, one step",
        &[&[1, 1, 3], &[8, 3], &[8, 2], &[8], &[8], &[1, 2], &[1, 2]],
        LSTM_FUSED,
        LSTM_COMPOSITE,
    )
    .of_kind(autocasts_kind),
    Case::new(
        "lstm, many rows",
        &[&[5, 70, 33], &[128, 33], &[128, 32], &[128], &[128], &[70, 32], &[70, 32]],
        LSTM_FUSED,
        LSTM_COMPOSITE,
    )
    .of_kind(autocasts_kind),
    Case::new(
        "lstm, padded",
        LSTM,
        |t| Ok(three(f_lstm(&t[0], (&t[5], &t[6]), &weights(t), &PADDED)?)),
        |t| Ok(three(lstm_reference(&t[0], (&t[5], &t[6]), &weights(t), &PADDED)?)),
    )
    .of_kind(autocasts_kind_on_cuda),
    Case::new("gru", GRU, GRU_FUSED, GRU_COMPOSITE).of_kind(autocasts_kind_on_cuda),
    Case::new(
        "gru, one step",
        &[&[1, 1, 3], &[6, 3], &[6, 2], &[6], &[6], &[1, 2]],
        GRU_FUSED,
        GRU_COMPOSITE,
    )
    .of_kind(autocasts_kind_on_cuda),
    Case::new(
        "gru, many rows",
        &[&[5, 70, 33], &[96, 33], &[96, 32], &[96], &[96], &[70, 32]],
        GRU_FUSED,
        GRU_COMPOSITE,
    )
    .of_kind(autocasts_kind_on_cuda),
    Case::new(
        "gru, padded",
        GRU,
        |t| Ok(two(f_gru(&t[0], &t[5], &weights(t), &PADDED)?)),
        |t| Ok(two(gru_reference(&t[0], &t[5], &weights(t), &PADDED)?)),
    )
    .of_kind(autocasts_kind_on_cuda),
];

/// Calls `test` with each case, device and kind of region, and the values of the inputs.
fn for_each_case(test: impl Fn(&Case, &[Tensor], Device, Kind)) {
    for device in devices() {
        for kind in [Kind::BFloat16, Kind::Half] {
            for case in &CASES {
                eprintln!("{} on {device:?} in {kind:?}", case.name);
                tch::manual_seed(3);
                // Sums are of about the same size, so that errors do not grow from step to step.
                let scale = |size: &[i64]| 0.7 * (6.0 / size[size.len() - 1].max(6) as f64).sqrt();
                let sized = |size: &&[i64]| random(size, device) * scale(size);
                let values: Vec<Tensor> = case.sizes.iter().map(sized).collect();
                test(case, &values, device, kind);
            }
        }
    }
}

fn leaves(values: &[Tensor]) -> Vec<Tensor> {
    values.iter().map(|value| value.detach().set_requires_grad(true)).collect()
}

/// Gradients for these tensors, all different.
fn incoming(tensors: &[Tensor]) -> Vec<Tensor> {
    let one = |tensor: &Tensor| {
        let count = tensor.numel() as i64;
        let values = Tensor::arange(count, (Kind::Float, Device::Cpu)).sin() + 0.3;
        values.view(tensor.size().as_slice()).to_kind(tensor.kind()).to_device(tensor.device())
    };
    tensors.iter().map(one).collect()
}

fn gradients(of: &[Tensor], leaves: &[Tensor], create_graph: bool) -> Vec<Option<Tensor>> {
    let vectors = incoming(of);
    let vectors: Vec<Option<&Tensor>> = vectors.iter().map(Some).collect();
    let options = GradOptions {
        grad_outputs: &vectors,
        create_graph,
        allow_unused: true,
        ..Default::default()
    };
    let (of, leaves): (Vec<&Tensor>, Vec<&Tensor>) = (of.iter().collect(), leaves.iter().collect());
    grad(&of, &leaves, &options).expect("gradients").into_vec()
}

/// What runs in a region.
#[derive(Clone, Copy, Debug)]
struct Inside {
    forward: bool,
    backward: bool,
    create_graph: bool,
}

/// The outputs, the gradients, and, with `create_graph`, what differentiating them without autocast gives:
/// the graph consists of libtorch's operations, whose backward passes autocast casts.
fn outcome(
    call: impl Fn(&[Tensor]) -> Result<Vec<Tensor>>,
    values: &[Tensor],
    enter: impl Fn() -> Autocast,
    inside: Inside,
) -> Vec<Option<Tensor>> {
    let leaves = leaves(values);
    let mut region = inside.forward.then(&enter);
    let outputs = call(&leaves).expect("outputs");
    if !inside.backward {
        region = None;
    } else if region.is_none() {
        region = Some(enter());
    }
    let first = gradients(&outputs, &leaves, inside.create_graph);
    drop(region);
    let with_graph = first.iter().flatten().filter(|first| first.requires_grad());
    let with_graph: Vec<Tensor> = with_graph.map(Tensor::shallow_clone).collect();
    let _off = Autocast::disabled(values[0].device()).expect("off");
    let second = match with_graph.is_empty() {
        true => Vec::new(),
        false => gradients(&with_graph, &leaves, false),
    };
    outputs.into_iter().map(Some).chain(first).chain(second).collect()
}

fn assert_same(found: &[Option<Tensor>], expected: &[Option<Tensor>], what: &str) {
    assert_eq!(found.len(), expected.len(), "{what}");
    for (index, (found, expected)) in found.iter().zip(expected).enumerate() {
        assert_eq!(found.is_some(), expected.is_some(), "{what}: {index}");
        let (Some(found), Some(expected)) = (found, expected) else { continue };
        assert_eq!(found.kind(), expected.kind(), "{what}: {index}");
        let largest = (found - expected).abs().max().double_value(&[]);
        assert!(found.equal(expected), "{what}: {index} is off by {largest:e}");
    }
}

fn enter(device: Device, kind: Kind) -> Autocast {
    Autocast::new(device, kind).expect("a region")
}

#[test]
fn every_operator_is_in_the_table() {
    let list = include_str!("../../src/ops/list.rs");
    let names = list.lines().filter_map(|line| line.trim().split_once(" of \""));
    let names: Vec<&str> = names.map(|(name, _)| name).filter(|name| !name.contains(' ')).collect();
    assert!(names.len() > 10, "{names:?}");
    for name in names {
        assert!(CASES.iter().any(|case| case.name == name), "{name} is not in the table");
    }
}

#[test]
fn outputs_in_a_region_are_the_composites() {
    let _alone = alone();
    for_each_case(|case, values, device, kind| {
        let _region = enter(device, kind);
        let found = (case.fused)(values).expect("fused");
        let expected = (case.composite)(values).expect("composite");
        for (found, expected) in found.iter().zip(&expected) {
            let wanted = case.kind.map_or(expected.kind(), |of| of(kind, device));
            assert_eq!(found.kind(), wanted, "{}", case.name);
            let [found, expected] = [found, expected].map(|tensor| tensor.to_kind(Kind::Float));
            assert_close(&found, &expected, 3e-2, 3e-2);
        }
    });
}

#[test]
fn a_backward_pass_computes_the_same_inside_a_region_and_outside() {
    let _alone = alone();
    for_each_case(|case, values, device, kind| {
        for forward in [false, true] {
            for create_graph in [false, true] {
                let of = |backward| {
                    let inside = Inside { forward, backward, create_graph };
                    outcome(case.fused, values, || enter(device, kind), inside)
                };
                let what = format!("{}, forward {forward}, create_graph {create_graph}", case.name);
                assert_same(&of(true), &of(false), &what);
                assert_eq!(Autocast::kind(device), None, "{what}");
            }
        }
    });
}

#[test]
fn nothing_changes_where_autocast_is_off_in_a_region() {
    let _alone = alone();
    for_each_case(|case, values, device, kind| {
        for create_graph in [false, true] {
            let of = || {
                let inside = Inside { forward: true, backward: true, create_graph };
                let off = || Autocast::disabled(device).expect("off");
                outcome(case.fused, values, off, inside)
            };
            let expected = of();
            let _region = enter(device, kind);
            assert_same(&of(), &expected, case.name);
            assert_eq!(Autocast::kind(device), Some(kind), "{}", case.name);
        }
    });
}

#[test]
fn the_innermost_region_decides() {
    let _alone = alone();
    for_each_case(|case, values, device, kind| {
        let other = if kind == Kind::Half { Kind::BFloat16 } else { Kind::Half };
        for create_graph in [false, true] {
            // The backward pass runs in the outer region, or in none.
            let of = || {
                let inside = Inside { forward: true, backward: false, create_graph };
                outcome(case.fused, values, || enter(device, kind), inside)
            };
            let expected = of();
            let _outer = enter(device, other);
            let _off = Autocast::disabled(device).expect("off");
            let _on = enter(device, other);
            assert_same(&of(), &expected, case.name);
            assert_eq!(Autocast::kind(device), Some(other), "{}", case.name);
        }
    });
}

/// A checkpoint runs the operator again in the backward pass, in the region of the forward pass.
#[test]
fn a_checkpoint_computes_the_same_inside_a_region_and_outside() {
    let _alone = alone();
    for_each_case(|case, values, device, kind| {
        let fused = case.fused;
        let recomputed = |inputs: &[Tensor]| {
            let inputs: Vec<Option<&Tensor>> = inputs.iter().map(Some).collect();
            let call = move |inputs: &[Option<Tensor>]| {
                let inputs: Vec<Tensor> =
                    inputs.iter().flatten().map(Tensor::shallow_clone).collect();
                Ok(Tensors::from(fused(&inputs)?.into_iter().map(Some).collect::<Vec<_>>()))
            };
            Ok(checkpoint(call, &inputs)?.into_vec().into_iter().flatten().collect())
        };
        for forward in [false, true] {
            for create_graph in [false, true] {
                let inside = |backward| Inside { forward, backward, create_graph };
                let region = || enter(device, kind);
                let what = format!("{}, forward {forward}, create_graph {create_graph}", case.name);
                let outside = outcome(recomputed, values, region, inside(false));
                assert_same(&outcome(recomputed, values, region, inside(true)), &outside, &what);
                // With a checkpoint, second derivatives are sums in another order.
                if !create_graph {
                    assert_same(&outside, &outcome(fused, values, region, inside(false)), &what);
                }
            }
        }
    });
}

/// Two layers in both directions, in a region: the kinds of the outputs and of the last h, and how far the
/// outputs are from those outside.
fn layers_in_a_region(
    is_lstm: bool,
    device: Device,
    kind: Kind,
    lengths: Option<&[i64]>,
) -> ([Kind; 2], f64) {
    let vs = nn::VarStore::new(device);
    let config = RNNConfig { num_layers: 2, bidirectional: true, ..Default::default() };
    let lstm = layers::lstm(vs.root() / "lstm", 5, 6, config);
    let gru = layers::gru(vs.root() / "gru", 5, 6, config);
    let x = weight(&[3, 4, 5], device);
    let run = || {
        let (output, h) = if is_lstm {
            let zero = lstm.zero_state(3);
            let (output, state) = match lengths {
                Some(lengths) => lstm.seq_padded(&x, lengths, &zero),
                None => lstm.seq_init(&x, &zero),
            };
            (output, state.h())
        } else {
            let zero = gru.zero_state(3);
            let (output, state) = match lengths {
                Some(lengths) => gru.seq_padded(&x, lengths, &zero),
                None => gru.seq_init(&x, &zero),
            };
            (output, state.value())
        };
        let gradient = grad(&[&output.sum(Kind::Float)], &[&x], &Default::default());
        assert_eq!(gradient.and_then(Tensors::single).expect("a gradient").kind(), Kind::Float);
        (output, h)
    };
    let (exact, _) = run();
    let _region = enter(device, kind);
    let (output, h) = run();
    let error = (output.to_kind(Kind::Float) - exact).abs().max().double_value(&[]);
    ([output.kind(), h.kind()], error)
}

#[test]
fn recurrent_layers_run_in_a_region() {
    let _alone = alone();
    for device in devices() {
        for kind in [Kind::BFloat16, Kind::Half] {
            for lengths in [None, Some(&[4_i64, 2, 1][..]), Some(&[4, 4, 4])] {
                for is_lstm in [false, true] {
                    let is_cast = device.is_cuda() || (is_lstm && lengths.is_none());
                    let expected = if is_cast { kind } else { Kind::Float };
                    let (kinds, error) = layers_in_a_region(is_lstm, device, kind, lengths);
                    assert_eq!(kinds, [expected; 2], "{device:?} {lengths:?} {is_lstm}");
                    assert!(
                        error > 0.0 && error < 3e-2,
                        "{device:?} {lengths:?} {is_lstm}: {error}"
                    );
                }
            }
        }
    }
}
