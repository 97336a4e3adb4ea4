//! AdamW with clipping, whose learning rate and count of steps are on the device.

use tch::{Kind, Tensor};
use tch_extension::amp::Optimizer;
use tch_extension::library::Operator;
use tch_extension::{Result, args};

const BETAS: (f64, f64) = (0.9, 0.95);
const EPS: f64 = 1e-8;

/// Updates all weights by libtorch's fused kernel.
pub struct AdamW {
    groups: [Group; 2],
    updates: Tensor,
    rate: Tensor,
    clip: f64,
    kernel: Operator,
}

/// Weights with the same decay.
struct Group {
    decay: f64,
    names: Vec<String>,
    weights: Vec<Tensor>,
    means: Vec<Tensor>,
    squares: Vec<Tensor>,
}

impl Group {
    fn new(decay: f64, weights: Vec<(String, Tensor)>) -> Group {
        let zeros = |(_, weight): &(String, Tensor)| weight.detach().zeros_like();
        let means = weights.iter().map(zeros).collect();
        let squares = weights.iter().map(zeros).collect();
        let (names, weights) = weights.into_iter().unzip();
        Group { decay, names, weights, means, squares }
    }
}

impl AdamW {
    /// Decay is for matrices only, as in GPT-2. `clip` is the largest norm of all gradients together.
    pub fn new(weights: Vec<(String, Tensor)>, decay: f64, clip: f64) -> Result<AdamW> {
        let device = weights.first().map_or(tch::Device::Cpu, |(_, weight)| weight.device());
        let zero = || Tensor::f_zeros([1], (Kind::Float, device));
        let (matrices, others): (Vec<_>, Vec<_>) =
            weights.into_iter().partition(|(_, weight)| weight.dim() >= 2);
        Ok(AdamW {
            groups: [Group::new(decay, matrices), Group::new(0.0, others)],
            updates: zero()?,
            rate: zero()?,
            clip,
            kernel: Operator::find("aten::_fused_adamw_.tensor_lr")?.no_grad(),
        })
    }

    /// Sets the learning rate of later steps, also of those in a graph.
    pub fn set_rate(&mut self, rate: f64) -> Result<()> {
        self.rate.f_fill_(rate)?;
        Ok(())
    }

    /// The tensors in use that a step changes, apart from the weights.
    pub fn state(&self) -> Vec<(String, Tensor)> {
        let mut state = vec![("updates".to_string(), self.updates.shallow_clone())];
        for group in &self.groups {
            for (index, name) in group.names.iter().enumerate() {
                state.push((format!("exp_avg.{name}"), group.means[index].shallow_clone()));
                state.push((format!("exp_avg_sq.{name}"), group.squares[index].shallow_clone()));
            }
        }
        state
    }

    fn clip_gradients(&self) -> Result<()> {
        let weights = self.groups.iter().flat_map(|group| &group.weights);
        let gradients: Vec<Tensor> = weights.map(Tensor::grad).collect();
        let norms: Vec<Tensor> =
            gradients.iter().map(Tensor::f_norm).collect::<std::result::Result<_, _>>()?;
        let norm = Tensor::f_stack(&norms, 0)?.f_norm()?;
        let scale = norm.f_add_scalar(1e-6)?.f_reciprocal()?.f_mul_scalar(self.clip)?;
        let scale = scale.f_clamp_max(1.0)?;
        for mut gradient in gradients {
            let _ = gradient.f_mul_(&scale)?;
        }
        Ok(())
    }
}

impl Optimizer for AdamW {
    fn parameters(&self) -> Vec<Tensor> {
        let weights = self.groups.iter().flat_map(|group| &group.weights);
        weights.map(Tensor::shallow_clone).collect()
    }

    fn step(&mut self) -> Result<()> {
        let _no_grad = tch::no_grad_guard();
        self.clip_gradients()?;
        let _ = self.updates.f_add_scalar_(1.0)?;
        for group in self.groups.iter().filter(|group| !group.weights.is_empty()) {
            let gradients: Vec<Tensor> = group.weights.iter().map(Tensor::grad).collect();
            let () = self.kernel.call(args![
                &group.weights,
                &gradients,
                &group.means,
                &group.squares,
                Vec::<Tensor>::new().as_slice(),
                vec![&self.updates; gradients.len()],
                lr = &self.rate,
                beta1 = BETAS.0,
                beta2 = BETAS.1,
                weight_decay = group.decay,
                eps = EPS,
                amsgrad = false,
                maximize = false
            ])?;
        }
        Ok(())
    }

    fn capturable(&self) -> bool {
        true
    }
}
