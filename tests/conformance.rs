//! `testing::conformance` accepts operators that keep to the rules, and names the rule that another breaks.

use std::cell::Cell;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Mutex, OnceLock};
use std::thread::ThreadId;
use tch::{Device, Kind, Tensor};
use tch_extension::amp::Autocast;
use tch_extension::autograd::{
    Context, Function, GradOptions, Inputs, Saver, Tensors, apply, checkpoint, differentiate_reference, grad,
};
use tch_extension::cuda::{Stream, StreamGuard};
use tch_extension::testing::{ConformanceOptions, conformance, cuda_or_skip, devices};
use tch_extension::{Error, Result};

fn leaf(size: &[i64], device: Device) -> Tensor {
    let values = Tensor::randn(size, (Kind::Double, Device::Cpu));
    values.to_device(device).set_requires_grad(true)
}

fn defaults() -> ConformanceOptions<'static> {
    ConformanceOptions::default()
}

/// The properties that do not hold, and the whole report.
fn broken<O: Into<Tensors>>(
    operator: impl Fn(&[Tensor]) -> Result<O> + Sync,
    device: Device,
    options: &ConformanceOptions<'_>,
) -> (Vec<String>, String) {
    let inputs = [leaf(&[4, 6], device), leaf(&[4, 6], device)];
    let Err(error) = conformance(operator, &[&inputs[0], &inputs[1]], options) else {
        return (Vec::new(), String::new());
    };
    let report = error.to_string();
    let name = |line: &str| {
        let rest = line.strip_prefix("conformance: ").unwrap_or_else(|| panic!("{report}"));
        rest.split(':').next().unwrap_or_default().to_string()
    };
    (report.lines().map(name).collect(), report)
}

#[track_caller]
fn assert_breaks<O: Into<Tensors>>(
    operator: impl Fn(&[Tensor]) -> Result<O> + Sync,
    expected: &[&str],
    says: &str,
) {
    for device in devices() {
        let (names, report) = broken(&operator, device, &defaults());
        assert_eq!(names, expected, "{device:?}: {report}");
        assert!(report.contains(says), "{says:?} is not in: {report}");
    }
}

/// x·w with a part that can be exchanged for a wrong one: what is computed with the inputs, and from input, other
/// input and incoming gradient the gradient.
struct Product<F, B> {
    forward: F,
    backward: B,
}

