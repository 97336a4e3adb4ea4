//! Muon: matrices go against the orthogonalised direction of their momentum, all else is left to
//! AdamW. The matrices of one shape are orthogonalised together, by batched products.

use super::config::{Algorithm, Refused};
use super::kernels::{Call, Hyper, Rule, Span, Spans, Update};
use super::optimizer::{FusedOptimizer, Key, Parameter};
use super::step::Batch;
use super::{AdamW, OptimizerConfig};
use crate::amp::Autocast;
use crate::{Error, Result};
use std::ops::Range;
use tch::{Kind, Tensor};

/// How [`Muon`] adapts the learning rate to the rows A and columns B of a matrix.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum AdjustLr {
    /// √max(1, A/B): Keller Jordan's.
    #[default]
    Original,
    /// 0.2·√max(A, B): updates are as large as AdamW's, so that its learning rate and weight decay
    /// are right for Muon, too.
    MatchRmsAdamw,
}

impl AdjustLr {
    fn ratio(self, rows: i64, columns: i64) -> f64 {
        let (rows, columns) = (rows as f64, columns as f64);
        match self {
            AdjustLr::Original => (rows / columns).max(1.0).sqrt(),
            AdjustLr::MatchRmsAdamw => 0.2 * rows.max(columns).sqrt(),
        }
    }
}

