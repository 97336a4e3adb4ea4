//! A step of AdamW over all parameters, with and without clipping by the norm, and of Muon.

use crate::common::{Case, Provider, Work};
use crate::draw::Draw;
use std::cell::RefCell;
use tch::nn::{self, OptimizerConfig, VarStore};
use tch::{Device, Kind, Tensor};
use tch_extension::Result;
use tch_extension::args;
use tch_extension::library::Operator;
use tch_extension::optim;

const LR: f64 = 1e-4;
const MAX_NORM: f64 = 1.0;

/// The 148 tensors of GPT-2 with `width` features, 12 blocks, a context of 1024 and as many tokens.
fn gpt2(width: i64, tokens: i64, context: i64) -> Vec<Vec<i64>> {
    let norm = || [vec![width], vec![width]];
    let linear = |inputs: i64, outputs: i64| [vec![outputs, inputs], vec![outputs]];
    let block = || {
        let products = [(width, 3 * width), (width, width), (width, 4 * width), (4 * width, width)];
        let linears =
            products.into_iter().flat_map(move |(inputs, outputs)| linear(inputs, outputs));
        norm().into_iter().chain(norm()).chain(linears)
    };
    let embeddings = [vec![tokens, width], vec![context, width]];
    embeddings.into_iter().chain((0..12).flat_map(|_| block())).chain(norm()).collect()
}

/// The 5 tensors of a small recurrent model: 123 k values.
fn demo() -> Vec<Vec<i64>> {
    vec![vec![96, 128], vec![384, 256], vec![384], vec![96, 128], vec![96]]
}

/// Leaves that have these gradients.
fn with_gradients(gradients: &[Tensor]) -> (VarStore, Vec<Tensor>) {
    let vs = VarStore::new(gradients.first().map_or(Device::Cpu, Tensor::device));
    let leaf = |(index, gradient): (usize, &Tensor)| {
        let leaf = vs.root().zeros(&format!("w{index}"), &gradient.size());
        (&leaf * gradient).sum(Kind::Float).backward();
        leaf
    };
    let leaves = gradients.iter().enumerate().map(leaf).collect();
    (vs, leaves)
}

/// A provider whose state is made in the first call, and kept.
fn provider<S: 'static>(
    name: &'static str,
    make: impl Fn(&[Tensor]) -> Result<S> + 'static,
    step: impl Fn(&mut S) -> Result<()> + 'static,
) -> Provider {
    let state: RefCell<Option<S>> = RefCell::new(None);
    let call = move |gradients: &[Tensor]| {
        let mut state = state.borrow_mut();
        let state = match &mut *state {
            Some(state) => state,
            none => none.insert(make(gradients)?),
        };
        let _no_grad = tch::no_grad_guard();
        step(state)?;
        Ok(Vec::new())
    };
    Provider::new(name, call).without_backward()
}

/// tch's optimizer.
fn tchs(clips: bool) -> Provider {
    let make = |gradients: &[Tensor]| {
        let (vs, _) = with_gradients(gradients);
        Ok((nn::AdamW::default().build(&vs, LR)?, vs))
    };
    provider("tch", make, move |(optimizer, _)| {
        if clips {
            optimizer.clip_grad_norm(MAX_NORM);
        }
        optimizer.step();
        Ok(())
    })
}

fn ours(clips: bool) -> Provider {
    let make = move |gradients: &[Tensor]| {
        let (vs, _) = with_gradients(gradients);
        let mut optimizer = optim::OptimizerConfig::build(optim::AdamW::default(), &vs, LR)?;
        optimizer.set_clip_norm(clips.then_some(MAX_NORM)).expect("a norm");
        Ok((optimizer, vs))
    };
    provider("ours", make, |(optimizer, _)| optimizer.step())
}

/// What torch.optim keeps, and libtorch's operators that work on lists of tensors.
struct Lists {
    weights: Vec<Tensor>,
    gradients: Vec<Tensor>,
    first: Vec<Tensor>,
    second: Vec<Tensor>,
    steps: Vec<Tensor>,
    lr: Tensor,
    is_fused: bool,
    clips: bool,
}

impl Lists {
    fn new(gradients: &[Tensor], is_fused: bool, clips: bool) -> Result<Self> {
        let zeros = || gradients.iter().map(Tensor::zeros_like).collect::<Vec<_>>();
        let device = gradients.first().map_or(Device::Cpu, Tensor::device);
        let step = |_| Tensor::zeros([0_i64; 0], (Kind::Float, device));
        Ok(Lists {
            weights: zeros(),
            gradients: gradients.iter().map(Tensor::copy).collect(),
            first: zeros(),
            second: zeros(),
            steps: gradients.iter().map(step).collect(),
            lr: Tensor::full([0_i64; 0], LR, (Kind::Float, device)),
            is_fused,
            clips,
        })
    }