type Gradient = fn(&Context<'_>, [&Tensor; 2], &Tensor) -> Result<Tensors>;
type Value = fn(&Tensor, &Tensor) -> Result<Tensor>;

fn value(x: &Tensor, w: &Tensor) -> Result<Tensor> {
    Ok(x * w)
}

fn gradient(_: &Context<'_>, [x, w]: [&Tensor; 2], grad: &Tensor) -> Result<Tensors> {
    Ok([grad * w, grad * x].into())
}

impl Function for Product<Value, Gradient> {
    const NAME: &'static str = "product";
    const DOUBLE_BACKWARD: bool = true;

    fn forward(&mut self, saver: &mut Saver<'_>, inputs: Inputs<'_>) -> Result<Tensors> {
        let (x, w) = (inputs.get(0)?, inputs.get(1)?);
        saver.save(x);
        saver.save(w);
        Ok((self.forward)(x, w)?.into())
    }

    fn backward(&self, ctx: &Context<'_>, grads: &Tensors) -> Result<Tensors> {
        let (x, w) = (ctx.saved(0)?, ctx.saved(1)?);
        (self.backward)(ctx, [&x, &w], grads.get(0)?)
    }
}

fn product(forward: Value, backward: Gradient) -> impl Fn(&[Tensor]) -> Result<Tensors> + Sync {
    move |inputs| apply(Product { forward, backward }, &[Some(&inputs[0]), Some(&inputs[1])])
}

/// As if the tensor were contiguous.
fn taken_for_contiguous(tensor: &Tensor) -> Tensor {
    let columns = tensor.size()[1];
    tensor.as_strided(tensor.size(), [columns, 1], None)
}

#[test]
fn operators_that_keep_to_the_rules() {
    let check = |operator: &(dyn Fn(&[Tensor]) -> Result<Tensors> + Sync)| {
        for device in devices() {
            let (names, report) = broken(operator, device, &defaults());
            assert!(names.is_empty(), "{report}");
        }
    };
    check(&product(value, gradient));
    check(&|inputs| Ok((&inputs[0] * &inputs[1]).into()));
    check(&|inputs| Ok([inputs[0].softmax(1, None), inputs[1].tanh() * &inputs[0]].into()));
    check(&|inputs| Ok(inputs[0].matmul(&inputs[1].transpose(0, 1)).into()));
    // Absent and undefined outputs, and one without a derivative.
    check(&|inputs| Ok(vec![None, Some(&inputs[0] * &inputs[1]), Some(Tensor::new())].into()));
    check(&|inputs| Ok([inputs[0].gt_tensor(&inputs[1]), inputs[0].exp()].into()));
    // Only one of the inputs has a derivative.
    check(&|inputs| Ok((&inputs[0] * inputs[1].detach()).into()));
    // A second derivative that is an error, not a wrong number.
    check(&|inputs| apply(Once, &[Some(&inputs[0])]));
    check(&|inputs| {
        let run = |inputs: &[Option<Tensor>]| match inputs {
            [Some(x), Some(w)] => Ok((x * w).sin().into()),
            _ => unreachable!("two inputs"),
        };
        checkpoint(run, &[Some(&inputs[0]), Some(&inputs[1])])
    });
}

/// sin, without a second derivative.
struct Once;

impl Function for Once {
    const NAME: &'static str = "once";

    fn forward(&mut self, saver: &mut Saver<'_>, inputs: Inputs<'_>) -> Result<Tensors> {
        saver.save(inputs.get(0)?);
        Ok(inputs.get(0)?.sin().into())
    }

    fn backward(&self, ctx: &Context<'_>, grads: &Tensors) -> Result<Tensors> {
        Ok((grads.get(0)? * ctx.saved(0)?.cos()).into())
    }
}

#[test]
fn inputs_of_any_kind_and_size() {
    for device in devices() {
        let options = (Kind::Float, device);
        let table = Tensor::randn([5, 3], options).set_requires_grad(true);
        let index = Tensor::from_slice(&[4_i64, 0, 4, 2]).to_device(device);
        conformance(|inputs| Ok(inputs[0].index_select(0, &inputs[1])), &[&table, &index], &defaults())
            .expect("an integer input");
        for kind in [Kind::Half, Kind::BFloat16, Kind::Float] {
            let x = Tensor::randn([3, 8], (kind, device)).set_requires_grad(true);
            conformance(|inputs| Ok(inputs[0].relu() * 2.0), &[&x], &defaults()).expect("a smaller kind");
        }
        for size in [&[0, 3][..], &[], &[1], &[2, 3, 4]] {
            let x = Tensor::randn(size, options).set_requires_grad(true);
            conformance(|inputs| Ok(inputs[0].sigmoid()), &[&x], &defaults()).expect("any size");
        }
        let rows = leaf(&[1, 6], device).detach().expand([4, 6], false).set_requires_grad(true);
        conformance(|inputs| Ok(inputs[0].exp()), &[&rows], &defaults()).expect("elements in one place");
        let seven: Vec<Tensor> = (0..7).map(|_| leaf(&[2], device)).collect();
        let sum = |inputs: &[Tensor]| Ok(inputs.iter().map(Tensor::exp).sum::<Tensor>());
        conformance(sum, &seven.iter().collect::<Vec<_>>(), &defaults()).expect("more than six");
        conformance(|inputs| Ok(inputs[0].shallow_clone() + 1), &[&index], &defaults())
            .expect("no derivative");
    }
}

#[test]
fn the_caller_s_tensors_are_not_touched() {
    let x = leaf(&[4, 6], Device::Cpu);
    let before = x.detach().copy();
    let add = |inputs: &[Tensor]| {
        inputs[0].detach().f_copy_(&(inputs[0].detach() + 1.0))?;
        Ok(&inputs[0] * 2.0)
    };
    conformance(add, &[&x], &defaults()).expect_err("it writes to its input");
    assert_eq!((x.detach(), x.internal_version()), (before, 0));
    assert!(!x.grad().defined() && x.requires_grad());
}

#[test]
fn a_write_to_an_input() {
    let negate = |x: &Tensor, w: &Tensor| {
        // The same values: only the version tells. Of expanded memory this is an error.
        let _ = x.detach().f_copy_(&x.detach());
        Ok(x * w)
    };
    assert_breaks(product(negate, gradient), &["inputs unchanged"], "input 0 as [4, 6] with strides");
    let zero_grad = |_: &Context<'_>, [x, w]: [&Tensor; 2], grad: &Tensor| {
        let results = [grad * w, grad * x];
        let _ = grad.detach().f_zero_()?;
        Ok(results.into())
    };
    assert_breaks(
        product(value, zero_grad),
        &["inputs unchanged"],
        "the backward wrote to incoming gradient 0",
    );
}

#[test]
fn a_write_beside_an_input() {
    let beside = |x: &Tensor, w: &Tensor| {
        // 24 elements, and then those that are no part of it.
        let _ = x.as_strided([32], [1], None).narrow(0, 30, 1).f_fill_(0.0)?;
        Ok(x * w)
    };
    for device in devices() {
        let x = leaf(&[4, 6], device);
        // Only copies with their margins have so much memory.
        let error = conformance(product(beside, gradient), &[&x, &x], &defaults()).expect_err("a write");
        assert!(error.to_string().contains("or to memory around it"), "{error}");
    }
}

