//! Properties of the gradients.

use super::run::{Case, Outcome, tensors_of};
use crate::autograd::{GradOptions, grad};
use crate::testing::compare::{is_complex, values};
use crate::testing::samples::{Layout, noise};
use crate::{Error, Result};
use tch::{Kind, Tensor};

/// If there are more inputs than this, not every set of them is tried, because there would be too
/// many sets.
const MOST_VARIABLES: usize = 6;

pub(super) fn subsets(case: &Case<'_>) -> Result<()> {
    if !case.variables.is_empty() && case.vectors.iter().all(Option::is_none) {
        return Err(Error::msg("inputs require grad, but no output does: is the graph cut?"));
    }
    for subset in sets(&case.variables) {
        let what = format!("with gradients for inputs {subset:?} only");
        let leaves = tensors_of(&case.copies()?);
        for (index, leaf) in leaves.iter().enumerate() {
            let _ = leaf.f_set_requires_grad(subset.contains(&index))?;
        }
        let found = case.run(&leaves).map_err(|error| Error::msg(format!("{what}: {error}")))?;
        let gradients = (0..leaves.len()).map(|index| {
            let gradient =
                case.expected.gradients[index].as_ref().filter(|_| subset.contains(&index));
            gradient.map(Tensor::shallow_clone)
        });
        let outputs = super::run::detached(&case.expected.outputs)?;
        case.runner.agree(&what, &found, &Outcome { outputs, gradients: gradients.collect() })?;
    }
    Ok(())
}

fn sets(variables: &[usize]) -> Vec<Vec<usize>> {
    let chosen = |bits: usize| {
        let is_in =
            |(place, &variable): (usize, &usize)| (bits >> place & 1 == 1).then_some(variable);
        variables.iter().enumerate().filter_map(is_in).collect::<Vec<_>>()
    };
    if variables.len() <= MOST_VARIABLES {
        return (1..1 << variables.len()).map(chosen).collect();
    }
    let single = variables.iter().map(|&variable| vec![variable]);
    let all_but_one = variables.iter().map(|&left_out| {
        variables.iter().copied().filter(|&variable| variable != left_out).collect::<Vec<_>>()
    });
    single.chain(all_but_one).collect()
}

pub(super) fn incoming(case: &Case<'_>) -> Result<()> {
    let with = |vectors: &[Option<Tensor>]| case.runner.run(&tensors_of(&case.copies()?), vectors);
    for layout in Layout::ALL {
        let what = format!("with incoming gradients {layout:?}");
        let lay_out =
            |vector: &Option<Tensor>| vector.as_ref().map(|vector| layout.of(vector)).transpose();
        let vectors = case.vectors.iter().map(lay_out).collect::<Result<Vec<_>>>()?;
        let contiguous = |vector: &Option<Tensor>| {
            vector.as_ref().map(|vector| Layout::Contiguous.of(vector)).transpose()
        };
        let expected = with(&vectors.iter().map(contiguous).collect::<Result<Vec<_>>>()?)?;
        let found = with(&vectors).map_err(|error| Error::msg(format!("{what}: {error}")))?;
        case.runner.agree(&what, &found, &expected)?;
    }
    let present: Vec<usize> =
        (0..case.vectors.len()).filter(|&index| case.vectors[index].is_some()).collect();
    for &only in present.iter().filter(|_| present.len() > 1) {
        let what = format!("with an incoming gradient for output {only} alone");
        let others = |zeros: bool| {
            let of = |(index, vector): (usize, &Option<Tensor>)| -> Result<Option<Tensor>> {
                Ok(match vector {
                    Some(vector) if index == only => Some(vector.shallow_clone()),
                    Some(vector) if zeros => Some(vector.f_zeros_like()?),
                    _ => None,
                })
            };
            case.vectors.iter().enumerate().map(of).collect::<Result<Vec<_>>>()
        };
        let expected = with(&others(true)?)?;
        let found =
            with(&others(false)?).map_err(|error| Error::msg(format!("{what}: {error}")))?;
        case.runner.agree(&what, &found, &expected)?;
    }
    Ok(())
}

/// How far each input is moved for a numerical derivative.
const EPS: f64 = 1e-6;