/// Muon: `torch.optim.Muon`, with its names and defaults, for parameters with two dimensions, and
/// AdamW for all others and those that [`FusedOptimizer::leave_to_adamw`] names, in the same step.
///
/// With the gradient G of a matrix, the learning rate η and the momentum μ:
///
/// ```text
/// B ← μ B + (1 - μ) G;  D = (1 - μ) G + μ B with nesterov, or else B
/// X = D / max(‖D‖, ε);  ns_steps times: X ← a X + (b X Xᵀ + c (X Xᵀ)²) X
/// W ← (1 - η·weight_decay) W - η·adjust · X
/// ```
///
/// The iteration (Newton–Schulz) brings the singular values of X near to 1. It is computed with the smaller
/// of X Xᵀ and Xᵀ X, and at once for all matrices of one shape, kind and device: for 64 Mi values at a time, or,
/// in `Half`, for as many as take 1.5 GiB. On the CPU, and for parameters of kind `Double`, it is in `BFloat16`, as
/// torch does it. On CUDA it is in `Half`, whose roundings are finer, unless the coefficients could lead out of
/// the range of that kind, or ε is above 10⁻⁶. There, many large symmetric products are computed by half on GPUs
/// of compute capability 9.0, and for matrices that are not nearly square, two iterations are one product with X.
///
/// B is of kind `Float`, or `Double` for parameters of that kind; `adjust` is [`AdjustLr`]'s. Weights that hold
/// several matrices one below the other, such as those of q, k and v, are split by
/// [`FusedOptimizer::split_matrices`].
///
/// A saved state has the numbers of a step, such as μ and the weight decay, but not how the iteration is
/// done: a run that continues is built with the same `ns_coefficients`, `ns_steps`, `eps`, adjustment and
/// ratio, and the same matrices are split.
///
/// The embeddings and the output layer should be left to AdamW:
///
/// ```
/// use tch::nn::{self, Module};
/// use tch::{Device, Kind, Tensor};
/// use tch_extension::optim::{Muon, OptimizerConfig};
///
/// let vs = nn::VarStore::new(Device::Cpu);
/// let embedding = nn::embedding(vs.root() / "wte", 10, 8, Default::default());
/// let qkv = nn::linear(vs.root() / "qkv", 8, 3 * 8, Default::default());
/// // AdamW has 0.015 of the learning rate of the matrices: 3e-4.
/// let config = Muon { adamw_lr_ratio: 0.015, ..Default::default() };
/// let mut optimizer = config.build(&vs, 0.02)?;
/// optimizer.leave_to_adamw(|name, _| name.starts_with("wte"))?;
/// optimizer.split_matrices(|name, _| if name == "qkv.weight" { vec![8, 8, 8] } else { vec![] })?;
/// let x = qkv.forward(&embedding.forward(&Tensor::arange(10, (Kind::Int64, Device::Cpu))));
/// optimizer.backward_step(&x.square().mean(Kind::Float))?;
/// # Ok::<(), tch_extension::Error>(())
/// ```
///
/// Equivalent to, for a matrix `w` with no more rows than columns and with the gradient `g`:
///
/// ```
/// # use tch::{Device, Kind, Tensor};
/// # use tch_extension::optim::{Muon, NamedTensor, OptimizerConfig};
/// # let like = (Kind::Float, Device::Cpu);
/// # tch::manual_seed(1);
/// # let (mut w, g) = (Tensor::randn([4, 6], like), Tensor::randn([4, 6], like));
/// # let ours = NamedTensor { name: "w".into(), tensor: w.copy(), group: 0 };
/// # let ours_w = ours.tensor.shallow_clone();
/// # Muon::default().build_of(vec![ours], 0.02)?.step_with(&[Some(&g)])?;
/// # let mut buffer = Tensor::zeros([4, 6], like);
/// # let (lr, wd, momentum, eps) = (0.02_f64, 0.1_f64, 0.95_f64, 1e-7_f64);
/// # let (a, b, c) = (3.4445_f64, -4.7750_f64, 2.0315_f64);
/// buffer = momentum * &buffer + (1.0 - momentum) * &g;
/// let direction = (1.0 - momentum) * &g + momentum * &buffer;
/// let mut x = direction.to_kind(Kind::BFloat16);
/// x = &x / x.norm().clamp_min(eps);
/// for _ in 0..5 {
///     let gram = x.mm(&x.tr());
///     let polynomial = b * &gram + c * gram.mm(&gram);
///     x = a * &x + polynomial.mm(&x);
/// }
/// w = (1.0 - lr * wd) * w - lr * x.to_kind(Kind::Float);
/// # assert!(w.allclose(&ours_w, 0.0, 1e-3, false));
/// # Ok::<(), tch_extension::Error>(())
/// ```
///
/// Sources: Jordan and others, *Muon: An optimizer for hidden layers in neural networks*, 2024; for
/// [`AdjustLr::MatchRmsAdamw`], Liu and others, *Muon is Scalable for LLM Training*, 2025.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Muon {
    /// The weight decay of matrices.
    pub weight_decay: f64,
    /// μ: how much of the mean of gradients is kept.
    pub momentum: f64,
    /// Nesterov's momentum.
    pub nesterov: bool,
    /// a, b and c.
    pub ns_coefficients: (f64, f64, f64),
    /// ε: keeps the norm away from zero.
    pub eps: f64,
    /// How often X is improved: fewer than 100 times.
    pub ns_steps: usize,
    /// How the learning rate is adapted to a matrix.
    pub adjust_lr_fn: AdjustLr,
    /// How all else is updated.
    pub adamw: AdamW,
    /// AdamW's learning rate is that of its group times this, so that one schedule serves both. 1 fits
    /// [`AdjustLr::MatchRmsAdamw`].
    pub adamw_lr_ratio: f64,
}

impl Default for Muon {
    fn default() -> Self {
        Muon {
            weight_decay: 0.1,
            momentum: 0.95,
            nesterov: true,
            ns_coefficients: (3.4445, -4.7750, 2.0315),
            eps: 1e-7,
            ns_steps: 5,
            adjust_lr_fn: AdjustLr::Original,
            adamw: AdamW::default(),
            adamw_lr_ratio: 1.0,
        }
    }
}

impl OptimizerConfig for Muon {
    fn algorithm(&self, lr: f64) -> Algorithm {
        let hyper = Hyper {
            lr,
            weight_decay: self.weight_decay,
            first: self.momentum,
            second: 0.0,
            epsilon: 0.0,
            nesterov: self.nesterov.into(),
            maximize: 0.0,
        };
        Algorithm { op: "Muon::build", muon: Some((*self, hyper)), ..self.adamw.algorithm(lr) }
    }
}