#[test]
fn outputs_that_share_memory() {
    assert_breaks(
        |inputs| Ok([inputs[0].transpose(0, 1), inputs[1].exp()]),
        &["no aliasing"],
        "output 0 shares memory with input 0",
    );
    let twice = |inputs: &[Tensor]| {
        let output = &inputs[0] * &inputs[1];
        Ok([output.narrow(0, 0, 3), output.narrow(0, 2, 2)])
    };
    assert_breaks(twice, &["no aliasing"], "outputs 0 and 1 share memory");
    let declared = ConformanceOptions { aliases: &[(0, 0)], ..defaults() };
    let (names, report) = broken(|inputs| Ok(inputs[0].transpose(0, 1)), Device::Cpu, &declared);
    assert!(names.is_empty(), "{report}");
    let other = ConformanceOptions { aliases: &[(0, 1), (1, 0)], ..defaults() };
    assert_eq!(broken(|inputs| Ok(inputs[0].transpose(0, 1)), Device::Cpu, &other).0, ["no aliasing"]);
}

#[test]
fn other_bits_each_time() {
    static CALLS: AtomicU32 = AtomicU32::new(0);
    let drifting = |inputs: &[Tensor]| {
        let drift = 1.0 + 1e-13 * f64::from(CALLS.fetch_add(1, Ordering::Relaxed) % 7);
        Ok(&inputs[0] * &inputs[1] * drift)
    };
    assert_breaks(drifting, &["determinism"], "output 0 has other bits");
    let allowed = ConformanceOptions { deterministic: false, ..defaults() };
    assert!(broken(drifting, Device::Cpu, &allowed).0.is_empty());

    static BACKWARDS: AtomicU32 = AtomicU32::new(0);
    let drifting = |_: &Context<'_>, [x, w]: [&Tensor; 2], grad: &Tensor| {
        let drift = 1.0 + 1e-13 * f64::from(BACKWARDS.fetch_add(1, Ordering::Relaxed) % 7);
        Ok([grad * w, grad * x * drift].into())
    };
    assert_breaks(product(value, drifting), &["determinism"], "the gradient of input 1 has other bits");
}

#[test]
fn other_numbers_without_a_graph() {
    let shortcut = |inputs: &[Tensor]| {
        let output = &inputs[0] * &inputs[1];
        Ok(if output.requires_grad() { output } else { output * 1.001 })
    };
    assert_breaks(shortcut, &["no_grad"], "with grad mode off, output 0: element");
    let other_kind = |inputs: &[Tensor]| {
        let output = &inputs[0] * &inputs[1];
        Ok(if output.requires_grad() { output } else { output.to_kind(Kind::Float) })
    };
    assert_breaks(other_kind, &["no_grad"], "with grad mode off, output 0");
    let anyway = |inputs: &[Tensor]| Ok((&inputs[0] * &inputs[1]).detach().set_requires_grad(true));
    assert_eq!(broken(anyway, Device::Cpu, &defaults()).0[0], "no_grad");
}

#[test]
fn strides_ignored() {
    let forward = |x: &Tensor, w: &Tensor| Ok(taken_for_contiguous(x) * w);
    assert_breaks(product(forward, gradient), &["layouts"], "with inputs Transposed, output 0: element");
    let backward = |_: &Context<'_>, [x, w]: [&Tensor; 2], grad: &Tensor| {
        Ok([grad * w, grad * taken_for_contiguous(x)].into())
    };
    assert_breaks(product(value, backward), &["layouts"], "the gradient of input 1: element");
}

#[test]
fn an_alignment_taken_for_granted() {
    let forward = |x: &Tensor, w: &Tensor| {
        let misaligned = !(x.data_ptr() as usize).is_multiple_of(16);
        Ok(if misaligned { x * w + 1.0 } else { x * w })
    };
    assert_breaks(product(forward, gradient), &["layouts"], "with inputs Strided, output 0: element");
}

#[test]
fn a_gradient_that_depends_on_who_asks() {
    let careless = |ctx: &Context<'_>, [x, w]: [&Tensor; 2], grad: &Tensor| {
        let wrong = if ctx.needs_input_grad(1) { 1.0 } else { 2.0 };
        Ok([grad * w * wrong, grad * x].into())
    };
    assert_breaks(
        product(value, careless),
        &["needs_input_grad"],
        "with gradients for inputs [0] only, the gradient of input 0: element",
    );
    let cut = |inputs: &[Tensor]| Ok((&inputs[0] * &inputs[1]).detach());
    assert_eq!(broken(cut, Device::Cpu, &defaults()).0[0], "needs_input_grad");
}

#[test]
fn strides_of_incoming_gradients_ignored() {
    let careless = |_: &Context<'_>, [x, w]: [&Tensor; 2], grad: &Tensor| {
        let grad = if grad.requires_grad() { grad.shallow_clone() } else { taken_for_contiguous(grad) };
        Ok([&grad * w, &grad * x].into())
    };
    for device in devices() {
        let (names, report) = broken(product(value, careless), device, &defaults());
        assert!(names.contains(&"incoming gradients".to_string()), "{report}");
        assert!(report.contains("with incoming gradients Transposed"), "{report}");
    }
}

