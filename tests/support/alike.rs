//! Checks that what a caller sees of a result, apart from its values, does not depend on the way
//! that computes it.

use super::KINDS;
use std::fmt::Debug;
use tch::{Device, Kind, Tensor};
use tch_extension::Result;
use tch_extension::autograd::{GradOptions, grad};
use tch_extension::testing::{Layout, devices};

const LAYOUTS: [Layout; 3] = [Layout::Contiguous, Layout::Transposed, Layout::Expanded];

/// What a caller sees of a tensor, apart from its values.
#[derive(Debug, PartialEq, Eq)]
struct Look {
    kind: Kind,
    size: Vec<i64>,
    stride: Vec<i64>,
}

/// Checks that outputs and gradients have the same sizes, kinds and strides by each of these ways,
/// of which the first is the one that the plan chooses, and that none of them shares memory with an
/// argument, with an incoming gradient or with another result. All results must be row-major, as
/// new tensors are, since a kernel of this crate makes them so. It checks on each device, in each
/// kind, for arguments of each of these `sizes` in several layouts, with and without gradients.
pub fn assert_alike<W: Copy + Debug>(
    ways: &[W],
    sizes: &[&[&[i64]]],
    by: impl Fn(W, &[Tensor]) -> Result<Vec<Tensor>>,
) {
    for device in devices() {
        for kind in KINDS {
            for sizes in sizes {
                for layouts in layouts(sizes.len()) {
                    for needs in needs(sizes.len()) {
                        for incoming in LAYOUTS {
                            let looks = |way: W| {
                                let arguments = arguments(sizes, &layouts, &needs, (kind, device));
                                let outputs = by(way, &arguments).expect("outputs");
                                looks(&arguments, &outputs, incoming).unwrap_or_else(|shared| {
                                    panic!("{way:?} {kind:?} {device:?} {sizes:?} {layouts:?} {needs:?} {incoming:?}: {shared}")
                                })
                            };
                            let expected = looks(ways[0]);
                            for &way in &ways[1..] {
                                assert_eq!(
                                    looks(way),
                                    expected,
                                    "{way:?} {kind:?} {device:?} {sizes:?} {layouts:?} {needs:?} {incoming:?}"
                                );
                            }
                            // Without a gradient there is only one case.
                            if !needs.contains(&true) {
                                break;
                            }
                        }
                    }
                }
            }
        }
    }
}

/// Each layout for all arguments, and each but the first for one of them.
fn layouts(count: usize) -> Vec<Vec<Layout>> {
    let mut all: Vec<Vec<Layout>> = LAYOUTS.iter().map(|&layout| vec![layout; count]).collect();
    for layout in &LAYOUTS[1..] {
        for place in 0..count {
            let mut one = vec![Layout::Contiguous; count];
            one[place] = *layout;
            all.push(one);
        }
    }
    all
}

/// Which arguments require grad: none, all, or one.
fn needs(count: usize) -> Vec<Vec<bool>> {
    let one = (0..count).map(|only| (0..count).map(|place| place == only).collect());
    [vec![false; count], vec![true; count]].into_iter().chain(one).collect()
}

fn arguments(
    sizes: &[&[i64]],
    layouts: &[Layout],
    needs: &[bool],
    options: (Kind, Device),
) -> Vec<Tensor> {
    let argument = |((size, layout), &needs): ((&&[i64], &Layout), &bool)| {
        let values = Tensor::full(*size, 0.5, options);
        layout.of(&values).expect("a layout").set_requires_grad(needs)
    };
    sizes.iter().zip(layouts).zip(needs).map(argument).collect()
}

/// The looks of the outputs, and of the gradients if there are any. An error says which results
/// share memory, or which one is not row-major.
fn looks(
    arguments: &[Tensor],
    outputs: &[Tensor],
    incoming: Layout,
) -> std::result::Result<Vec<Option<Look>>, String> {
    let mut others: Vec<(String, Tensor)> = Vec::new();
    let named = |name: &str, tensors: &[Tensor]| -> Vec<(String, Tensor)> {
        let name = |(place, tensor): (usize, &Tensor)| (format!("{name} {place}"), tensor.detach());
        tensors.iter().enumerate().map(name).collect()
    };
    others.extend(named("argument", arguments));
    let mut results: Vec<(String, Option<Tensor>)> =
        named("output", outputs).into_iter().map(|(name, tensor)| (name, Some(tensor))).collect();
    let leaves: Vec<&Tensor> = arguments.iter().filter(|leaf| leaf.requires_grad()).collect();
    if !leaves.is_empty() {
        let vectors: Vec<Tensor> = outputs
            .iter()
            .map(|output| incoming.of(&output.detach()).expect("an incoming gradient"))
            .collect();
        let vectors_or_none: Vec<Option<&Tensor>> = vectors.iter().map(Some).collect();
        let options = GradOptions {
            grad_outputs: &vectors_or_none,
            allow_unused: true,
            ..Default::default()
        };
        let outputs: Vec<&Tensor> = outputs.iter().collect();
        let gradients = grad(&outputs, &leaves, &options).expect("gradients").into_vec();
        others.extend(named("incoming gradient", &vectors));
        let name = |(place, gradient)| (format!("gradient {place}"), gradient);
        results.extend(gradients.into_iter().enumerate().map(name));
    }
    let mut looks = Vec::new();
    for (name, result) in results {
        let Some(result) = result else {
            looks.push(None);
            continue;
        };
        let shares = |(_, other): &&(String, Tensor)| {
            memory(other).is_some() && memory(other) == memory(&result)
        };
        if let Some((other, _)) = others.iter().find(shares) {
            return Err(format!("{name} shares memory with {other}"));
        }
        let (kind, size, stride) = (result.kind(), result.size(), result.stride());
        if stride != row_major(&size) {
            return Err(format!("{name} of size {size:?} has strides {stride:?}"));
        }
        looks.push(Some(Look { kind, size, stride }));
        others.push((name, result));
    }
    Ok(looks)
}

/// The strides of a new tensor of this size. A contiguous tensor may have others, where its size is
/// 1 or where it is empty.
fn row_major(size: &[i64]) -> Vec<i64> {
    let mut stride = vec![1; size.len()];
    for dim in (1..size.len()).rev() {
        stride[dim - 1] = stride[dim] * size[dim].max(1);
    }
    stride
}

/// The address at which the tensor's memory begins; `None` if it has none.
fn memory(tensor: &Tensor) -> Option<usize> {
    let begin = || tensor.as_strided([1_i64], [1_i64], Some(0)).data_ptr() as usize;
    (tensor.numel() > 0).then(begin)
}
