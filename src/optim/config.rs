//! The numbers of an algorithm: what tch calls an optimizer's configuration.

use super::kernels::{Hyper, Rule};
use super::{FusedOptimizer, Muon, NamedTensor};
use crate::{Error, Result};
use tch::nn::VarStore;

/// AdamW: `torch.optim.AdamW`, with the fields and defaults of tch's, and `maximize`.
///
/// With the gradient g, the learning rate η, and t steps so far:
///
/// ```text
/// w ← (1 - η·wd) w;  m ← β₁ m + (1 - β₁) g;  v ← β₂ v + (1 - β₂) g²
/// w ← w - η / (1 - β₁ᵗ) · m / (√v / √(1 - β₂ᵗ) + ε)
/// ```
///
/// With AMSGrad, v in the last line is the largest v so far. With `maximize`, g is the negative
/// gradient.
///
/// Equivalent to, for each parameter `w` with the gradient `g`:
///
/// ```
/// # use tch::{Device, Kind, Tensor};
/// # let like = (Kind::Double, Device::Cpu);
/// # let (mut w, g) = (Tensor::ones([2], like), Tensor::ones([2], like) * 0.5);
/// # let (mut m, mut v) = (Tensor::zeros([2], like), Tensor::zeros([2], like));
/// # let (lr, wd, beta1, beta2, eps, t) = (1e-3, 0.01, 0.9_f64, 0.999_f64, 1e-8, 1);
/// w *= 1.0 - lr * wd;
/// m = beta1 * &m + (1.0 - beta1) * &g;
/// v = beta2 * &v + (1.0 - beta2) * g.square();
/// let denominator = v.sqrt() / (1.0 - beta2.powi(t)).sqrt() + eps;
/// w -= lr / (1.0 - beta1.powi(t)) * &m / denominator;
/// # assert!((w.double_value(&[0]) - (1.0 - 1e-5 - 1e-3)).abs() < 1e-9);
/// ```
///
/// Sources: Loshchilov and Hutter, *Decoupled Weight Decay Regularization*, 2019; for AMSGrad,
/// Reddi, Kale and Kumar, *On the Convergence of Adam and Beyond*, 2018.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AdamW {
    /// β₁: how much of the mean of gradients is kept.
    pub beta1: f64,
    /// β₂: how much of the mean of squared gradients is kept.
    pub beta2: f64,
    /// The weight decay.
    pub wd: f64,
    /// ε: keeps the denominator away from zero.
    pub eps: f64,
    /// The variant AMSGrad, which keeps the largest mean of squared gradients: a third state.
    pub amsgrad: bool,
    /// Whether the objective is to become larger, not smaller.
    pub maximize: bool,
}

impl Default for AdamW {
    fn default() -> Self {
        let (amsgrad, maximize) = (false, false);
        AdamW { beta1: 0.9, beta2: 0.999, wd: 0.01, eps: 1e-8, amsgrad, maximize }
    }
}

/// Makes an [`AdamW`] with ε = 1e-8, as tch's function does.
pub fn adamw(beta1: f64, beta2: f64, wd: f64) -> AdamW {
    AdamW { beta1, beta2, wd, ..Default::default() }
}

impl AdamW {
    /// Sets β₁.
    #[must_use]
    pub fn beta1(mut self, beta1: f64) -> Self {
        self.beta1 = beta1;
        self
    }

    /// Sets β₂.
    #[must_use]
    pub fn beta2(mut self, beta2: f64) -> Self {
        self.beta2 = beta2;
        self
    }

    /// Sets the weight decay.
    #[must_use]
    pub fn wd(mut self, wd: f64) -> Self {
        self.wd = wd;
        self
    }

    /// Sets ε.
    #[must_use]
    pub fn eps(mut self, eps: f64) -> Self {
        self.eps = eps;
        self
    }

    /// Sets whether to use AMSGrad.
    #[must_use]
    pub fn amsgrad(mut self, amsgrad: bool) -> Self {
        self.amsgrad = amsgrad;
        self
    }