/// x², x·w; an absent gradient is taken for the other.
struct Two;

impl Function for Two {
    const NAME: &'static str = "two";

    fn forward(&mut self, saver: &mut Saver<'_>, inputs: Inputs<'_>) -> Result<Tensors> {
        let (x, w) = (inputs.get(0)?, inputs.get(1)?);
        saver.set_materialize_grads(false);
        saver.save(x);
        saver.save(w);
        Ok([x * x, x * w].into())
    }

    fn backward(&self, ctx: &Context<'_>, grads: &Tensors) -> Result<Tensors> {
        let (x, w) = (ctx.saved(0)?, ctx.saved(1)?);
        let first = grads.optional(0).or(grads.optional(1)).expect("one");
        let second = grads.optional(1).or(grads.optional(0)).expect("one");
        Ok([first * &x * 2.0 + second * &w, second * &x].into())
    }
}

#[test]
fn an_absent_gradient_misread() {
    assert_breaks(
        |inputs| apply(Two, &[Some(&inputs[0]), Some(&inputs[1])]),
        &["incoming gradients"],
        "with an incoming gradient for output 0 alone",
    );
}

/// x·w, differentiated in a way that this crate's helper exists to avoid.
struct Careless {
    /// With respect to copies, not to the inputs.
    detached: bool,
}

impl Function for Careless {
    const NAME: &'static str = "careless";
    const DOUBLE_BACKWARD: bool = true;

    fn forward(&mut self, saver: &mut Saver<'_>, inputs: Inputs<'_>) -> Result<Tensors> {
        let (x, w) = (inputs.get(0)?, inputs.get(1)?);
        saver.save(x);
        saver.save(w);
        Ok((x * w).into())
    }

    fn backward(&self, ctx: &Context<'_>, grads: &Tensors) -> Result<Tensors> {
        let saved = [ctx.saved(0)?, ctx.saved(1)?];
        let vector = grads.get(0)?;
        if !ctx.create_graph() {
            return Ok([vector * &saved[1], vector * &saved[0]].into());
        }
        let inputs =
            if self.detached { saved.map(|tensor| tensor.detach().set_requires_grad(true)) } else { saved };
        let output = &inputs[0] * &inputs[1];
        let vectors = [Some(vector)];
        let options = GradOptions { grad_outputs: &vectors, create_graph: true, ..Default::default() };
        grad(&[&output], &[&inputs[0], &inputs[1]], &options)
    }
}

#[test]
fn careless_second_derivatives() {
    let careless = |detached| {
        move |inputs: &[Tensor]| apply(Careless { detached }, &[Some(&inputs[0]), Some(&inputs[1])])
    };
    assert_breaks(careless(false), &["create_graph"], "with create_graph: element");
    assert_breaks(careless(true), &["create_graph"], "a second derivative is");
    struct Careful;
    impl Function for Careful {
        const NAME: &'static str = "careful";
        const DOUBLE_BACKWARD: bool = true;

        fn forward(&mut self, saver: &mut Saver<'_>, inputs: Inputs<'_>) -> Result<Tensors> {
            Careless { detached: false }.forward(saver, inputs)
        }

        fn backward(&self, ctx: &Context<'_>, grads: &Tensors) -> Result<Tensors> {
            if !ctx.create_graph() {
                return Careless { detached: false }.backward(ctx, grads);
            }
            let inputs = [Some(ctx.saved(0)?), Some(ctx.saved(1)?)];
            differentiate_reference(ctx, &inputs, grads, |inputs| match inputs {
                [Some(x), Some(w)] => Ok((x * w).into()),
                _ => unreachable!("two inputs"),
            })
        }
    }
    let careful = |inputs: &[Tensor]| apply(Careful, &[Some(&inputs[0]), Some(&inputs[1])]);
    assert_breaks(careful, &[], "");
}

#[test]
fn grad_mode_left_on() {
    let leaving = |inputs: &[Tensor]| {
        let output = &inputs[0] * &inputs[1];
        // SAFETY: a switch of this thread.
        unsafe { torch_sys::at_grad_set_enabled(1) };
        Ok(output)
    };
    assert_breaks(leaving, &["state"], "the forward changed grad mode");
}

#[test]
fn autocast_left_on() {
    thread_local!(static LEFT: Cell<Option<Autocast>> = const { Cell::new(None) });
    let leaving = |inputs: &[Tensor]| {
        let output = &inputs[0] * &inputs[1];
        let guard = match LEFT.take() {
            None => Some(Autocast::new(Device::Cpu, Kind::BFloat16)?),
            Some(_) => None,
        };
        LEFT.set(guard);
        Ok(output)
    };
    assert_breaks(leaving, &["state"], "the forward changed autocast");
    drop(LEFT.take());
}

