//! `gelu_mlp` and `swiglu_mlp`.

use crate::meta::{Shapes, contiguous, likes, nothing as no_fake, product};
use crate::node::{
    Needs, Pair, below, call, cast, forwarded, gradients, gradients_by, is_eager, kernel, matrix,
    needs, returned, traced,
};
use tch::Tensor;
use tch_extension::amp::CastPolicy;
use tch_extension::autograd::Inputs;
use tch_extension::library::sizes;
use tch_extension::ops::{
    Activation, GeluMlpOptions, SwigluMlpOptions, f_gelu_mlp, f_swiglu_mlp, gelu_mlp_reference,
    parts, swiglu_mlp_reference,
};
use tch_extension::{Error, Result};

tch_extension::operators! {
    namespace tch_extension;

    /// `act(input @ w1.T + b1) @ w2.T + b2`: `input` is `[..., D]`, `w1` `[H, D]`, `w2` `[D2, H]`, and the
    /// result `[..., D2]`. `activation` is "gelu_tanh", "gelu", "relu_squared" or "silu". Without
    /// `save_activations`, a training step keeps less memory and takes longer.
    fn gelu_mlp(
        input: &Tensor,
        w1: &Tensor,
        b1: Option<&Tensor>,
        w2: &Tensor,
        b2: Option<&Tensor>,
        activation: &str = "gelu_tanh",
        save_activations: bool = true,
    ) -> Tensor {
        cpu, cuda = gelu_mlp::own,
        fake = |input, w1, b1, w2, b2, _activation, _saves| {
            gelu_mlp::check(input, w1, b1, w2, b2)?;
            output(input, w2)
        },
        autograd = gelu_mlp::autograd,
        key("AutocastCPU") = gelu_mlp::autocast,
        key("AutocastCUDA") = gelu_mlp::autocast,
    }

    /// The output, and for the gradients what is before and after the activation, `[M, H]`.
    fn gelu_mlp_forward(
        input: &Tensor,
        w1: &Tensor,
        b1: Option<&Tensor>,
        w2: &Tensor,
        b2: Option<&Tensor>,
        activation: &str,
        save_activations: bool,
        needs: i64,
    ) -> (Tensor, Tensor, Tensor) {
        cpu, cuda = gelu_mlp::forward,
        fake = |input, w1, b1, w2, b2, activation, saves, needed| {
            gelu_mlp::check(input, w1, b1, w2, b2)?;
            let options = gelu_mlp::options_of(activation, saves)?;
            let (keeps_z, keeps_a) = parts::gelu_mlp_saves(&options, needs(needed));
            Ok((output(input, w2)?, hidden(input, w1, keeps_z)?, hidden(input, w1, keeps_a)?))
        },
        autograd = |input, w1, b1, w2, b2, activation, saves, needed| {
            let inputs = [Some(input), Some(w1), b1, Some(w2), b2];
            Ok(forwarded::<_, 3>(gelu_mlp::told(activation, saves), &inputs, needed)?.into())
        },
    }

    /// The gradients of all tensors; `z` and `a` are what the forward returned.
    fn gelu_mlp_backward(
        grad: &Tensor,
        z: &Tensor,
        a: &Tensor,
        input: &Tensor,
        w1: &Tensor,
        b1: Option<&Tensor>,
        w2: &Tensor,
        b2: Option<&Tensor>,
        activation: &str,
        save_activations: bool,
        needs: i64,
    ) -> (Tensor, Tensor, Tensor, Tensor, Tensor) {
        cpu, cuda = gelu_mlp::backward,
        fake = |_grad, _z, _a, input, w1, b1, w2, b2, _activation, _saves, needs| {
            Ok(likes([Some(input), Some(w1), b1, Some(w2), b2], needs)?.into())
        },
        autograd = gelu_mlp::backward_autograd,
    }

    /// `(silu(input @ w_gate.T) * (input @ w_up.T)) @ w_down.T`: `input` is `[..., D]`, `w_gate` and `w_up`
    /// are `[H, D]`, `w_down` `[D2, H]`, and the result `[..., D2]`.
    fn swiglu_mlp(
        input: &Tensor,
        w_gate: &Tensor,
        w_up: &Tensor,
        w_down: &Tensor,
        save_activations: bool = true,
    ) -> Tensor {
        cpu, cuda = swiglu_mlp::own,
        fake = |input, w_gate, w_up, w_down, _saves| {
            swiglu_mlp::check(input, w_gate, w_up, w_down)?;
            output(input, w_down)
        },
        autograd = swiglu_mlp::autograd,
        key("AutocastCPU") = swiglu_mlp::autocast,
        key("AutocastCUDA") = swiglu_mlp::autocast,
    }

    /// The output, and for the gradients the gate before its activation, what it multiplies, and the product,
    /// `[M, H]`.
    fn swiglu_mlp_forward(
        input: &Tensor,
        w_gate: &Tensor,
        w_up: &Tensor,
        w_down: &Tensor,
        save_activations: bool,
        needs: i64,
    ) -> (Tensor, Tensor, Tensor, Tensor) {
        cpu, cuda = swiglu_mlp::forward,
        fake = |input, w_gate, w_up, w_down, saves, needed| {
            swiglu_mlp::check(input, w_gate, w_up, w_down)?;
            let options = SwigluMlpOptions { save_activations: saves };
            let (gates, h) = parts::swiglu_mlp_saves(&options, needs(needed));
            let hidden = |keeps| hidden(input, w_gate, keeps);
            Ok((output(input, w_down)?, hidden(gates)?, hidden(gates)?, hidden(h)?))
        },
        autograd = |input, w_gate, w_up, w_down, saves, needed| {
            let inputs = [Some(input), Some(w_gate), Some(w_up), Some(w_down)];
            Ok(forwarded::<_, 4>(swiglu_mlp::SwigluMlp { saves }, &inputs, needed)?.into())
        },
    }

    /// The gradients of all tensors; `g`, `u` and `h` are what the forward returned.
    fn swiglu_mlp_backward(
        grad: &Tensor,
        g: &Tensor,
        u: &Tensor,
        h: &Tensor,
        input: &Tensor,
        w_gate: &Tensor,
        w_up: &Tensor,
        w_down: &Tensor,
        save_activations: bool,
        needs: i64,
    ) -> (Tensor, Tensor, Tensor, Tensor) {
        cpu, cuda = swiglu_mlp::backward,
        fake = |_grad, _g, _u, _h, input, w_gate, w_up, w_down, _saves, needs| {
            let inputs = [Some(input), Some(w_gate), Some(w_up), Some(w_down)];
            Ok(likes(inputs, needs)?.into())
        },
        autograd = swiglu_mlp::backward_autograd,
    }
}

