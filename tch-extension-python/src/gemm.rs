//! `linear` and `matmul_add_relu`.

use crate::meta::{Shapes, broadcast, contiguous, likes};
use crate::node::{
    Needs, Pair, below, call, cast, gradients, gradients_by, is_eager, kernel, needs, returned,
    traced,
};
use tch::Tensor;
use tch_extension::Result;
use tch_extension::amp::CastPolicy;
use tch_extension::autograd::Inputs;
use tch_extension::library::sizes;
use tch_extension::ops::{
    f_linear, f_matmul_add_relu, linear_reference, matmul_add_relu_reference, parts,
};

tch_extension::operators! {
    namespace tch_extension;

    /// `torch.nn.functional.linear`: `input` is `[..., in]`, `weight` `[out, in]` and `bias` `[out]`. The
    /// result is `[..., out]`.
    fn linear(input: &Tensor, weight: &Tensor, bias: Option<&Tensor> = None) -> Tensor {
        cpu, cuda = linear::own,
        fake = |input, weight, bias| {
            Shapes::of("linear", "input", input)?
                .has("input", input, &["...", "in"])?
                .has("weight", weight, &["out", "in"])?
                .has("bias", bias, &["out"])?;
            let mut size = sizes(input);
            size.pop();
            size.extend(sizes(weight).into_iter().next());
            contiguous(&size, input.f_kind()?, input)
        },
        autograd = linear::autograd,
        key("AutocastCPU") = linear::autocast,
        key("AutocastCUDA") = linear::autocast,
    }

    /// The gradients of input, weight and bias.
    fn linear_backward(
        grad: &Tensor,
        input: &Tensor,
        weight: &Tensor,
        bias: Option<&Tensor>,
        needs: i64,
    ) -> (Tensor, Tensor, Tensor) {
        cpu, cuda = linear::backward,
        fake = |_grad, input, weight, bias, needs| {
            Ok(likes([Some(input), Some(weight), bias], needs)?.into())
        },
        autograd = linear::backward_autograd,
    }

    /// `relu(lhs @ rhs + bias)`; `lhs` is `[..., M, K]` or `[K]`, `rhs` is `[..., K, N]` or `[K]`, and the
    /// bias has any shape that broadcasts with that of the product.
    fn matmul_add_relu(lhs: &Tensor, rhs: &Tensor, bias: &Tensor) -> Tensor {
        cpu, cuda = matmul_add_relu::own,
        fake = matmul_add_relu::fake,
        autograd = matmul_add_relu::autograd,
        key("AutocastCPU") = matmul_add_relu::autocast,
        key("AutocastCUDA") = matmul_add_relu::autocast,
    }

    /// The gradients of lhs, rhs and bias, which read the output.
    fn matmul_add_relu_backward(
        grad: &Tensor,
        output: &Tensor,
        lhs: &Tensor,
        rhs: &Tensor,
        bias: &Tensor,
        needs: i64,
    ) -> (Tensor, Tensor, Tensor) {
        cpu, cuda = matmul_add_relu::backward,
        fake = |_grad, _output, lhs, rhs, bias, needs| {
            Ok(likes([Some(lhs), Some(rhs), Some(bias)], needs)?.into())
        },
        autograd = matmul_add_relu::backward_autograd,
    }
}

mod linear {
    use super::*;

    #[derive(Clone)]
    pub struct Linear;

    impl Pair for Linear {
        const NAME: &'static str = "linear";
        const BACKWARD: &'static str = "linear_backward";
        const INPUTS: usize = 3;
        const OUTPUTS: usize = 1;
        const KEPT: &'static [usize] = &[];

        fn call(&self, inputs: Inputs<'_>) -> Result<Vec<Tensor>> {
            call!("linear", inputs.get(0)?, inputs.get(1)?, inputs.optional(2))
        }

        fn forward(&self, inputs: Inputs<'_>, _needs: Needs) -> Result<Vec<Tensor>> {
            self.call(inputs)
        }

        fn backward(
            &self,
            grads: Inputs<'_>,
            _kept: Inputs<'_>,
            inputs: Inputs<'_>,
            needs: Needs,
        ) -> Result<Vec<Option<Tensor>>> {
            let (input, weight, bias) = (inputs.get(0)?, inputs.get(1)?, inputs.optional(2));
            gradients_by!("linear_backward", grads.get(0)?, input, weight, bias, needs)
        }

        fn reference(&self, inputs: Inputs<'_>) -> Result<Vec<Tensor>> {
            Ok(vec![linear_reference(inputs.get(0)?, inputs.get(1)?, inputs.optional(2))?])
        }
    }

    pub fn own(input: &Tensor, weight: &Tensor, bias: Option<&Tensor>) -> Result<Tensor> {
        below(|| f_linear(input, weight, bias))
    }

    pub fn autograd(input: &Tensor, weight: &Tensor, bias: Option<&Tensor>) -> Result<Tensor> {
        let tensors = [Some(input), Some(weight), bias];
        if is_eager(&tensors) {
            return f_linear(input, weight, bias);
        }
        let [output] = traced(Linear, &tensors)?;
        Ok(output)
    }

    pub fn autocast(input: &Tensor, weight: &Tensor, bias: Option<&Tensor>) -> Result<Tensor> {
        let tensors = [Some(input), Some(weight), bias];
        cast(CastPolicy::LowerPrecision, &tensors, |tensors| {
            call!("linear", tensors.get(0)?, tensors.get(1)?, tensors.optional(2))
        })
    }