#[test]
fn what_only_one_thread_has() {
    static FIRST: OnceLock<ThreadId> = OnceLock::new();
    let homesick = |inputs: &[Tensor]| {
        let home = std::thread::current().id() == *FIRST.get_or_init(|| std::thread::current().id());
        Ok(&inputs[0] * &inputs[1] * if home { 1.0 } else { 0.5 })
    };
    assert_breaks(homesick, &["threads"], "in a new thread, output 0: element");
    thread_local!(static HOME: Cell<bool> = const { Cell::new(false) });
    HOME.set(true);
    let panicking = |inputs: &[Tensor]| {
        assert!(HOME.get(), "not at home");
        Ok(&inputs[0] * &inputs[1])
    };
    assert_breaks(panicking, &["threads"], "in a new thread: it panicked: not at home");
}

/// In place: x := x·w.
struct Scale {
    tell: bool,
}

impl Function for Scale {
    const NAME: &'static str = "scale_";
    const DOUBLE_BACKWARD: bool = true;

    fn forward(&mut self, saver: &mut Saver<'_>, inputs: Inputs<'_>) -> Result<Tensors> {
        let (x, w) = (inputs.get(0)?, inputs.get(1)?);
        let before = x.copy();
        saver.save(&before);
        saver.save(w);
        if self.tell {
            let _ = x.shallow_clone().f_mul_(w)?;
            saver.mark_dirty(0);
            return Ok(x.shallow_clone().into());
        }
        // As a kernel writes: libtorch does not notice.
        let values = (x * w).contiguous();
        let (to, from) = (x.data_ptr().cast::<f64>(), values.data_ptr().cast::<f64>());
        // SAFETY: the test gives contiguous tensors of kind Double on the CPU.
        unsafe { std::ptr::copy_nonoverlapping(from, to, values.numel()) };
        Ok(values.into())
    }

    fn backward(&self, ctx: &Context<'_>, grads: &Tensors) -> Result<Tensors> {
        let (x, w) = (ctx.saved(0)?, ctx.saved(1)?);
        Ok([grads.get(0)? * &w, grads.get(0)? * &x].into())
    }
}

#[test]
fn changes_in_place_have_to_be_declared() {
    let scale = |inputs: &[Tensor]| apply(Scale { tell: true }, &[Some(&inputs[0]), Some(&inputs[1])]);
    let declared = ConformanceOptions { changed_inputs: &[0], ..defaults() };
    let beyond = ConformanceOptions { changed_inputs: &[0, 2], ..defaults() };
    for device in devices() {
        // Not differentiable by what is changed, and by it.
        for x in [leaf(&[4, 6], device).detach(), leaf(&[4, 6], device)] {
            let w = leaf(&[4, 6], device);
            conformance(scale, &[&x, &w], &declared).expect("declared");
            let error = conformance(scale, &[&x, &w], &beyond).expect_err("two inputs").to_string();
            assert!(error.contains("names input 2, which there is not"), "{error}");
        }
        let (x, w) = (leaf(&[4, 6], device).detach(), leaf(&[4, 6], device));
        let error = conformance(scale, &[&x, &w], &defaults()).expect_err("undeclared").to_string();
        assert!(error.contains("inputs unchanged: the forward wrote to input 0"), "{error}");
        assert!(error.contains("no aliasing: output 0 shares memory with input 0"), "{error}");
    }
    let silent = |inputs: &[Tensor]| apply(Scale { tell: false }, &[Some(&inputs[0]), Some(&inputs[1])]);
    let (x, w) = (leaf(&[4, 6], Device::Cpu).detach(), leaf(&[4, 6], Device::Cpu));
    let error = conformance(silent, &[&x, &w], &declared).expect_err("libtorch is not told").to_string();
    assert!(error.contains("its version was not: is mark_dirty missing?"), "{error}");
}

#[test]
fn errors_of_the_operator_itself() {
    let x = leaf(&[4, 6], Device::Cpu);
    let error = conformance(|inputs| Ok(inputs[0].f_view([5, 5])?), &[&x], &defaults()).expect_err("a shape");
    assert!(error.to_string().contains("shape '[5, 5]' is invalid"), "{error}");
    let error =
        conformance(|inputs| Ok(&inputs[0] + 1), &[&Tensor::new()], &defaults()).expect_err("undefined");
    assert!(error.to_string().starts_with("conformance: inputs[0]: expected a tensor"), "{error}");
}

