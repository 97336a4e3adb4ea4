//! torch's optimizers in plain tch operations, in `Double`.

use tch::{Kind, Tensor};
use tch_extension::optim::{AdamW, Sgd};

#[derive(Clone, Copy, Debug)]
pub enum Rule {
    AdamW(AdamW),
    Sgd(Sgd),
}

/// Parameters with their state, updated as torch does it.
pub struct Reference {
    pub rule: Rule,
    pub lr: f64,
    pub weights: Vec<Tensor>,
    pub first: Vec<Option<Tensor>>,
    pub second: Vec<Option<Tensor>>,
    /// AMSGrad's.
    pub largest: Vec<Option<Tensor>>,
    pub steps: Vec<i32>,
}

impl Reference {
    pub fn new(rule: Rule, lr: f64, weights: &[Tensor]) -> Self {
        let double = |tensor: &Tensor| tensor.detach().to_kind(Kind::Double).copy();
        Reference {
            rule,
            lr,
            weights: weights.iter().map(double).collect(),
            first: weights.iter().map(|_| None).collect(),
            second: weights.iter().map(|_| None).collect(),
            largest: weights.iter().map(|_| None).collect(),
            steps: vec![0; weights.len()],
        }
    }

    /// The norm of all gradients together.
    pub fn norm(gradients: &[Tensor]) -> f64 {
        let square = |g: &Tensor| g.to_kind(Kind::Double).square().sum(Kind::Double);
        gradients.iter().map(|g| square(g).double_value(&[])).sum::<f64>().sqrt()
    }

    /// One step, with the norm of the gradients clipped. Undefined gradients are skipped.
    pub fn step(&mut self, gradients: &[Tensor], max_norm: Option<f64>) {
        let defined: Vec<Tensor> =
            gradients.iter().filter(|g| g.defined()).map(Tensor::shallow_clone).collect();
        let clip = max_norm.map_or(1.0, |max| (max / (Reference::norm(&defined) + 1e-6)).min(1.0));
        for (index, gradient) in gradients.iter().enumerate().filter(|(_, g)| g.defined()) {
            let gradient = gradient.to_kind(Kind::Double) * clip;
            self.steps[index] += 1;
            match self.rule {
                Rule::AdamW(config) => self.adamw(index, gradient, config),
                Rule::Sgd(config) => self.sgd(index, gradient, config),
            }
        }
    }

    fn adamw(&mut self, index: usize, g: Tensor, config: AdamW) {
        let AdamW { beta1, beta2, wd, eps, amsgrad, maximize } = config;
        let g = if maximize { -g } else { g };
        let t = self.steps[index];
        let w = &self.weights[index] * (1.0 - self.lr * wd);
        let kept = |old: &Option<Tensor>| match old {
            Some(old) => old.shallow_clone(),
            None => g.zeros_like(),
        };
        let m = kept(&self.first[index]) * beta1 + &g * (1.0 - beta1);
        let v = kept(&self.second[index]) * beta2 + g.square() * (1.0 - beta2);
        let mut spread = v.shallow_clone();
        if amsgrad {
            spread = kept(&self.largest[index]).maximum(&v);
            self.largest[index] = Some(spread.shallow_clone());
        }
        let denominator = spread.sqrt() / (1.0 - beta2.powi(t)).sqrt() + eps;
        let step = self.lr / (1.0 - beta1.powi(t)) * &m / denominator;
        self.weights[index] = w - step;
        (self.first[index], self.second[index]) = (Some(m), Some(v));
    }

    fn sgd(&mut self, index: usize, g: Tensor, config: Sgd) {
        let Sgd { momentum, dampening, wd, nesterov, maximize } = config;
        let mut d = if maximize { -g } else { g } + &self.weights[index] * wd;
        if momentum != 0.0 {
            let buffer = match &self.first[index] {
                Some(old) => old * momentum + &d * (1.0 - dampening),
                None => d.copy(),
            };
            d = if nesterov { d + &buffer * momentum } else { buffer.copy() };
            self.first[index] = Some(buffer);
        }
        self.weights[index] = &self.weights[index] - d * self.lr;
    }
}