impl Muon {
    /// Checks what belongs to no group.
    pub(super) fn check(&self, op: &str) -> Result<()> {
        let refused = |word, expected, got| Err(Refused { word, expected, got }.into_error(op));
        let (a, b, c) = self.ns_coefficients;
        if ![a, b, c].into_iter().all(f64::is_finite) {
            let got = format!("{:?}", self.ns_coefficients);
            return refused("ns_coefficients", "finite numbers", got);
        }
        if !(self.eps.is_finite() && self.eps > 0.0) {
            return refused("eps", "a finite number above 0", format!("{}", self.eps));
        }
        if self.ns_steps >= 100 {
            return refused("ns_steps", "fewer than 100", format!("{}", self.ns_steps));
        }
        if !(self.adamw_lr_ratio.is_finite() && self.adamw_lr_ratio >= 0.0) {
            let got = format!("{}", self.adamw_lr_ratio);
            return refused("adamw_lr_ratio", "a finite number, 0 or more", got);
        }
        Ok(())
    }

    /// What no later call changes.
    pub(super) fn settings(&self) -> String {
        let Muon { ns_coefficients, eps, ns_steps, adjust_lr_fn, .. } = self;
        format!("Muon: {ns_steps} times {ns_coefficients:?} with eps {eps}, {adjust_lr_fn:?}")
    }
}

/// A matrix that Muon updates: a parameter, or some of its rows.
#[derive(Clone)]
pub(super) struct Matrix<'a> {
    update: Update<'a>,
    /// Where its values lie among those of the parameter.
    values: Range<i64>,
    form: Form,
}

/// Makes the span of a matrix and its direction.
type SpanOf<'a> = fn(&Update<'a>, &Range<i64>, &Tensor) -> Result<Span>;

/// What matrices that are orthogonalised together have in common.
#[derive(Clone, Copy, PartialEq)]
struct Form {
    /// As they lie in memory.
    rows: i64,
    columns: i64,
    /// Whether they lie in memory the other way round.
    is_transposed: bool,
    /// The kind of the moments.
    kind: Kind,
}

impl Form {
    /// What the learning rate is multiplied by.
    fn ratio(&self, adjust: AdjustLr) -> f64 {
        let Form { rows, columns, is_transposed, .. } = *self;
        if is_transposed { adjust.ratio(columns, rows) } else { adjust.ratio(rows, columns) }
    }
}

/// The matrices of a parameter, if Muon updates it.
pub(super) fn matrices_of<'a>(
    op: &str,
    parameter: &Parameter,
    update: Update<'a>,
) -> Result<Vec<Matrix<'a>>> {
    let Some(rows) = &parameter.matrices else { return Ok(Vec::new()) };
    let Parameter { name, tensor, .. } = parameter;
    let &[height, width] = tensor.size().as_slice() else {
        let got = format!("shape {:?}", tensor.size());
        return Err(Error::argument(op, name, "two dimensions, as before", got, ""));
    };
    let is_transposed = !tensor.is_contiguous();
    check_rows(op, name, rows, tensor)?;
    let whole = [height];
    let all = if rows.is_empty() { &whole } else { rows.as_slice() };
    let mut begin = 0;
    let matrix = |&rows: &i64| {
        let values = begin..begin + rows * width;
        begin = values.end;
        let (rows, columns) = if is_transposed { (width, rows) } else { (rows, width) };
        let form = Form { rows, columns, is_transposed, kind: update.moments };
        Matrix { update, values, form }
    };
    Ok(all.iter().map(matrix).filter(|matrix| !matrix.values.is_empty()).collect())
}