    fn step(&mut self) -> Result<()> {
        if self.clips {
            self.clip()?;
        }
        call("aten::_foreach_add_.Scalar", args![&self.steps, 1])?;
        if self.is_fused { self.fused() } else { self.foreach() }
    }

    /// torch.nn.utils.clip_grad_norm_
    fn clip(&self) -> Result<()> {
        let norms: Vec<Tensor> =
            Operator::find("aten::_foreach_norm.Scalar")?.call(args![&self.gradients])?;
        let norm = Tensor::f_stack(&norms, 0)?.f_norm()?;
        let clip =
            norm.f_add_scalar(1e-6)?.f_reciprocal()?.f_mul_scalar(MAX_NORM)?.f_clamp_max(1.0)?;
        call("aten::_foreach_mul_.Tensor", args![&self.gradients, &clip])
    }

    fn fused(&self) -> Result<()> {
        let none: Vec<Tensor> = Vec::new();
        // On the CPU, torch passes the learning rate as a number.
        let arguments = args![
            &self.weights,
            &self.gradients,
            &self.first,
            &self.second,
            &none,
            &self.steps,
            beta1 = 0.9,
            beta2 = 0.999,
            weight_decay = 0.01,
            eps = 1e-8,
            amsgrad = false,
            maximize = false
        ];
        match self.lr.device() {
            Device::Cpu => call("aten::_fused_adamw_", arguments.named("lr", LR)),
            _ => call("aten::_fused_adamw_.tensor_lr", arguments.named("lr", &self.lr)),
        }
    }

    /// torch.optim.AdamW with foreach, whose bias correction is computed on the CPU: here that of
    /// one step, which takes as long.
    fn foreach(&self) -> Result<()> {
        let Lists { weights, gradients, first, second, .. } = self;
        call("aten::_foreach_mul_.Scalar", args![weights, 1.0 - LR * 0.01])?;
        call("aten::_foreach_lerp_.Scalar", args![first, gradients, 0.1])?;
        call("aten::_foreach_mul_.Scalar", args![second, 0.999])?;
        call("aten::_foreach_addcmul_.Scalar", args![second, gradients, gradients, 0.001])?;
        let roots: Vec<Tensor> = Operator::find("aten::_foreach_sqrt")?.call(args![second])?;
        call("aten::_foreach_div_.Scalar", args![&roots, 0.5])?;
        call("aten::_foreach_add_.Scalar", args![&roots, 1e-8])?;
        call("aten::_foreach_addcdiv_.Scalar", args![weights, first, &roots, -LR])
    }
}

fn call(name: &str, arguments: tch_extension::library::Args<'_>) -> Result<()> {
    Operator::find(name)?.call::<()>(arguments)
}

fn lists(name: &'static str, is_fused: bool, clips: bool) -> Provider {
    provider(name, move |gradients| Lists::new(gradients, is_fused, clips), Lists::step)
}

fn case(model: &str, sizes: &[Vec<i64>], clips: bool, device: Device) -> Case {
    let values: i64 = sizes.iter().map(|size| size.iter().product::<i64>()).sum();
    // Weights and moments are read and written, and gradients are read once, or twice.
    let words = if clips { 8 } else { 7 };
    Case {
        operator: "optim",
        point: format!("{model}{}", if clips { ", clipped" } else { "" }),
        kind: Kind::Float,
        device,
        tf32: false,
        inputs: sizes.iter().map(|size| (size.clone(), 1e-3)).collect(),
        work: [Work::new(Kind::Float, words * values, 0), Work::default()],
        providers: providers(device, clips),
    }
}

/// A case with a drawn number of parameters, of drawn sizes. They are `Float`.
pub fn drawn(draw: &mut Draw, _: Kind, device: Device) -> Case {
    const MOST: i64 = 1 << 28;
    let most = draw.size(1 << 24, 1);
    let count = draw.size(1000, 1).min(MOST / most).max(1);
    let sizes: Vec<Vec<i64>> = (0..count).map(|_| vec![draw.size(most, 1)]).collect();
    let values: i64 = sizes.iter().flatten().sum();
    case(&format!("{count} tensors, {values} values"), &sizes, draw.one_in(2), device)
}

/// The 112 matrices of the layers of Llama-3.2-1B, or of one whose sizes are divided.
fn llama(divisor: i64) -> Vec<Vec<i64>> {
    let [dim, kv, hidden] = [2048, 512, 8192].map(|size| size / divisor);
    let layer =
        [(dim, dim), (kv, dim), (kv, dim), (dim, dim), (hidden, dim), (hidden, dim), (dim, hidden)];
    (0..16).flat_map(|_| layer).map(|(rows, columns)| vec![rows, columns]).collect()
}