pub(super) fn create_graph(case: &Case<'_>) -> Result<()> {
    let kinds = case.connected().into_iter().map(|index| Ok(case.inputs[index].f_kind()?));
    let kinds = kinds.collect::<Result<Vec<_>>>()?;
    // The half kinds round too much for two formulas of the same derivative to agree, even more so
    // after three steps.
    if kinds.is_empty() || !kinds.iter().all(|kind| matches!(kind, Kind::Float | Kind::Double)) {
        return Ok(());
    }
    let twice = kinds.iter().all(|&kind| kind == Kind::Double);
    derivatives_of(case, 1, twice)?;
    // The operator may not accept its own outputs as inputs.
    let chained = loss(case, &leaves(case, 0.0)?, 3).and_then(|loss| Ok(loss.f_isfinite()?));
    match chained.is_ok_and(|finite| finite.int64_value(&[]) == 1) {
        true => derivatives_of(case, 3, twice),
        false => Ok(()),
    }
}

/// Checks that the first derivatives are the same with and without a graph and, if `twice`, that
/// the second derivatives are the derivatives of the first.
fn derivatives_of(case: &Case<'_>, steps: usize, twice: bool) -> Result<()> {
    let what = format!("in {steps} step{}", if steps == 1 { "" } else { "s" });
    let plain = first(case, &leaves(case, 0.0)?, steps, false)?;
    let variables = leaves(case, 0.0)?;
    // An error is as good as a right derivative, because nobody mistakes it for a number.
    let Ok(with_graph) = first(case, &variables, steps, true) else { return Ok(()) };
    for (place, (with, without)) in with_graph.iter().zip(&plain).enumerate() {
        let name =
            format!("{what}, the gradient of input {} with create_graph", case.connected()[place]);
        let (with, without) = match (with, without) {
            (Some(with), Some(without)) => (with.f_detach()?, without.shallow_clone()),
            (Some(one), None) | (None, Some(one)) => (one.f_detach()?, one.f_zeros_like()?),
            (None, None) => continue,
        };
        case.runner.close(&name, &with, &without)?;
    }
    if twice { second(case, &variables, steps, &with_graph) } else { Ok(()) }
}

/// All inputs, moved by this amount along a fixed direction.
fn leaves(case: &Case<'_>, by: f64) -> Result<Vec<Tensor>> {
    let mut leaves = tensors_of(&case.copies()?);
    let _guard = tch::no_grad_guard();
    for index in case.connected().into_iter().filter(|_| by != 0.0) {
        // Not in place, because elements of an expanded tensor share memory.
        let moved = leaves[index]
            .f_detach()?
            .f_add(&direction(&leaves[index], index)?.f_mul_scalar(by)?)?;
        leaves[index] = moved.f_set_requires_grad(true)?;
    }
    Ok(leaves)
}

fn direction(leaf: &Tensor, index: usize) -> Result<Tensor> {
    Ok(noise(&leaf.size(), 200 + index)?.f_to_kind(leaf.f_kind()?)?.f_to_device(leaf.device())?)
}

/// A number that depends on every output of several steps. Each differentiable input depends on the
/// previous one. Each step uses the outputs of the previous step as inputs where they fit, bounded
/// by atan, because a chain such as exp(exp(exp(x))) soon exceeds the range of a double.
fn loss(case: &Case<'_>, leaves: &[Tensor], steps: usize) -> Result<Tensor> {
    let mut inputs: Vec<Tensor> = leaves.iter().map(Tensor::shallow_clone).collect();
    let connected = case.connected();
    for pair in connected.windows(2) {
        let mean = inputs[pair[0]].f_mean(inputs[pair[0]].f_kind()?)?.f_mul_scalar(0.1)?;
        let leaf = &leaves[pair[1]];
        // An input without elements has no mean.
        if inputs[pair[0]].numel() > 0 {
            inputs[pair[1]] =
                leaf.f_add(&mean.f_to_kind(leaf.f_kind()?)?.f_to_device(leaf.device())?)?;
        }
    }
    let mut total: Option<Tensor> = None;
    for _ in 0..steps {
        let outputs = case.runner.call(&inputs)?;
        for (output, vector) in outputs.iter().zip(&case.vectors) {
            let (Some(output), Some(vector)) = (output, vector) else { continue };
            let mut part = output.f_mul(vector)?.f_sum(output.f_kind()?)?;
            if is_complex(part.f_kind()?) {
                part = part.f_real()?;
            }
            total = Some(match total {
                Some(total) => {
                    total.f_add(&part.f_to_kind(total.f_kind()?)?.f_to_device(total.device())?)?
                }
                None => part,
            });
        }
        let mut free: Vec<&Tensor> =
            outputs.iter().flatten().filter(|output| output.defined()).collect();
        for &index in &connected {
            let fits = |output: &&Tensor| {
                output.size() == inputs[index].size()
                    && output.device() == inputs[index].device()
                    && output.f_kind().ok() == inputs[index].f_kind().ok()
                    && output.requires_grad()
            };
            if let Some(place) = free.iter().position(fits) {
                // The derivative of atan reads its argument and not its result, which the operator
                // may change in place.
                inputs[index] = free.remove(place).f_atan()?;
            }
        }
    }
    total.ok_or_else(|| Error::msg("no output has a derivative"))
}