#[test]
fn cuda_work_on_another_stream() {
    let Some(device) = cuda_or_skip("cuda_work_on_another_stream") else { return };
    let elsewhere = |inputs: &[Tensor]| {
        let _guard = StreamGuard::new(&Stream::default_of(inputs[0].device())?)?;
        Ok(&inputs[0] * &inputs[1])
    };
    // A capture does not see it, either.
    let (names, report) = broken(elsewhere, device, &ConformanceOptions { cuda_graph: false, ..defaults() });
    assert_eq!(names, ["stream"], "{report}");
    let backward = |_: &Context<'_>, [x, w]: [&Tensor; 2], grad: &Tensor| {
        let _guard = StreamGuard::new(&Stream::default_of(x.device())?)?;
        Ok([grad * w, grad * x].into())
    };
    let options = ConformanceOptions { cuda_graph: false, ..defaults() };
    let (names, report) = broken(product(value, backward), device, &options);
    assert_eq!(names, ["stream"], "{report}");
    assert!(report.contains("on a side stream, the gradient of input"), "{report}");
    let leaving = |inputs: &[Tensor]| {
        let output = &inputs[0] * &inputs[1];
        std::mem::forget(StreamGuard::new(&Stream::new(inputs[0].device())?)?);
        Ok(output)
    };
    let home = Stream::current(device).expect("a stream");
    let (names, report) = broken(leaving, device, &options);
    std::mem::forget(StreamGuard::new(&home).expect("back"));
    assert!(names.contains(&"state".to_string()), "{report}");
    assert!(report.contains("changed the current CUDA stream"), "{report}");
}

#[test]
fn cuda_what_cannot_be_captured() {
    let Some(device) = cuda_or_skip("cuda_what_cannot_be_captured") else { return };
    if std::env::var_os("PYTORCH_NO_CUDA_MEMORY_CACHING").is_some() {
        return;
    }
    let waiting = |inputs: &[Tensor]| {
        let sum = inputs[0].f_sum(Kind::Double)?.f_double_value(&[])?;
        Ok(&inputs[0] * &inputs[1] + 0.0 * sum)
    };
    let (names, report) = broken(waiting, device, &defaults());
    assert_eq!(names, ["CUDA graph"], "{report}");
    assert!(report.contains("it cannot be captured"), "{report}");
    assert!(broken(waiting, device, &ConformanceOptions { cuda_graph: false, ..defaults() }).0.is_empty());
    // What the CPU read at the capture is no longer so at the replay.
    static CALLS: AtomicU32 = AtomicU32::new(0);
    let counting = |inputs: &[Tensor]| {
        let captured = tch_extension::cuda::Graph::capture(inputs[0].device(), || Ok(())).is_err();
        CALLS.fetch_add(1, Ordering::Relaxed);
        Ok(&inputs[0] * &inputs[1] * if captured { 2.0 } else { 1.0 })
    };
    let (names, report) = broken(counting, device, &defaults());
    assert_eq!(names, ["CUDA graph"], "{report}");
    assert!(report.contains("replayed with other values, output 0: element"), "{report}");
}

#[test]
fn a_write_without_a_graph() {
    let careless = |inputs: &[Tensor]| {
        let output = &inputs[0] * &inputs[1];
        if !output.requires_grad() {
            // As a kernel that takes an input for scratch memory.
            let _ = inputs[0].detach().f_fill_(0.0);
        }
        Ok(output)
    };
    assert_breaks(careless, &["inputs unchanged"], "the forward with grad mode off wrote to input 0");
}

#[test]
fn one_buffer_for_all_calls() {
    static BUFFER: Mutex<Option<Tensor>> = Mutex::new(None);
    let reusing = |x: &Tensor, w: &Tensor| {
        let mut buffer = BUFFER.lock().expect("unpoisoned");
        let buffer = buffer.get_or_insert_with(|| (x * w).detach());
        buffer.f_copy_(&(x * w))?;
        Ok(buffer.detach())
    };
    for only_with_graph in [true, false] {
        let operator = |inputs: &[Tensor]| {
            let graph = (&inputs[0] * &inputs[1]).requires_grad();
            product(if graph == only_with_graph { reusing } else { value }, gradient)(inputs)
        };
        let (names, report) = broken(operator, Device::Cpu, &defaults());
        assert!(names.contains(&"no aliasing".to_string()), "{only_with_graph}: {report}");
        assert!(report.contains("output 0 shares memory with that of another call"), "{report}");
    }
}

#[test]
fn one_buffer_for_all_gradients() {
    static BUFFER: Mutex<Option<Tensor>> = Mutex::new(None);
    let reusing = |ctx: &Context<'_>, [x, w]: [&Tensor; 2], grad: &Tensor| {
        if ctx.create_graph() {
            return Ok([grad * w, grad * x].into());
        }
        let mut buffer = BUFFER.lock().expect("unpoisoned");
        let buffer = buffer.get_or_insert_with(|| grad * w);
        buffer.f_copy_(&(grad * w))?;
        Ok([buffer.detach(), grad * x].into())
    };
    let (names, report) = broken(product(value, reusing), Device::Cpu, &defaults());
    assert!(names.contains(&"no aliasing".to_string()), "{report}");
    assert!(report.contains("the gradient of input 0 shares memory with that of another call"), "{report}");
}

#[test]
fn aliasing_only_with_a_graph() {
    let view = |inputs: &[Tensor]| {
        let product = &inputs[0] * &inputs[1];
        let graph = product.requires_grad();
        Ok([if graph { inputs[0].transpose(0, 1) } else { inputs[0].transpose(0, 1).copy() }, product])
    };
    assert_breaks(view, &["no aliasing"], "output 0 shares memory with input 0");
}