    pub fn backward(
        grad: &Tensor,
        input: &Tensor,
        weight: &Tensor,
        _bias: Option<&Tensor>,
        needed: Needs,
    ) -> Result<(Tensor, Tensor, Tensor)> {
        kernel(input, || {
            let found = parts::linear_backward(grad, input, weight, needs(needed))?;
            Ok(returned(input, found)?.into())
        })
    }

    pub fn backward_autograd(
        grad: &Tensor,
        input: &Tensor,
        weight: &Tensor,
        bias: Option<&Tensor>,
        needed: Needs,
    ) -> Result<(Tensor, Tensor, Tensor)> {
        let inputs = [Some(input), Some(weight), bias];
        Ok(gradients::<_, 3>(Linear, &[Some(grad)], &[], &inputs, needed)?.into())
    }
}

mod matmul_add_relu {
    use super::*;

    #[derive(Clone)]
    pub struct MatmulAddRelu;

    impl Pair for MatmulAddRelu {
        const NAME: &'static str = "matmul_add_relu";
        const BACKWARD: &'static str = "matmul_add_relu_backward";
        const INPUTS: usize = 3;
        const OUTPUTS: usize = 1;
        const KEPT: &'static [usize] = &[0];

        fn call(&self, inputs: Inputs<'_>) -> Result<Vec<Tensor>> {
            call!("matmul_add_relu", inputs.get(0)?, inputs.get(1)?, inputs.get(2)?)
        }

        fn forward(&self, inputs: Inputs<'_>, _needs: Needs) -> Result<Vec<Tensor>> {
            self.call(inputs)
        }

        fn backward(
            &self,
            grads: Inputs<'_>,
            kept: Inputs<'_>,
            inputs: Inputs<'_>,
            needs: Needs,
        ) -> Result<Vec<Option<Tensor>>> {
            let (grad, output) = (grads.get(0)?, kept.get(0)?);
            let (lhs, rhs, bias) = (inputs.get(0)?, inputs.get(1)?, inputs.get(2)?);
            gradients_by!("matmul_add_relu_backward", grad, output, lhs, rhs, bias, needs)
        }

        fn reference(&self, inputs: Inputs<'_>) -> Result<Vec<Tensor>> {
            let (lhs, rhs, bias) = (inputs.get(0)?, inputs.get(1)?, inputs.get(2)?);
            Ok(vec![matmul_add_relu_reference(lhs, rhs, bias)?])
        }
    }

    pub fn fake(lhs: &Tensor, rhs: &Tensor, bias: &Tensor) -> Result<Tensor> {
        let (lhs_size, rhs_size, bias_size) = (sizes(lhs), sizes(rhs), sizes(bias));
        let batch = |dims: usize| dims.saturating_sub(2);
        let (lhs_batch, rhs_batch) = (batch(lhs_size.len()), batch(rhs_size.len()));
        let rhs_names: &[&str] = if rhs_size.len() == 1 { &["K"] } else { &["...", "K", "N"] };
        Shapes::of("matmul_add_relu", "lhs", lhs)?
            .has("lhs", lhs, &["...", "K"])?
            .has("rhs", rhs, rhs_names)?;
        let mut product = broadcast(&lhs_size[..lhs_batch], &rhs_size[..rhs_batch])?;
        if let [.., rows, _] = &lhs_size[..] {
            product.push(rows.clone());
        }
        if let [.., _, columns] = &rhs_size[..] {
            product.push(columns.clone());
        }
        let kind = parts::matmul_add_relu_kind(
            (lhs.f_kind()?, !product.is_empty()),
            (bias.f_kind()?, !bias_size.is_empty()),
        );
        contiguous(&broadcast(&product, &bias_size)?, kind, lhs)
    }

    pub fn own(lhs: &Tensor, rhs: &Tensor, bias: &Tensor) -> Result<Tensor> {
        below(|| f_matmul_add_relu(lhs, rhs, bias))
    }

    pub fn autograd(lhs: &Tensor, rhs: &Tensor, bias: &Tensor) -> Result<Tensor> {
        let tensors = [Some(lhs), Some(rhs), Some(bias)];
        if is_eager(&tensors) {
            return f_matmul_add_relu(lhs, rhs, bias);
        }
        let [output] = traced(MatmulAddRelu, &tensors)?;
        Ok(output)
    }

    pub fn autocast(lhs: &Tensor, rhs: &Tensor, bias: &Tensor) -> Result<Tensor> {
        // As libtorch does for the two operations, the bias is left as it is.
        cast(CastPolicy::LowerPrecision, &[Some(lhs), Some(rhs)], |factors| {
            call!("matmul_add_relu", factors.get(0)?, factors.get(1)?, bias)
        })
    }

    pub fn backward(
        grad: &Tensor,
        output: &Tensor,
        lhs: &Tensor,
        rhs: &Tensor,
        bias: &Tensor,
        needed: Needs,
    ) -> Result<(Tensor, Tensor, Tensor)> {
        kernel(lhs, || {
            let needed = needs(needed);
            let found = parts::matmul_add_relu_backward(grad, output, lhs, rhs, bias, needed)?;
            Ok(returned(lhs, found)?.into())
        })
    }

    pub fn backward_autograd(
        grad: &Tensor,
        output: &Tensor,
        lhs: &Tensor,
        rhs: &Tensor,
        bias: &Tensor,
        needed: Needs,
    ) -> Result<(Tensor, Tensor, Tensor)> {
        let (grads, kept) = ([Some(grad)], [Some(output)]);
        let inputs = [Some(lhs), Some(rhs), Some(bias)];
        Ok(gradients::<_, 3>(MatmulAddRelu, &grads, &kept, &inputs, needed)?.into())
    }
}