/// Checks that a parameter has these rows, one below the other in memory.
fn check_rows(op: &str, name: &str, rows: &[i64], tensor: &Tensor) -> Result<()> {
    if rows.is_empty() {
        return Ok(());
    }
    let height = tensor.size().first().copied().unwrap_or(0);
    let sum: i128 = rows.iter().map(|rows| i128::from(*rows)).sum();
    if rows.iter().any(|rows| *rows <= 0) || sum != i128::from(height) {
        let expected = format!("positive numbers of rows that add up to {height}");
        return Err(Error::argument(op, name, expected, format!("{rows:?}"), ""));
    }
    if !tensor.is_contiguous() {
        let (got, hint) = (format!("strides {:?}", tensor.stride()), "make it contiguous");
        return Err(Error::argument(op, name, "contiguous rows", got, hint));
    }
    Ok(())
}

/// Sorts matrices into those that are orthogonalised together.
fn batches<'a, 'b>(
    matrices: &'b [Matrix<'a>],
    is_in_half: impl Fn(&Form) -> bool,
) -> Vec<Vec<&'b Matrix<'a>>> {
    let mut forms: Vec<Vec<&Matrix<'_>>> = Vec::new();
    for matrix in matrices {
        match forms.iter_mut().find(|known| known[0].form == matrix.form) {
            Some(alike) => alike.push(matrix),
            None => forms.push(vec![matrix]),
        }
    }
    let at_once = |alike: &Vec<&Matrix<'_>>| {
        let Form { rows, columns, .. } = alike[0].form;
        super::plan::matrices(alike.len(), rows, columns, is_in_half(&alike[0].form))
    };
    let chunks = forms.iter().flat_map(|alike| alike.chunks(at_once(alike)));
    chunks.map(<[_]>::to_vec).collect()
}

impl FusedOptimizer {
    /// Leaves matrices to [`Muon`]'s AdamW: those for whose name and tensor `is_left` is true. Parameters
    /// with another number of dimensions than two are left to it anyway, and variables that join later
    /// are not asked for. Embeddings and the output layer should be left; see [`Muon`].
    ///
    /// # Errors
    /// For an optimizer that `Muon` has not built, and after the first step of such a parameter. Then
    /// nothing was changed.
    pub fn leave_to_adamw(&mut self, mut is_left: impl FnMut(&str, &Tensor) -> bool) -> Result<()> {
        let op = "FusedOptimizer::leave_to_adamw";
        let chosen = self.choose(op, |name, tensor| Ok(is_left(name, tensor).then_some(())))?;
        for (place, ()) in chosen {
            let key = self.groups[self.parameters[place].group].key;
            self.parameters[place].group = self.group_index(Key { rule: self.rule, ..key });
            self.parameters[place].matrices = None;
        }
        Ok(())
    }

    /// Tells [`Muon`] which parameters hold several matrices, one below the other: for such a name and
    /// tensor, `rows` returns the number of rows of each; for others, an empty list. It is asked for
    /// parameters that Muon updates.
    ///
    /// ```
    /// # use tch::{Device, nn};
    /// # use tch_extension::{nn::{AttentionConfig, attention}, optim::{Muon, OptimizerConfig}};
    /// # let vs = nn::VarStore::new(Device::Cpu);
    /// # let _layer = attention(vs.root(), 8, 2, AttentionConfig::gpt2());
    /// # let mut optimizer = Muon::default().build(&vs, 0.02)?;
    /// // q, k and v of GPT-2's attention.
    /// optimizer.split_matrices(|name, tensor| match name.ends_with("c_attn.weight") {
    ///     true => vec![tensor.size()[0] / 3; 3],
    ///     false => vec![],
    /// })?;
    /// # Ok::<(), tch_extension::Error>(())
    /// ```
    ///
    /// # Errors
    /// For an optimizer that `Muon` has not built; after the first step of such a parameter; when the
    /// rows do not add up to those of the tensor; for a tensor that is not contiguous. Then nothing was
    /// changed.
    pub fn split_matrices(
        &mut self,
        mut rows: impl FnMut(&str, &Tensor) -> Vec<i64>,
    ) -> Result<()> {
        let op = "FusedOptimizer::split_matrices";
        let chosen = self.choose(op, |name, tensor| {
            let rows = rows(name, tensor);
            check_rows(op, name, &rows, tensor)?;
            Ok((!rows.is_empty()).then_some(rows))
        })?;
        for (place, rows) in chosen {
            self.parameters[place].matrices = Some(rows);
        }
        Ok(())
    }

