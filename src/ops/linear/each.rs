//! Three linear layers of one input, such as queries, keys and values.

use super::{Linear, LinearIn, bias_gradient, composite, gradients};
use crate::amp::CastPolicy;
use crate::operator::{
    Again, Args, Borrowed, Call, Dim, Gradients, Incoming, Leaf, Made, Meta, Metas, Needs,
    Operator, Outputs, Second, call,
};
use crate::ops::gemm::{self, Way};
use crate::ops::rows;
use crate::ops::way::forced;
use crate::{Error, Result};
use tch::Tensor;

/// The weight and the bias of a layer.
pub type Layer<'a> = (&'a Tensor, Option<&'a Tensor>);

/// The outputs of three [`linear`](super::linear()) layers of one input.
///
/// For few rows on CUDA, one kernel computes all three, which may add in another order than three calls of
/// `linear`. The backward pass adds the three gradients of the input as it computes them. The three outputs
/// have one node: a backward pass of one of them frees what those of the others need, unless it keeps the graph.
///
/// # Errors
/// As for [`f_linear`](super::f_linear).
pub fn f_linear_each(input: &Tensor, layers: [Layer<'_>; 3]) -> Result<[Tensor; 3]> {
    let [(first, first_bias), (second, second_bias), (third, third_bias)] = layers;
    let of = LinearEachIn { input, first, second, third, first_bias, second_bias, third_bias };
    let LinearEachOut { first, second, third } = call(LinearEach {}, &of)?;
    Ok([first, second, third])
}

crate::signature! {
    /// `input @ weight.T + bias` for three weights and their biases.
    LinearEach: LinearEachIn -> LinearEachOut = "linear"(
        input, first, second, third, first_bias?, second_bias?, third_bias?
    ) -> (first, second, third)
}

/// The arguments of each layer.
fn layers<L: Leaf<Required: Clone>>(of: LinearEachIn<L>) -> [LinearIn<L>; 3] {
    let input = of.input;
    [
        LinearIn { input: input.clone(), weight: of.first, bias: of.first_bias },
        LinearIn { input: input.clone(), weight: of.second, bias: of.second_bias },
        LinearIn { input, weight: of.third, bias: of.third_bias },
    ]
}

impl Operator for LinearEach {
    type Kept = ();
    type Plan = Way;

    const AUTOCAST: [Option<CastPolicy>; 2] = Linear::AUTOCAST;
    const SECOND: Second = Second::Itself;

    fn plan(&self, _: &Args<'_, Self>, _: &Needs<Self>) -> Result<Way> {
        Ok(forced())
    }

    fn rule<D: Dim>(
        &self,
        of: &Metas<Self, D>,
        needs: &Needs<Self>,
    ) -> Result<Made<Self, Meta<D>>> {
        let [first, second, third] = layers(of.clone());
        let [of_first, of_second, of_third] = layers(needs.clone());
        let rule = |of, needs| Ok::<_, Error>(Linear {}.rule(&of, &needs)?.outputs.output);
        Ok(Made::only(LinearEachOut {
            first: rule(first, of_first)?,
            second: rule(second, of_second)?,
            third: rule(third, of_third)?,
        }))
    }

    fn reads(&self, needs: &Needs<Self>) -> Needs<Self> {
        LinearEachIn {
            input: needs.first || needs.second || needs.third,
            first: needs.input,
            second: needs.input,
            third: needs.input,
            first_bias: false,
            second_bias: false,
            third_bias: false,
        }
    }

    fn forward(&self, call: &Call<'_, Self>) -> Result<Made<Self, Tensor>> {
        call.check()?;
        let (layers, way) = (layers(call.of.clone()), call.plan);
        let together = layers.each_ref().map(|layer| (layer.weight, layer.bias));
        let outputs = match gemm::linear_together(call.of.input, None, together, way)? {
            Some(outputs) => outputs,
            None => {
                let one =
                    |LinearIn { input, weight, bias }: &LinearIn<Borrowed<'_>>| match gemm::linear(
                        input, weight, *bias, way,
                    )? {
                        Some(output) => Ok(output),
                        None => composite(input, weight, *bias),
                    };
                let [first, second, third] = layers.each_ref().map(one);
                [first?, second?, third?]
            }
        };
        let [first, second, third] = outputs;
        Ok(Made::only(LinearEachOut { first, second, third }))
    }

    fn backward(&self, grads: Incoming<Self>, again: Again<'_, Self>) -> Result<Gradients<Self>> {
        let size = again.metas()?.input.sizes().to_vec();
        let Again { of, needs, plan, is_recorded, .. } = again;
        let LinearEachIn { input, first, second, third, .. } = of;
        let way = (!is_recorded).then_some(plan);
        let mut of_input: Option<Tensor> = None;
        let mut gradients = |grad: Option<Tensor>, weight: Option<Tensor>, needs: [bool; 2]| {
            let Some(grad) = grad else { return Ok((None, None)) };
            let grad = rows(&grad)?;
            let sum = of_input.take();
            let read = LinearIn {
                input: input.as_ref().filter(|_| needs[0]).map(Tensor::shallow_clone),
                weight: weight.as_ref().filter(|_| sum.is_none()).map(Tensor::shallow_clone),
                bias: None,
            };
            let found = gradients(&grad, &read, &size, way)?;
            of_input = match (sum, weight) {
                (Some(sum), Some(weight)) => Some(added(sum, &grad, &weight, is_recorded)?),
                (sum, _) => sum.or(found.input),
            };
            let bias = needs[1].then(|| bias_gradient(&grad, is_recorded)).transpose()?;
            Ok::<_, Error>((found.weight, bias))
        };
        let (first, first_bias) = gradients(grads.first, first, [needs.first, needs.first_bias])?;
        let (second, second_bias) =
            gradients(grads.second, second, [needs.second, needs.second_bias])?;
        let (third, third_bias) = gradients(grads.third, third, [needs.third, needs.third_bias])?;
        Ok(LinearEachIn {
            input: of_input,
            first,
            second,
            third,
            first_bias,
            second_bias,
            third_bias,
        })
    }

    fn reference(&self, of: &Args<'_, Self>) -> Result<Outputs<Self>> {
        let [first, second, third] = layers(of.clone())
            .map(|layer| super::linear_reference(layer.input, layer.weight, layer.bias));
        Ok(LinearEachOut { first: first?, second: second?, third: third? })
    }
}

/// `sum + dy W`, in the place of `sum` unless the operations are recorded. `sum` has the input's size.
fn added(sum: Tensor, grad: &Tensor, weight: &Tensor, is_recorded: bool) -> Result<Tensor> {
    let mut matrix = rows(&sum)?;
    if is_recorded {
        return Ok(matrix.f_addmm(grad, weight)?.f_view(sum.size().as_slice())?);
    }
    let _ = matrix.f_addmm_(grad, weight)?;
    Ok(sum)
}
