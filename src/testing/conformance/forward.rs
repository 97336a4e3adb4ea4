//! Properties of the outputs.

use super::caught;
use super::run::{Case, detached, same_bits, tensors_of};
use crate::autograd::Tensors;
use crate::testing::replica::Replica;
use crate::testing::samples::Layout;
use crate::{Error, Result};
use tch::Tensor;

pub(super) fn inputs_unchanged(case: &Case<'_>) -> Result<()> {
    let copies = case.copies()?;
    let memories = copies.iter().map(Replica::memory).collect::<Result<Vec<_>>>()?;
    let leaves = tensors_of(&copies);
    let outlines = |leaves: &[Tensor]| leaves.iter().map(outline).collect::<Vec<_>>();
    let before = outlines(&leaves);
    let outputs = case.runner.call(&leaves)?;
    check_unchanged(case, "the forward", &copies, &memories)?;
    for (index, (before, after)) in before.iter().zip(outlines(&leaves)).enumerate() {
        let declared = case.runner.options.changed_inputs.contains(&index);
        if *before != after && !declared {
            return Err(Error::msg(format!(
                "the forward left input {index} as {after}; it was {before}"
            )));
        }
    }
    drop(outputs);

    let copies = case.copies()?;
    let memories = copies.iter().map(Replica::memory).collect::<Result<Vec<_>>>()?;
    let vectors = case.fresh_vectors();
    case.runner.run(&tensors_of(&copies), &vectors)?;
    check_unchanged(case, "forward and backward", &copies, &memories)?;
    for (index, (now, then)) in vectors.iter().zip(&case.vectors).enumerate() {
        if let (Some(now), Some(then)) = (now, then)
            && !same_bits(now, then)?
        {
            return Err(Error::msg(format!("the backward wrote to incoming gradient {index}")));
        }
    }
    declared_changes(case)
}

/// The properties of an input that an operator must not change, as text for comparison and for
/// messages. The version increases with each change in place that libtorch knows of.
fn outline(leaf: &Tensor) -> String {
    format!(
        "{:?} with strides {:?}, requires_grad {}, version {}",
        leaf.size(),
        leaf.stride(),
        leaf.requires_grad(),
        leaf.internal_version()
    )
}

fn check_unchanged(
    case: &Case<'_>,
    by: &str,
    copies: &[Replica],
    memories: &[Tensor],
) -> Result<()> {
    for (index, (copy, memory)) in copies.iter().zip(memories).enumerate() {
        if case.runner.options.changed_inputs.contains(&index) {
            // The elements of this input may change, but nothing else may.
            let _guard = tch::no_grad_guard();
            copy.tensor.f_detach()?.f_copy_(case.inputs[index])?;
        }
        if !same_bits(&copy.memory()?, memory)? {
            return Err(Error::msg(format!(
                "{by} wrote to input {index}, or to memory around it; if it is meant to change the input, \
                 declare it with mark_dirty and in changed_inputs"
            )));
        }
    }
    Ok(())
}

/// libtorch must know of a declared change, because autograd would otherwise use stale values.
fn declared_changes(case: &Case<'_>) -> Result<()> {
    let copies = case.copies()?;
    let memories = copies.iter().map(Replica::memory).collect::<Result<Vec<_>>>()?;
    let leaves = tensors_of(&copies);
    let _guard = tch::no_grad_guard();
    let versions =
        |leaves: &[Tensor]| leaves.iter().map(Tensor::internal_version).collect::<Vec<_>>();
    let before = versions(&leaves);
    case.runner.call(&leaves)?;
    let after = versions(&leaves);
    for &index in case.runner.options.changed_inputs {
        let Some(leaf) = leaves.get(index) else {
            return Err(Error::msg(format!(
                "changed_inputs names input {index}, but there is no such input"
            )));
        };
        let changed = !same_bits(leaf, case.inputs[index])?;
        if changed && before[index] == after[index] {
            return Err(Error::msg(format!(
                "input {index} was changed, but its version was not: is mark_dirty missing?"
            )));
        }
    }
    check_unchanged(case, "the forward with grad mode off", &copies, &memories)
}

pub(super) fn no_aliasing(case: &Case<'_>) -> Result<()> {
    outputs_apart(case)?;
    let without_graph = {
        let _guard = tch::no_grad_guard();
        [outputs_apart(case)?, outputs_apart(case)?]
    };
    calls_apart("output", &without_graph[0], &without_graph[1])?;
    let with_graph = [case.again()?, case.again()?];
    calls_apart("output", &with_graph[0].outputs, &with_graph[1].outputs)?;
    calls_apart("the gradient of input", &with_graph[0].gradients, &with_graph[1].gradients)
}

fn calls_apart(what: &str, of: &[Option<Tensor>], others: &[Option<Tensor>]) -> Result<()> {
    for (place, tensor) in of.iter().enumerate() {
        let Some(tensor) = tensor.as_ref().filter(|tensor| tensor.defined()) else { continue };
        for other in others.iter().flatten().filter(|other| other.defined()) {
            if overlap(tensor, other)? {
                let text = "shares memory with that of another call, which overwrites it; return new tensors";
                return Err(Error::msg(format!("{what} {place} {text}")));
            }
        }
    }
    Ok(())
}