#[test]
fn zeros_without_memory_share_none() {
    let zeros = |inputs: &[Tensor]| {
        let zeros = || Tensor::internal_efficientzerotensor([4, 6], (Kind::Double, inputs[0].device()));
        Ok([&inputs[0] * &inputs[1], zeros(), zeros()])
    };
    let (names, report) = broken(zeros, Device::Cpu, &defaults());
    assert!(names.is_empty(), "{report}");
}

#[test]
fn what_is_left_is_put_back() {
    let leaving = |inputs: &[Tensor]| {
        let output = &inputs[0] * &inputs[1];
        std::mem::forget(tch::no_grad_guard());
        Ok(output)
    };
    assert_breaks(leaving, &["state"], "the forward changed grad mode");
    assert!((leaf(&[1], Device::Cpu) * 2.0).requires_grad(), "for the caller all is as it was");
    let casting = |inputs: &[Tensor]| {
        std::mem::forget(Autocast::new(Device::Cpu, Kind::BFloat16)?);
        Ok(&inputs[0] * &inputs[1])
    };
    assert_breaks(casting, &["state"], "the forward changed autocast");
    assert_eq!(Autocast::kind(Device::Cpu), None, "for the caller all is as it was");
}

#[test]
fn whatever_the_caller_has_switched_on_or_off() {
    let check = || {
        let (names, report) = broken(product(value, gradient), Device::Cpu, &defaults());
        assert!(names.is_empty(), "{report}");
    };
    tch::no_grad(check);
    let leaf = |size: &[i64]| Tensor::randn(size, (Kind::Float, Device::Cpu)).set_requires_grad(true);
    let (x, w) = (leaf(&[4, 6]), leaf(&[6, 3]));
    let _autocast = Autocast::new(Device::Cpu, Kind::BFloat16).expect("autocast");
    let options = ConformanceOptions { tolerance: Some((0.05, 0.05)), ..defaults() };
    let product = |inputs: &[Tensor]| Ok(inputs[0].matmul(&inputs[1]));
    conformance(product, &[&x, &w], &options).expect("new threads have it, too");
}

#[test]
fn not_every_value_is_an_input_of_every_operator() {
    let square = (Tensor::randn([4, 4], (Kind::Double, Device::Cpu)) * 0.1
        + Tensor::eye(4, (Kind::Double, Device::Cpu)))
    .set_requires_grad(true);
    // Of equal rows there is no inverse.
    conformance(|inputs| Ok(Tensor::linalg_inv(&inputs[0])), &[&square], &defaults()).expect("an inverse");
    let positive = leaf(&[4, 6], Device::Cpu).detach().abs().f_add_scalar(0.1).expect("positive");
    let log = |inputs: &[Tensor]| {
        let lowest = inputs[0].detach().min().double_value(&[]);
        if lowest <= 0.0 {
            return Err(Error::msg(format!("{lowest} has no logarithm")));
        }
        Ok(inputs[0].log())
    };
    conformance(log, &[&positive.set_requires_grad(true)], &defaults()).expect("a logarithm");
}

#[test]
fn gradients_without_their_graph() {
    let cut = |_: &Context<'_>, [x, w]: [&Tensor; 2], grad: &Tensor| {
        let _no_grad = tch::no_grad_guard();
        Ok([grad * w, grad * x].into())
    };
    assert_breaks(product(value, cut), &["create_graph"], "a second derivative is 0.0");
}

#[test]
fn a_panic_is_an_error() {
    let x = leaf(&[4, 6], Device::Cpu);
    let error = conformance(|inputs| Ok(inputs[0].view([5, 5])), &[&x], &defaults()).expect_err("a shape");
    let error = error.to_string();
    assert!(error.contains("it panicked") && error.contains("shape '[5, 5]' is invalid"), "{error}");
    assert_eq!(error.lines().count(), 1, "{error}");
}

/// In place, as if the changed input were contiguous and had memory behind it.
fn scale_of_a_buffer(beside: bool) -> impl Fn(&[Tensor]) -> Result<Tensors> + Sync {
    move |inputs| {
        let (x, w) = (&inputs[0], &inputs[1]);
        let _no_grad = tch::no_grad_guard();
        if beside {
            let _ = x.detach().as_strided([25], [1], None).narrow(0, 24, 1).f_fill_(0.0)?;
        } else {
            let _ = taken_for_contiguous(&x.detach()).f_mul_(&w.detach())?;
        }
        drop(_no_grad);
        apply(Scale { tell: true }, &[Some(x), Some(w)])
    }
}

#[test]
fn changes_in_place_of_what_is_differentiated() {
    let declared = ConformanceOptions { changed_inputs: &[0], ..defaults() };
    let (x, w) = (leaf(&[4, 6], Device::Cpu), leaf(&[4, 6], Device::Cpu));
    let check =
        |beside| conformance(scale_of_a_buffer(beside), &[&x, &w], &declared).expect_err("wrong").to_string();
    let report = check(true);
    assert!(report.contains("inputs unchanged: the forward with grad mode off wrote to input 0"), "{report}");
    let report = check(false);
    assert!(report.contains("layouts: with inputs Transposed, output 0"), "{report}");
}