/// torch.optim.Muon, in its operations.
struct Torchs {
    weights: Vec<Tensor>,
    gradients: Vec<Tensor>,
    buffers: Vec<Tensor>,
}

impl Torchs {
    fn new(gradients: &[Tensor]) -> Result<Self> {
        let float = |gradient: &Tensor| gradient.to_kind(Kind::Float);
        let gradients: Vec<Tensor> = gradients.iter().map(float).collect();
        let zeros = || gradients.iter().map(Tensor::zeros_like).collect();
        Ok(Torchs { weights: zeros(), buffers: zeros(), gradients })
    }

    fn step(&mut self) -> Result<()> {
        let optim::Muon { momentum, weight_decay, ns_coefficients, eps, ns_steps, .. } =
            optim::Muon::default();
        let addmm = Operator::find("aten::addmm")?;
        let add = Operator::find("aten::add_.Tensor")?;
        for ((weight, gradient), buffer) in
            self.weights.iter_mut().zip(&self.gradients).zip(&mut self.buffers)
        {
            let _ = buffer.f_lerp_(gradient, 1.0 - momentum)?;
            let mut x = gradient.f_lerp(buffer, momentum)?.f_to_kind(Kind::BFloat16)?;
            let size = gradient.size();
            let (rows, columns) = (size[0], size[1]);
            if rows > columns {
                x = x.f_tr()?;
            }
            let _ = x.f_div_(&x.f_norm()?.f_clamp_min(eps)?)?;
            let (a, b, c) = ns_coefficients;
            for _ in 0..ns_steps {
                let gram = x.f_mm(&x.f_tr()?)?;
                let polynomial: Tensor =
                    addmm.call(args![&gram, &gram, &gram, beta = b, alpha = c])?;
                x = addmm.call(args![&x, &polynomial, &x, beta = a, alpha = 1.0])?;
            }
            if rows > columns {
                x = x.f_tr()?;
            }
            let ratio = (rows as f64 / columns as f64).max(1.0).sqrt();
            let _ = weight.f_mul_scalar_(1.0 - LR * weight_decay)?;
            let _: Tensor = add.call(args![&*weight, &x, alpha = -LR * ratio])?;
        }
        Ok(())
    }
}

/// Parameters and gradients are `Float`. The floor is that of the products in half precision, of which
/// symmetric ones cost half: 3n²m + n³ in each of five iterations, or 6n²m + 14n³ in the Gram form.
fn muon(model: &str, sizes: &[Vec<i64>], device: Device) -> Case {
    let operations = |size: &Vec<i64>| {
        let (n, m) = (size[0].min(size[1]), size[0].max(size[1]));
        n * n * (5 * (3 * m + n)).min(6 * m + 14 * n)
    };
    let values: i64 = sizes.iter().map(|size| size.iter().product::<i64>()).sum();
    let ours = |gradients: &[Tensor]| {
        let (vs, _) = with_gradients(gradients);
        Ok((optim::OptimizerConfig::build(optim::Muon::default(), &vs, LR)?, vs))
    };
    Case {
        operator: "optim",
        point: format!("muon, {model}"),
        kind: Kind::BFloat16,
        device,
        tf32: false,
        inputs: sizes.iter().map(|size| (size.clone(), 1e-3)).collect(),
        // Weights and momentum are read and written, and gradients are read.
        work: [
            Work::new(Kind::Float, 5 * values, sizes.iter().map(operations).sum()),
            Work::default(),
        ],
        providers: vec![
            provider("torch.optim.Muon", Torchs::new, Torchs::step),
            provider("ours", ours, |(optimizer, _)| optimizer.step()),
        ],
    }
}

/// On the CPU, a GPT-2 that is small enough for its caches' sake and ours.
pub fn cases(device: Device) -> Vec<Case> {
    let gpt2 = match device {
        Device::Cpu => ("GPT-2, 96 wide", gpt2(96, 6283, 128)),
        _ => ("GPT-2", gpt2(768, 50257, 1024)),
    };
    let mut cases = Vec::new();
    for (model, sizes) in [gpt2, ("demo", demo())] {
        cases.extend([false, true].map(|clips| case(model, &sizes, clips, device)));
    }
    cases.push(match device {
        Device::Cpu => muon("Llama-3.2-1B / 32", &llama(32), device),
        _ => muon("Llama-3.2-1B", &llama(1), device),
    });
    cases
}

fn providers(device: Device, clips: bool) -> Vec<Provider> {
    let lists = [("foreach", false), ("fused", true)];
    let mut providers: Vec<_> =
        lists.into_iter().map(|(name, is_fused)| self::lists(name, is_fused, clips)).collect();
    // tch's clipping waits for the device, which a CUDA graph cannot.
    if device == Device::Cpu || !clips {
        providers.insert(0, tchs(clips));
    }
    providers.push(ours(clips));
    providers
}
