//! Calls of operators of [`operators!`](crate::operators) as part of a graph.

use super::for_python;
use super::types::Tensors as Count;
use crate::autograd::{Context, Saver, Tensors, apply_registered};
use crate::ffi::autograd::tch_extension_grad_mode;
use crate::ffi::define::{Borrowed, Call};
use crate::ffi::graph::GraphResults;
use crate::ffi::library::Arguments;
use crate::library::CallContext;
use crate::library::with_backward::NamedArguments;
use crate::{Error, Result};
use std::ops::Range;
use tch::Tensor;

/// What a graph must know about an argument.
pub struct Place {
    /// Its name.
    pub name: &'static str,
    /// Its type in the schema.
    pub schema: fn(usize) -> String,
    /// How many tensors it is.
    pub tensors: Count,
    /// Whether the operator writes to it.
    pub written: bool,
}

/// A tensor to be saved.
pub enum Slot {
    /// The argument with this index, or each of its items.
    Argument(usize),
    /// The tensor with this index among the results.
    Result(usize),
}

/// A backward pass.
pub type Backward = fn(&CallContext<'_>, &Tensors) -> Result<Tensors>;

/// How an operator is differentiated.
pub struct Graph {
    /// Its name, without the namespace.
    pub name: &'static str,
    /// Its arguments.
    pub arguments: &'static [Place],
    /// Its backward pass. Without one, its results cannot be differentiated.
    pub backward: Option<Backward>,
    /// What is saved for the backward pass; by default everything.
    pub save: Option<&'static [Slot]>,
    /// Whether the backward pass can be differentiated.
    pub double_backward: bool,
}

impl Graph {
    /// Returns the graph itself. In a constant, a slot that is no tensor is an error of the compiler's.
    pub const fn checked(self) -> Graph {
        let slots = match self.save {
            Some(slots) => slots,
            None => &[],
        };
        let mut index = 0;
        while index < slots.len() {
            if let Slot::Argument(argument) = slots[index] {
                assert!(
                    !matches!(self.arguments[argument].tensors, Count::None),
                    "operators!: `save` takes tensors; `ctx.argument(\"name\")` finds arguments of other types"
                );
            }
            index += 1;
        }
        self
    }
}

/// The tensors among the arguments of a call, one by one.
struct Inputs<'c> {
    tensors: Vec<Option<Borrowed<'c>>>,
    /// Those of each argument.
    places: Vec<Range<usize>>,
}

impl<'c> Inputs<'c> {
    fn new(call: &'c Call<'_>, arguments: &[Place]) -> Result<Self> {
        let mut inputs = Inputs { tensors: Vec::new(), places: Vec::new() };
        for (index, place) in arguments.iter().enumerate() {
            let first = inputs.tensors.len();
            let argument = call.argument(index);
            match place.tensors {
                _ if argument.is_none() && place.tensors == Count::List => {}
                Count::None => {}
                Count::One => inputs.tensors.push(argument.tensor_or_none()?),
                Count::List => inputs.tensors.extend(argument.list(|item| item.tensor_or_none())?),
            }
            inputs.places.push(first..inputs.tensors.len());
        }
        Ok(inputs)
    }

    /// The inputs that the operator writes to.
    fn written(&self, arguments: &[Place]) -> Vec<usize> {
        let written = arguments.iter().zip(&self.places).filter(|(place, _)| place.written);
        let present = |&index: &usize| self.tensors[index].is_some();
        written.flat_map(|(_, range)| range.clone()).filter(present).collect()
    }
}

/// A call that is part of a graph.
struct Node {
    graph: &'static Graph,
    arguments: Option<Arguments>,
}

impl NamedArguments for Node {
    fn find(&self, name: &str) -> Option<(usize, String)> {
        let arguments = self.graph.arguments;
        let index = arguments.iter().position(|argument| argument.name == name)?;
        Some((index, (arguments[index].schema)(index)))
    }

    fn kept(&self) -> Option<&Arguments> {
        self.arguments.as_ref()
    }
}

impl Node {
    fn backward(&self, context: &Context<'_>, grads: &Tensors) -> Result<Tensors> {
        match self.graph.backward {
            Some(backward) => {
                backward(&CallContext::new(context, self), grads).map_err(for_python)
            }
            None => Err(Error::Autograd(
                "it has no gradient: give it a `backward` in operators!, or call it with grad mode off".to_string(),
            )),
        }
    }
}

/// The kernel for the key `Autograd`: calls the operator below autograd, and makes the call a node
/// of the graph.
pub fn differentiate(call: &mut Call<'_>, graph: &'static Graph) -> Result<()> {
    let results = run(call, graph)?;
    call.give_results(results);
    Ok(())
}

fn run(call: &Call<'_>, graph: &'static Graph) -> Result<GraphResults> {
    let inputs = Inputs::new(call, graph.arguments)?;
    let given: Vec<Option<&Tensor>> = inputs.tensors.iter().map(|input| input.as_deref()).collect();
    let needs_graph =
        tch_extension_grad_mode() && given.iter().flatten().any(|input| input.requires_grad());
    let has_backward = graph.backward.is_some();
    let node =
        Node { graph, arguments: (needs_graph && has_backward).then(|| call.keep()).transpose()? };
    let written = inputs.written(graph.arguments);
    let mut results = None;
    let outputs = apply_registered(
        graph.name,
        graph.double_backward,
        &given,
        |saver, _| {
            let (made, outputs) = forward(call, graph, &inputs, &written, saver)?;
            results = Some(made);
            Ok(outputs)
        },
        move |context, grads| node.backward(context, grads),
    )?;
    let Some(mut results) = results else {
        return Err(Error::msg("internal error: a forward pass has no results"));
    };
    // The tensors that were written to are first. They are the caller's own, and are in the graph now.
    let outputs: &[Option<Tensor>] = &outputs;
    results.replace(outputs.get(written.len()..).unwrap_or_default())?;
    Ok(results)
}

/// Calls the operator. The outputs of the node are what it wrote to, and then its results.
fn forward(
    call: &Call<'_>,
    graph: &Graph,
    inputs: &Inputs<'_>,
    written: &[usize],
    saver: &mut Saver<'_>,
) -> Result<(GraphResults, Tensors)> {
    for &index in written {
        let argument = inputs.places.iter().position(|range| range.contains(&index));
        saver.check_in_place(
            index,
            argument.map_or("", |argument| graph.arguments[argument].name),
        )?;
        saver.mark_dirty(index);
    }
    let results = call.call_below()?;
    let tensors = results.tensors();
    if graph.backward.is_some() {
        save(graph, inputs, &tensors, saver);
    }
    if written.is_empty() {
        return Ok((results, tensors.into()));
    }
    let changed =
        written.iter().map(|&index| inputs.tensors[index].as_deref().map(Tensor::shallow_clone));
    let outputs: Vec<Option<Tensor>> = changed.chain(tensors).collect();
    Ok((results, outputs.into()))
}

fn save(graph: &Graph, inputs: &Inputs<'_>, results: &[Option<Tensor>], saver: &mut Saver<'_>) {
    let Some(slots) = graph.save else {
        inputs.tensors.iter().for_each(|input| saver.save_optional(input.as_deref()));
        return results.iter().for_each(|result| saver.save_optional(result.as_ref()));
    };
    for slot in slots {
        match slot {
            Slot::Argument(index) => inputs.tensors[inputs.places[*index].clone()]
                .iter()
                .for_each(|input| saver.save_optional(input.as_deref())),
            Slot::Result(index) => {
                saver.save_optional(results.get(*index).and_then(Option::as_ref));
            }
        }
    }
}