/// A fake result: the input with other features.
fn output(input: &Tensor, weight: &Tensor) -> Result<Tensor> {
    let mut size = sizes(input);
    size.pop();
    size.extend(sizes(weight).into_iter().next());
    contiguous(&size, input.f_kind()?, input)
}

/// A fake `[M, H]`, if it is kept.
fn hidden(input: &Tensor, weight: &Tensor, is_kept: bool) -> Result<Tensor> {
    if !is_kept {
        return no_fake(input);
    }
    let mut rows = sizes(input);
    rows.pop();
    let size: Vec<_> =
        [product(&rows)].into_iter().chain(sizes(weight).into_iter().next()).collect();
    contiguous(&size, input.f_kind()?, input)
}

mod gelu_mlp {
    use super::*;

    pub fn check(
        input: &Tensor,
        w1: &Tensor,
        b1: Option<&Tensor>,
        w2: &Tensor,
        b2: Option<&Tensor>,
    ) -> Result<()> {
        Shapes::of("gelu_mlp", "input", input)?
            .has("input", input, &["...", "D"])?
            .has("w1", w1, &["H", "D"])?
            .has("b1", b1, &["H"])?
            .has("w2", w2, &["D2", "H"])?
            .has("b2", b2, &["D2"])?;
        Ok(())
    }

    const OP: &str = "gelu_mlp";

    /// The options, by torch's names of activations.
    ///
    /// # Errors
    /// If there is no such activation.
    pub fn options_of(activation: &str, save_activations: bool) -> Result<GeluMlpOptions> {
        let activation = match activation {
            "gelu_tanh" => Activation::GeluTanh,
            "gelu" => Activation::Gelu,
            "relu_squared" => Activation::ReluSquared,
            "silu" => Activation::Silu,
            other => {
                let expected = "gelu_tanh, gelu, relu_squared or silu";
                return Err(Error::argument(OP, "activation", expected, other, ""));
            }
        };
        Ok(GeluMlpOptions { activation, save_activations })
    }