/// Computes the gradients of the variables.
fn first(
    case: &Case<'_>,
    leaves: &[Tensor],
    steps: usize,
    create_graph: bool,
) -> Result<Vec<Option<Tensor>>> {
    let variables: Vec<&Tensor> = case.connected().iter().map(|&index| &leaves[index]).collect();
    let options = GradOptions { create_graph, allow_unused: true, ..Default::default() };
    Ok(grad(&[&loss(case, leaves, steps)?], &variables, &options)?.into_vec())
}

/// Combines the gradients to one number.
fn combined(gradients: &[Option<Tensor>]) -> Result<Option<Tensor>> {
    let mut total: Option<Tensor> = None;
    for (place, gradient) in gradients.iter().enumerate() {
        let Some(gradient) = gradient else { continue };
        let weights = noise(&gradient.size(), 300 + place)?.f_to_device(gradient.device())?;
        let part = gradient.f_mul(&weights)?.f_sum(Kind::Double)?;
        total = Some(match total {
            Some(total) => total.f_add(&part.f_to_device(total.device())?)?,
            None => part,
        });
    }
    Ok(total)
}

/// Compares the derivative of the gradients along one direction with a difference of gradients.
/// Again, an error is as good as a right derivative.
fn second(
    case: &Case<'_>,
    leaves: &[Tensor],
    steps: usize,
    gradients: &[Option<Tensor>],
) -> Result<()> {
    let Some(combination) = combined(gradients)? else { return Ok(()) };
    let mut analytical = 0.0;
    // Without a graph, whoever differentiates it treats it as a constant.
    if combination.requires_grad() {
        let variables: Vec<&Tensor> =
            case.connected().iter().map(|&index| &leaves[index]).collect();
        let options = GradOptions { allow_unused: true, ..Default::default() };
        let Ok(found) = grad(&[&combination], &variables, &options) else { return Ok(()) };
        for (index, found) in case.connected().into_iter().zip(found.iter()) {
            let Some(found) = found else { continue };
            analytical += sum(&found.f_mul(&direction(&leaves[index], index)?)?)?;
        }
    }
    let at = |by: f64| -> Result<f64> {
        let gradients = first(case, &self::leaves(case, by)?, steps, false)?;
        combined(&gradients)?.map_or(Ok(0.0), |total| sum(&total))
    };
    let (above, below) = (at(EPS)?, at(-EPS)?);
    let numerical = (above - below) / (2.0 * EPS);
    let allowed = 1e-5 + 1e-3 * numerical.abs() + 1e-8 * above.abs();
    // `<=` is false for NaN, so NaN is wrong, too.
    if (analytical - numerical).abs() <= allowed {
        return Ok(());
    }
    Err(Error::msg(format!(
        "in {steps} step{}, a second derivative is {analytical:?}, numerically {numerical:?}; see \
         autograd::differentiate_reference, or leave DOUBLE_BACKWARD false to have an error",
        if steps == 1 { "" } else { "s" }
    )))
}

fn sum(tensor: &Tensor) -> Result<f64> {
    Ok(values(tensor)?.iter().sum())
}