    /// Sets whether to maximize.
    #[must_use]
    pub fn maximize(mut self, maximize: bool) -> Self {
        self.maximize = maximize;
        self
    }
}

/// Stochastic gradient descent: `torch.optim.SGD`, with the fields and defaults of tch's, and
/// `maximize`.
///
/// With the gradient g and the learning rate η, and without the buffer b if the momentum is 0:
///
/// ```text
/// d = g + wd·w;  b ← momentum·b + (1 - dampening) d, at first d
/// d ← d + momentum·b with nesterov, or else b;  w ← w - η d
/// ```
///
/// With `maximize`, g is the negative gradient.
///
/// Equivalent to, for each parameter `w` with the gradient `g`:
///
/// ```
/// # use tch::{Device, Kind, Tensor};
/// # let like = (Kind::Double, Device::Cpu);
/// # let (mut w, g) = (Tensor::ones([2], like), Tensor::ones([2], like) * 0.5);
/// # let mut b = Tensor::zeros([2], like);
/// # let (lr, wd, momentum, dampening, is_first) = (0.1, 0.01, 0.9, 0.5, true);
/// let d = &g + wd * &w;
/// b = if is_first { d } else { momentum * &b + (1.0 - dampening) * d };
/// w -= lr * &b;
/// # assert!((w.double_value(&[0]) - (1.0 - 0.1 * 0.51)).abs() < 1e-12);
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Sgd {
    /// How much of the buffer is kept. Without momentum there is no buffer.
    pub momentum: f64,
    /// How much less than the gradient is added to the buffer.
    pub dampening: f64,
    /// The weight decay, which is added to the gradient.
    pub wd: f64,
    /// Nesterov's momentum.
    pub nesterov: bool,
    /// Whether the objective is to become larger, not smaller.
    pub maximize: bool,
}

/// Makes an [`Sgd`], as tch's function does.
pub fn sgd(momentum: f64, dampening: f64, wd: f64, nesterov: bool) -> Sgd {
    Sgd { momentum, dampening, wd, nesterov, maximize: false }
}

mod sealed {
    pub trait Sealed {}
    impl Sealed for super::AdamW {}
    impl Sealed for super::Sgd {}
    impl Sealed for super::Muon {}
}

/// An algorithm and its numbers.
#[derive(Clone, Copy, Debug)]
#[doc(hidden)]
pub struct Algorithm {
    /// The name of `build` in errors.
    pub(super) op: &'static str,
    pub(super) rule: Rule,
    pub(super) hyper: Hyper,
    /// How matrices are updated, if they are not updated by `rule`, and their numbers.
    pub(super) muon: Option<(Muon, Hyper)>,
}

/// Builds optimizers: [`AdamW`], [`Sgd`] and [`Muon`] are configurations, as in tch.
pub trait OptimizerConfig: Sized + sealed::Sealed {
    #[doc(hidden)]
    fn algorithm(&self, lr: f64) -> Algorithm;

    /// Makes an optimizer of all trainable variables of a store, in their groups
    /// ([`Path::set_group`](tch::nn::Path::set_group)). Variables that are added to the store later
    /// join at the next step.
    ///
    /// # Errors
    /// When a number is out of its range, or for a variable that cannot be updated; see
    /// [`FusedOptimizer`].
    fn build(self, vs: &VarStore, lr: f64) -> Result<FusedOptimizer> {
        FusedOptimizer::of_store(self.algorithm(lr), vs)
    }

    /// Makes an optimizer of tensors of your choice, such as parts of parameters. They need not be
    /// leaves of a graph if the gradients are given to [`FusedOptimizer::step_with`].
    ///
    /// ```
    /// use tch::{Device, Kind, Tensor};
    /// use tch_extension::optim::{NamedTensor, OptimizerConfig, Sgd};
    ///
    /// let w = Tensor::ones([4], (Kind::Float, Device::Cpu));
    /// let half = w.narrow(0, 2, 2); // the part of this process
    /// let part = NamedTensor { name: "w".to_string(), tensor: half, group: 0 };
    /// let mut optimizer = Sgd::default().build_of(vec![part], 0.5)?;
    /// optimizer.step_with(&[Some(&Tensor::ones([2], (Kind::Float, Device::Cpu)))])?;
    /// assert_eq!(w, Tensor::from_slice(&[1.0_f32, 1.0, 0.5, 0.5]));
    /// # Ok::<(), tch_extension::Error>(())
    /// ```
    ///
    /// # Errors
    /// As for [`build`](Self::build), and when two tensors have one name.
    fn build_of(self, parameters: Vec<NamedTensor>, lr: f64) -> Result<FusedOptimizer> {
        FusedOptimizer::of_tensors(self.algorithm(lr), parameters)
    }
}