    #[derive(Clone)]
    pub struct GeluMlp {
        activation: String,
        saves: bool,
    }

    pub fn told(activation: &str, saves: bool) -> GeluMlp {
        GeluMlp { activation: activation.to_string(), saves }
    }

    impl Pair for GeluMlp {
        const NAME: &'static str = OP;
        const BACKWARD: &'static str = "gelu_mlp_backward";
        const INPUTS: usize = 5;
        const OUTPUTS: usize = 1;
        const KEPT: u64 = 0b110;

        fn call(&self, inputs: Inputs<'_>) -> Result<Vec<Tensor>> {
            let (input, w1, w2) = (inputs.get(0)?, inputs.get(1)?, inputs.get(3)?);
            let (b1, b2) = (inputs.optional(2), inputs.optional(4));
            call!("gelu_mlp", input, w1, b1, w2, b2, &self.activation, self.saves)
        }

        fn forward(&self, inputs: Inputs<'_>, needs: Needs) -> Result<Vec<Tensor>> {
            let (input, w1, w2) = (inputs.get(0)?, inputs.get(1)?, inputs.get(3)?);
            let (b1, b2) = (inputs.optional(2), inputs.optional(4));
            call!("gelu_mlp_forward", input, w1, b1, w2, b2, &self.activation, self.saves, needs)
        }

        fn backward(
            &self,
            grads: Inputs<'_>,
            kept: Inputs<'_>,
            inputs: Inputs<'_>,
            needs: Needs,
        ) -> Result<Vec<Option<Tensor>>> {
            let (grad, z, a) = (grads.get(0)?, kept.get(0)?, kept.get(1)?);
            let (input, w1, w2) = (inputs.get(0)?, inputs.get(1)?, inputs.get(3)?);
            let (b1, b2) = (inputs.optional(2), inputs.optional(4));
            gradients_by!(
                "gelu_mlp_backward",
                grad,
                z,
                a,
                input,
                w1,
                b1,
                w2,
                b2,
                &self.activation,
                self.saves,
                needs
            )
        }

        fn reference(&self, inputs: Inputs<'_>) -> Result<Vec<Tensor>> {
            let (input, w1, w2) = (inputs.get(0)?, inputs.get(1)?, inputs.get(3)?);
            let (b1, b2) = (inputs.optional(2), inputs.optional(4));
            let options = options_of(&self.activation, self.saves)?;
            Ok(vec![gelu_mlp_reference(input, w1, b1, w2, b2, &options)?])
        }
    }

    pub fn own(
        input: &Tensor,
        w1: &Tensor,
        b1: Option<&Tensor>,
        w2: &Tensor,
        b2: Option<&Tensor>,
        activation: &str,
        saves: bool,
    ) -> Result<Tensor> {
        below(|| f_gelu_mlp(input, w1, b1, w2, b2, &options_of(activation, saves)?))
    }

    pub fn autograd(
        input: &Tensor,
        w1: &Tensor,
        b1: Option<&Tensor>,
        w2: &Tensor,
        b2: Option<&Tensor>,
        activation: &str,
        saves: bool,
    ) -> Result<Tensor> {
        let options = options_of(activation, saves)?;
        let tensors = [Some(input), Some(w1), b1, Some(w2), b2];
        if is_eager(&tensors) {
            return f_gelu_mlp(input, w1, b1, w2, b2, &options);
        }
        let [output] = traced(told(activation, saves), &tensors)?;
        Ok(output)
    }

    pub fn autocast(
        input: &Tensor,
        w1: &Tensor,
        b1: Option<&Tensor>,
        w2: &Tensor,
        b2: Option<&Tensor>,
        activation: &str,
        saves: bool,
    ) -> Result<Tensor> {
        let tensors = [Some(input), Some(w1), b1, Some(w2), b2];
        cast(CastPolicy::LowerPrecision, &tensors, |tensors| {
            told(activation, saves).call(tensors).map(single)?
        })
    }

    pub fn forward(
        input: &Tensor,
        w1: &Tensor,
        b1: Option<&Tensor>,
        w2: &Tensor,
        b2: Option<&Tensor>,
        activation: &str,
        saves: bool,
        needed: Needs,
    ) -> Result<(Tensor, Tensor, Tensor)> {
        kernel(|| {
            let tensors = [Some(input), Some(w1), b1, Some(w2), b2];
            let options = options_of(activation, saves)?;
            let (output, z, a) = parts::gelu_mlp_forward(&tensors, &options, needs(needed))?;
            let [z, a] = returned(input, [z, a])?;
            Ok((output, z, a))
        })
    }