    /// The places of parameters of Muon that `choice` has something for.
    fn choose<T>(
        &mut self,
        op: &str,
        mut choice: impl FnMut(&str, &Tensor) -> Result<Option<T>>,
    ) -> Result<Vec<(usize, T)>> {
        if self.muon.is_none() {
            let expected = "an optimizer that Muon has built";
            return Err(Error::argument(op, "self", expected, format!("{:?}", self.rule), ""));
        }
        self.add_missing_variables()?;
        let mut chosen = Vec::new();
        let all = self.parameters.iter().enumerate();
        for (place, parameter) in all.filter(|(_, parameter)| parameter.matrices.is_some()) {
            let Some(new) = choice(&parameter.name, &parameter.tensor)? else { continue };
            if parameter.state.is_some() {
                let (expected, hint) = ("a parameter without steps", "call it right after build");
                return Err(Error::argument(op, &parameter.name, expected, "steps", hint));
            }
            chosen.push((place, new));
        }
        Ok(chosen)
    }

    /// Updates the matrices of a device, after a step was prepared there.
    pub(super) fn update_matrices(&self, batch: &Batch<'_>, has_totals: bool) -> Result<()> {
        let Some((muon, _)) = &self.muon else { return Ok(()) };
        let is_cast = Autocast::kind(batch.device).is_some();
        let _plain = is_cast.then(|| Autocast::disabled(batch.device)).transpose()?;
        let is_in_half =
            |form: &Form| muon.is_in_half(batch.device, form.kind, form.ratio(muon.adjust_lr_fn));
        batches(&batch.matrices, is_in_half)
            .iter()
            .try_for_each(|alike| self.update_alike(muon, batch, alike, has_totals))
    }

    fn update_alike<'a>(
        &self,
        muon: &Muon,
        batch: &Batch<'_>,
        alike: &[&Matrix<'a>],
        has_totals: bool,
    ) -> Result<()> {
        let Some(Matrix { form, .. }) = alike.first() else { return Ok(()) };
        let Form { rows, columns, kind, .. } = *form;
        let device = batch.device;
        let update = |call: Call<'_>, has_totals| {
            let scratch = batch.scratch.with_totals_of(call.spans, device)?;
            call.prepare(device, &scratch, has_totals)?;
            call.update(device, &scratch)
        };
        let spans = |directions: &Tensor, of: SpanOf<'a>| {
            let of_matrix = |(place, matrix): (usize, &&Matrix<'a>)| {
                let direction = directions.f_select(0, place as i64)?;
                of(&matrix.update, &matrix.values, &direction)
            };
            let spans = alike.iter().enumerate().map(of_matrix).collect::<Result<_>>()?;
            Ok::<_, Error>(Spans::cut(spans, device))
        };

        let read = if kind == Kind::Double { kind } else { Kind::BFloat16 };
        let size = [alike.len() as i64, rows, columns];
        let directions = Tensor::f_zeros(size, (read, device))?;
        let momentum = spans(&directions, Update::momentum_of)?;
        update(Call { rule: Rule::Muon, spans: &momentum, ..self.call(batch) }, has_totals)?;

        let x = muon.orthogonalised(directions, kind, form.ratio(muon.adjust_lr_fn))?;
        let weights = spans(&x, Update::weights_of)?;
        let call = Call { rule: Rule::Sgd, spans: &weights, ..self.call(batch) };
        // The gradients were scaled and clipped; here they only decide whether the step is skipped.
        update(Call { grad_scale: None, max_norm: None, norm: None, ..call }, false)
    }
}