#[test]
fn a_view_of_the_last_element() {
    let last = |inputs: &[Tensor]| {
        let product = &inputs[0] * &inputs[1];
        Ok([inputs[0].narrow(0, 3, 1).narrow(1, 5, 1), product])
    };
    assert_breaks(last, &["no aliasing"], "output 0 shares memory with input 0");
}

#[test]
fn inputs_of_different_layouts() {
    let alike = |x: &Tensor, w: &Tensor| {
        let alike = x.is_contiguous() == w.is_contiguous();
        Ok(x * w * if alike { 1.0 } else { 2.0 })
    };
    assert_breaks(product(alike, gradient), &["layouts"], "with input 0 Transposed, output 0: element");
}

#[test]
fn what_depends_on_who_requires_grad() {
    // With grad mode on, and nothing to differentiate by.
    let idle = |inputs: &[Tensor]| {
        let output = &inputs[0] * &inputs[1];
        let grad_mode = (Tensor::from(1.0).set_requires_grad(true) * 1.0).requires_grad();
        Ok(if grad_mode && !output.requires_grad() { output * 2.0 } else { output })
    };
    assert_breaks(idle, &["no_grad"], "without inputs that require grad, output 0: element");
    let fewer = |absent: fn(Tensor) -> Vec<Option<Tensor>>| {
        move |inputs: &[Tensor]| {
            let output = &inputs[0] * &inputs[1];
            let graph = output.requires_grad();
            let more = if graph { vec![Some(output.detach().copy())] } else { absent(output.copy()) };
            Ok(std::iter::once(Some(output)).chain(more).collect::<Vec<_>>())
        }
    };
    assert_breaks(fewer(|_| Vec::new()), &["no_grad"], "with grad mode off: 1 outputs, expected 2");
    assert_breaks(fewer(|_| vec![None]), &["no_grad"], "output 1 is there in one run only");
    let second = |ctx: &Context<'_>, [x, w]: [&Tensor; 2], grad: &Tensor| {
        let wrong = if ctx.needs_input_grad(0) { 1.0 } else { 2.0 };
        Ok([grad * w, grad * x * wrong].into())
    };
    let says = "with gradients for inputs [1] only, the gradient of input 1: element";
    assert_breaks(product(value, second), &["needs_input_grad"], says);
    let cut = |inputs: &[Tensor]| {
        let alone = !inputs[1].requires_grad();
        Ok(if alone { inputs[0].detach() } else { inputs[0].shallow_clone() } * &inputs[1])
    };
    let says = "with gradients for inputs [0] only, the gradient of input 0: element";
    assert_breaks(cut, &["needs_input_grad"], says);
    let seven: Vec<Tensor> = (0..7).map(|_| leaf(&[2], Device::Cpu)).collect();
    let six = |inputs: &[Tensor]| {
        let count = inputs.iter().filter(|input| input.requires_grad()).count();
        Ok(inputs.iter().map(Tensor::exp).sum::<Tensor>() * if count == 6 { 2.0 } else { 1.0 })
    };
    let error = conformance(six, &seven.iter().collect::<Vec<_>>(), &defaults()).expect_err("six");
    assert!(error.to_string().contains("with gradients for inputs [1, 2, 3, 4, 5, 6] only"), "{error}");
}

#[test]
fn careless_second_derivatives_where_no_step_feeds_the_next() {
    let careless = |inputs: &[Tensor]| {
        let output = apply(Careless { detached: false }, &[Some(&inputs[0]), Some(&inputs[1])])?.single()?;
        Ok(output.sum_dim_intlist([1_i64].as_slice(), false, Kind::Double))
    };
    assert_breaks(careless, &["create_graph"], "with create_graph: element");
}

#[test]
fn a_write_beside_an_output_or_a_gradient() {
    fn beyond(tensor: Tensor) -> Tensor {
        assert_eq!((tensor.numel(), tensor.kind()), (24, Kind::Double));
        // SAFETY: of 192 bytes, glibc gives 200; nobody else knows.
        unsafe { tensor.data_ptr().cast::<f64>().add(24).write(0.5) };
        tensor
    }
    let forward = |x: &Tensor, w: &Tensor| Ok(beyond(x * w));
    let (names, report) = broken(product(forward, gradient), Device::Cpu, &defaults());
    assert_eq!(names, ["memory"], "{report}");
    assert!(report.contains("the forward without a graph wrote beside memory"), "{report}");
    let backward =
        |_: &Context<'_>, [x, w]: [&Tensor; 2], grad: &Tensor| Ok([beyond(grad * w), grad * x].into());
    let (names, report) = broken(product(value, backward), Device::Cpu, &defaults());
    assert_eq!(names, ["memory"], "{report}");
    assert!(report.contains("forward and backward wrote beside memory"), "{report}");
}