    pub fn backward(
        grad: &Tensor,
        z: &Tensor,
        a: &Tensor,
        input: &Tensor,
        w1: &Tensor,
        b1: Option<&Tensor>,
        w2: &Tensor,
        b2: Option<&Tensor>,
        activation: &str,
        saves: bool,
        needed: Needs,
    ) -> Result<(Tensor, Tensor, Tensor, Tensor, Tensor)> {
        kernel(|| {
            let tensors = [Some(input), Some(w1), b1, Some(w2), b2];
            let (options, needed) = (options_of(activation, saves)?, needs(needed));
            // Only the gradient of w2 reads a.
            let kept = (matrix(z), matrix(a).filter(|_| needed[3]));
            let found = parts::gelu_mlp_backward(grad, kept, &tensors, &options, needed)?;
            Ok(returned::<5>(input, exactly(found)?)?.into())
        })
    }

    pub fn backward_autograd(
        grad: &Tensor,
        z: &Tensor,
        a: &Tensor,
        input: &Tensor,
        w1: &Tensor,
        b1: Option<&Tensor>,
        w2: &Tensor,
        b2: Option<&Tensor>,
        activation: &str,
        saves: bool,
        needed: Needs,
    ) -> Result<(Tensor, Tensor, Tensor, Tensor, Tensor)> {
        let inputs = [Some(input), Some(w1), b1, Some(w2), b2];
        let (grads, kept) = ([Some(grad)], [Some(z), Some(a)]);
        Ok(gradients::<_, 5>(told(activation, saves), &grads, &kept, &inputs, needed)?.into())
    }
}

/// The only output of an operator.
fn single(outputs: Vec<Tensor>) -> Result<Tensor> {
    let [output] = outputs.try_into().map_err(|_| Error::msg("internal error: not one output"))?;
    Ok(output)
}

/// As many gradients as there are inputs.
fn exactly<const N: usize>(gradients: Vec<Option<Tensor>>) -> Result<[Option<Tensor>; N]> {
    gradients.try_into().map_err(|_| Error::msg("internal error: another number of gradients"))
}

mod swiglu_mlp {
    use super::*;

    pub fn check(input: &Tensor, w_gate: &Tensor, w_up: &Tensor, w_down: &Tensor) -> Result<()> {
        Shapes::of("swiglu_mlp", "input", input)?
            .has("input", input, &["...", "D"])?
            .has("w_gate", w_gate, &["H", "D"])?
            .has("w_up", w_up, &["H", "D"])?
            .has("w_down", w_down, &["D2", "H"])?;
        Ok(())
    }

    #[derive(Clone)]
    pub struct SwigluMlp {
        pub saves: bool,
    }

    impl Pair for SwigluMlp {
        const NAME: &'static str = "swiglu_mlp";
        const BACKWARD: &'static str = "swiglu_mlp_backward";
        const INPUTS: usize = 4;
        const OUTPUTS: usize = 1;
        const KEPT: u64 = 0b1110;

        fn call(&self, inputs: Inputs<'_>) -> Result<Vec<Tensor>> {
            let (input, w_gate) = (inputs.get(0)?, inputs.get(1)?);
            let (w_up, w_down) = (inputs.get(2)?, inputs.get(3)?);
            call!("swiglu_mlp", input, w_gate, w_up, w_down, self.saves)
        }

        fn forward(&self, inputs: Inputs<'_>, needs: Needs) -> Result<Vec<Tensor>> {
            let (input, w_gate) = (inputs.get(0)?, inputs.get(1)?);
            let (w_up, w_down) = (inputs.get(2)?, inputs.get(3)?);
            call!("swiglu_mlp_forward", input, w_gate, w_up, w_down, self.saves, needs)
        }