/// Returns the outputs of a call after checking that each has memory of its own.
fn outputs_apart(case: &Case<'_>) -> Result<Tensors> {
    let leaves = tensors_of(&case.copies()?);
    let outputs = case.runner.call(&leaves)?;
    let options = case.runner.options;
    for (place, output) in outputs.iter().enumerate() {
        let Some(output) = output.as_ref().filter(|output| output.defined()) else { continue };
        for (index, leaf) in leaves.iter().enumerate() {
            let declared = options.changed_inputs.contains(&index)
                || options.aliases.contains(&(place, index));
            if !declared && overlap(output, leaf)? {
                return Err(Error::msg(format!(
                    "output {place} shares memory with input {index}: a change of one in place would change \
                     the other; copy it, or declare it in aliases"
                )));
            }
        }
        for (other, earlier) in outputs.iter().enumerate().take(place) {
            let Some(earlier) = earlier.as_ref().filter(|earlier| earlier.defined()) else {
                continue;
            };
            if overlap(output, earlier)? {
                return Err(Error::msg(format!(
                    "outputs {other} and {place} share memory; copy one"
                )));
            }
        }
    }
    Ok(outputs)
}

/// Whether the ranges of memory from the first to the last element have bytes in common.
fn overlap(a: &Tensor, b: &Tensor) -> Result<bool> {
    // libtorch has tensors of zeros without memory.
    let nowhere = |tensor: &Tensor| tensor.numel() == 0 || tensor.data_ptr().is_null();
    if a.device() != b.device() || nowhere(a) || nowhere(b) {
        return Ok(false);
    }
    let (a, b) = (stretch(a)?, stretch(b)?);
    Ok(a.0 < b.1 && b.0 < a.1)
}

fn stretch(tensor: &Tensor) -> Result<(usize, usize)> {
    let last: i64 =
        tensor.size().iter().zip(tensor.stride()).map(|(size, stride)| (size - 1) * stride).sum();
    let begin = tensor.data_ptr() as usize;
    Ok((begin, begin + (last as usize + 1) * tensor.f_kind()?.elt_size_in_bytes()))
}

pub(super) fn determinism(case: &Case<'_>) -> Result<()> {
    if !case.runner.options.deterministic {
        return Ok(());
    }
    let again = case.again()?;
    let pairs =
        |what: &'static str, again: &[Option<Tensor>], first: &[Option<Tensor>]| -> Result<()> {
            for (index, (again, first)) in again.iter().zip(first).enumerate() {
                if let (Some(again), Some(first)) = (again, first)
                    && !same_bits(again, first)?
                {
                    let text = format!(
                        "{what} {index} has other bits in a second run with the same inputs"
                    );
                    return Err(Error::msg(text));
                }
            }
            Ok(())
        };
    pairs("output", &again.outputs, &case.expected.outputs)?;
    pairs("the gradient of input", &again.gradients, &case.expected.gradients)
}

pub(super) fn no_grad(case: &Case<'_>) -> Result<()> {
    let leaves = tensors_of(&case.copies()?);
    let outputs = {
        let _guard = tch::no_grad_guard();
        case.runner.call(&leaves)?
    };
    without_graph(case, "with grad mode off", &leaves, &outputs)?;
    let leaves = tensors_of(&case.copies()?);
    let leaves = leaves.iter().map(Tensor::f_detach).collect::<std::result::Result<Vec<_>, _>>()?;
    without_graph(case, "without inputs that require grad", &leaves, &case.runner.call(&leaves)?)
}

fn without_graph(
    case: &Case<'_>,
    when: &str,
    leaves: &[Tensor],
    outputs: &[Option<Tensor>],
) -> Result<()> {
    for (index, output) in outputs.iter().enumerate() {
        let Some(output) =
            output.as_ref().filter(|output| output.defined() && output.requires_grad())
        else {
            continue;
        };
        // A view of a leaf says that it requires grad, even if it was made with grad mode off.
        let views = leaves.iter().map(|leaf| overlap(output, leaf)).collect::<Result<Vec<_>>>()?;
        if !views.contains(&true) {
            return Err(Error::msg(format!("{when}, output {index} requires grad")));
        }
    }
    case.runner.outputs_agree(when, &detached(outputs)?, &case.expected.outputs)
}

pub(super) fn layouts(case: &Case<'_>) -> Result<()> {
    for layout in Layout::ALL {
        let changed = |index: usize| case.runner.options.changed_inputs.contains(&index);
        let fits = |index: &usize| layout != Layout::Expanded || !changed(*index);
        let places: Vec<usize> = (0..case.inputs.len()).filter(fits).collect();
        in_layout(case, layout, &places)?;
        if places.len() > 1 {
            places.iter().try_for_each(|&place| in_layout(case, layout, &[place]))?;
        }
    }
    Ok(())
}

fn in_layout(case: &Case<'_>, layout: Layout, places: &[usize]) -> Result<()> {
    let (mut laid_out, mut contiguous) = (Vec::new(), Vec::new());
    for (index, input) in case.inputs.iter().enumerate() {
        let layout = if places.contains(&index) { layout } else { Layout::Contiguous };
        let tensor = layout.of(input)?;
        let leaf = |tensor: Tensor| tensor.f_set_requires_grad(input.requires_grad());
        contiguous.push(leaf(Layout::Contiguous.of(&tensor)?)?);
        laid_out.push(leaf(tensor)?);
    }
    let what = match places {
        [place] => format!("with input {place} {layout:?}"),
        _ => format!("with inputs {layout:?}"),
    };
    let (found, expected) = (caught(|| case.run(&laid_out)), caught(|| case.run(&contiguous)));
    if layout == Layout::Expanded && expected.is_err() {
        // The layout is not to blame: not every operator accepts repeated values, as in a singular
        // matrix.
        return Ok(());
    }
    let found = found.map_err(|error| Error::msg(format!("{what}: {error}")))?;
    case.runner.agree(&what, &found, &expected?)
}
