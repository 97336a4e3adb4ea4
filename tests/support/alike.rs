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
/// of which the first is the one that the plan chooses, and that none of them is in one piece of memory
/// with an argument, an incoming gradient or another result, of which gradients may be parts that do not
/// overlap. All results must be row-major,
/// as new tensors are, since a kernel of this crate makes them so. It checks on each device, in each
/// kind, for arguments of each of these `sizes` in several layouts, with and without gradients.
pub fn assert_alike<W: Copy + Debug>(
    ways: &[W],
    sizes: &[&[&[i64]]],
    by: impl Fn(W, &[Tensor]) -> Result<Vec<Tensor>>,
) {
    for options in devices().into_iter().flat_map(|device| KINDS.map(|kind| (kind, device))) {
        for sizes in sizes {
            for case in cases(sizes.len()) {
                let looks = |way: W| {
                    let arguments = case.arguments(sizes, options);
                    let outputs = by(way, &arguments).expect("outputs");
                    looks(&arguments, &outputs, case.incoming).unwrap_or_else(|error| {
                        panic!("{way:?} {options:?} {sizes:?} {case:?}: {error}")
                    })
                };
                let expected = looks(ways[0]);
                for &way in &ways[1..] {
                    assert_eq!(looks(way), expected, "{way:?} {options:?} {sizes:?} {case:?}");
                }
            }
        }
    }
}

/// How one call differs from another.
#[derive(Clone, Debug)]
struct Case {
    /// The layout of each argument.
    layouts: Vec<Layout>,
    /// Whether each argument requires grad.
    needs: Vec<bool>,
    /// The layout of the incoming gradients.
    incoming: Layout,
}

/// Each layout for all arguments, without gradients, with all of them and with each alone; then
/// each layout for one argument; and each for the incoming gradients.
fn cases(count: usize) -> Vec<Case> {
    let only = |place: usize| (0..count).map(|other| other == place).collect::<Vec<bool>>();
    let mut cases = Vec::new();
    for layout in LAYOUTS {
        let alike = Case {
            layouts: vec![layout; count],
            needs: vec![true; count],
            incoming: Layout::Contiguous,
        };
        cases.push(Case { needs: vec![false; count], ..alike.clone() });
        cases.extend(LAYOUTS.map(|incoming| Case { incoming, ..alike.clone() }));
        cases.extend((0..count).map(|place| Case { needs: only(place), ..alike.clone() }));
        cases.extend((0..count).map(|place| {
            let mut layouts = vec![Layout::Contiguous; count];
            layouts[place] = layout;
            Case { layouts, ..alike.clone() }
        }));
    }
    cases
}

impl Case {
    fn arguments(&self, sizes: &[&[i64]], options: (Kind, Device)) -> Vec<Tensor> {
        let argument = |((size, layout), &needs): ((&&[i64], &Layout), &bool)| {
            let values = Tensor::full(*size, 0.5, options);
            layout.of(&values).expect("a layout").set_requires_grad(needs)
        };
        sizes.iter().zip(&self.layouts).zip(&self.needs).map(argument).collect()
    }
}

/// The looks of the outputs, and of the gradients if there are any. An error says which results
/// share memory, or which one is not row-major.
fn looks(
    arguments: &[Tensor],
    outputs: &[Tensor],
    incoming: Layout,
) -> std::result::Result<Vec<Option<Look>>, String> {
    let (mut given, mut made) = (Vec::new(), Vec::<(String, Tensor)>::new());
    let named = |name: &str, tensors: &[Tensor]| -> Vec<(String, Tensor)> {
        let name = |(place, tensor): (usize, &Tensor)| (format!("{name} {place}"), tensor.detach());
        tensors.iter().enumerate().map(name).collect()
    };
    given.extend(named("argument", arguments));
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
        given.extend(named("incoming gradient", &vectors));
        let name = |(place, gradient)| (format!("gradient {place}"), gradient);
        results.extend(gradients.into_iter().enumerate().map(name));
    }
    let mut looks = Vec::new();
    for (name, result) in results {
        let Some(result) = result else {
            looks.push(None);
            continue;
        };
        let is_one_piece =
            |other: &Tensor| memory(other).is_some() && memory(other) == memory(&result);
        // Gradients may be parts of one piece of memory, as cuDNN's of the parameters are.
        let is_gradient = |name: &str| name.starts_with("gradient");
        let overlaps = |(of, other): &&(String, Tensor)| {
            let may_be_parts = is_gradient(&name) && is_gradient(of) && are_apart(other, &result);
            is_one_piece(other) && !may_be_parts
        };
        let in_given = given.iter().find(|(_, other)| is_one_piece(other));
        let in_made = || made.iter().find(overlaps);
        if let Some((other, _)) = in_given.or_else(in_made) {
            return Err(format!("{name} shares memory with {other}"));
        }
        let (kind, size, stride) = (result.kind(), result.size(), result.stride());
        if stride != row_major(&size) {
            return Err(format!("{name} of size {size:?} has strides {stride:?}"));
        }
        looks.push(Some(Look { kind, size, stride }));
        made.push((name, result));
    }
    Ok(looks)
}

/// Whether two tensors without gaps have no byte in common.
fn are_apart(a: &Tensor, b: &Tensor) -> bool {
    let bytes = |of: &Tensor| {
        let begin = of.data_ptr() as usize;
        begin..begin + of.numel() * of.kind().elt_size_in_bytes()
    };
    let (a, b) = (bytes(a), bytes(b));
    a.end <= b.start || b.end <= a.start
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