impl OptimizerConfig for AdamW {
    fn algorithm(&self, lr: f64) -> Algorithm {
        let hyper = Hyper {
            lr,
            weight_decay: self.wd,
            first: self.beta1,
            second: self.beta2,
            epsilon: self.eps,
            nesterov: 0.0,
            maximize: self.maximize.into(),
        };
        let rule = if self.amsgrad { Rule::AmsGrad } else { Rule::AdamW };
        Algorithm { op: "AdamW::build", rule, hyper, muon: None }
    }
}

impl OptimizerConfig for Sgd {
    fn algorithm(&self, lr: f64) -> Algorithm {
        let hyper = Hyper {
            lr,
            weight_decay: self.wd,
            first: self.momentum,
            second: self.dampening,
            epsilon: 0.0,
            nesterov: self.nesterov.into(),
            maximize: self.maximize.into(),
        };
        Algorithm { op: "Sgd::build", rule: Rule::Sgd, hyper, muon: None }
    }
}

/// The numbers of a group that an algorithm uses, with their names in errors and in files.
pub(super) fn numbers(rule: Rule, hyper: &mut Hyper) -> Vec<(&'static str, &mut f64)> {
    let Hyper { lr, weight_decay, first, second, epsilon, nesterov, maximize } = hyper;
    let (lr, decay) = (("lr", lr), ("weight_decay", weight_decay));
    let (nesterov, maximize) = (("nesterov", nesterov), ("maximize", maximize));
    match rule {
        Rule::AdamW | Rule::AmsGrad => {
            vec![lr, decay, ("beta1", first), ("beta2", second), ("eps", epsilon), maximize]
        }
        Rule::Sgd => {
            vec![lr, decay, ("momentum", first), ("dampening", second), nesterov, maximize]
        }
        Rule::Muon => vec![lr, decay, ("momentum", first), nesterov],
    }
}

/// A number that no optimizer may have.
pub(super) struct Refused {
    pub word: &'static str,
    pub expected: &'static str,
    pub got: String,
}

impl Refused {
    pub fn into_error(self, op: &str) -> Error {
        Error::argument(op, self.word, self.expected, self.got, "")
    }
}

/// Checks the numbers of a group, whether they come from `build`, from a setter or from a file.
pub(super) fn check(rule: Rule, hyper: &Hyper) -> std::result::Result<(), Refused> {
    let mut copy = *hyper;
    for (word, value) in numbers(rule, &mut copy) {
        let (fits, expected) = match word {
            "beta1" | "beta2" => ((0.0..1.0).contains(value), "0 or more and below 1"),
            "momentum" if rule == Rule::Muon => {
                ((0.0..1.0).contains(value), "0 or more and below 1")
            }
            "dampening" => (value.is_finite(), "a finite number"),
            "nesterov" | "maximize" => ([0.0, 1.0].contains(value), "0 or 1"),
            _ => (value.is_finite() && *value >= 0.0, "a finite number, 0 or more"),
        };
        if !fits {
            return Err(Refused { word, expected, got: format!("{value}") });
        }
    }
    let Hyper { first: momentum, second: dampening, nesterov, .. } = *hyper;
    if rule == Rule::Sgd && nesterov != 0.0 && (momentum <= 0.0 || dampening != 0.0) {
        let got = format!("momentum {momentum} and dampening {dampening}");
        return Err(Refused { word: "nesterov", expected: "a momentum and no dampening", got });
    }
    Ok(())
}