        fn backward(
            &self,
            grads: Inputs<'_>,
            kept: Inputs<'_>,
            inputs: Inputs<'_>,
            needs: Needs,
        ) -> Result<Vec<Option<Tensor>>> {
            let (g, u, h) = (kept.get(0)?, kept.get(1)?, kept.get(2)?);
            let (input, w_gate) = (inputs.get(0)?, inputs.get(1)?);
            let (w_up, w_down) = (inputs.get(2)?, inputs.get(3)?);
            gradients_by!(
                "swiglu_mlp_backward",
                grads.get(0)?,
                g,
                u,
                h,
                input,
                w_gate,
                w_up,
                w_down,
                self.saves,
                needs
            )
        }

        fn reference(&self, inputs: Inputs<'_>) -> Result<Vec<Tensor>> {
            let (input, w_gate) = (inputs.get(0)?, inputs.get(1)?);
            let (w_up, w_down) = (inputs.get(2)?, inputs.get(3)?);
            Ok(vec![swiglu_mlp_reference(input, w_gate, w_up, w_down)?])
        }
    }

    pub fn own(
        input: &Tensor,
        w_gate: &Tensor,
        w_up: &Tensor,
        w_down: &Tensor,
        saves: bool,
    ) -> Result<Tensor> {
        let options = SwigluMlpOptions { save_activations: saves };
        below(|| f_swiglu_mlp(input, w_gate, w_up, w_down, &options))
    }

    pub fn autograd(
        input: &Tensor,
        w_gate: &Tensor,
        w_up: &Tensor,
        w_down: &Tensor,
        saves: bool,
    ) -> Result<Tensor> {
        let tensors = [Some(input), Some(w_gate), Some(w_up), Some(w_down)];
        if is_eager(&tensors) {
            let options = SwigluMlpOptions { save_activations: saves };
            return f_swiglu_mlp(input, w_gate, w_up, w_down, &options);
        }
        let [output] = traced(SwigluMlp { saves }, &tensors)?;
        Ok(output)
    }

    pub fn autocast(
        input: &Tensor,
        w_gate: &Tensor,
        w_up: &Tensor,
        w_down: &Tensor,
        saves: bool,
    ) -> Result<Tensor> {
        let tensors = [Some(input), Some(w_gate), Some(w_up), Some(w_down)];
        cast(CastPolicy::LowerPrecision, &tensors, |tensors| {
            SwigluMlp { saves }.call(tensors).map(single)?
        })
    }

    pub fn forward(
        input: &Tensor,
        w_gate: &Tensor,
        w_up: &Tensor,
        w_down: &Tensor,
        saves: bool,
        needed: Needs,
    ) -> Result<(Tensor, Tensor, Tensor, Tensor)> {
        kernel(|| {
            let tensors = [Some(input), Some(w_gate), Some(w_up), Some(w_down)];
            let options = SwigluMlpOptions { save_activations: saves };
            let (output, gates, h) = parts::swiglu_mlp_forward(&tensors, &options, needs(needed))?;
            let (g, u) = gates.unzip();
            let [g, u, h] = returned(input, [g, u, h])?;
            Ok((output, g, u, h))
        })
    }

    pub fn backward(
        grad: &Tensor,
        g: &Tensor,
        u: &Tensor,
        h: &Tensor,
        input: &Tensor,
        w_gate: &Tensor,
        w_up: &Tensor,
        w_down: &Tensor,
        saves: bool,
        needed: Needs,
    ) -> Result<(Tensor, Tensor, Tensor, Tensor)> {
        kernel(|| {
            let tensors = [Some(input), Some(w_gate), Some(w_up), Some(w_down)];
            let (options, needed) = (SwigluMlpOptions { save_activations: saves }, needs(needed));
            let kept = (matrix(g).zip(matrix(u)), matrix(h));
            let found = parts::swiglu_mlp_backward(grad, kept, &tensors, &options, needed)?;
            Ok(returned::<4>(input, exactly(found)?)?.into())
        })
    }

    pub fn backward_autograd(
        grad: &Tensor,
        g: &Tensor,
        u: &Tensor,
        h: &Tensor,
        input: &Tensor,
        w_gate: &Tensor,
        w_up: &Tensor,
        w_down: &Tensor,
        saves: bool,
        needed: Needs,
    ) -> Result<(Tensor, Tensor, Tensor, Tensor)> {
        let inputs = [Some(input), Some(w_gate), Some(w_up), Some(w_down)];
        let kept = [Some(g), Some(u), Some(h)];
        Ok(gradients::<_, 4>(SwigluMlp { saves }, &[Some(grad)], &kept, &inputs, needed)?.into())
    }
}
