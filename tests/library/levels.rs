//! Tests of derivatives by torch.func, which has levels, of operators that are defined in Rust.

use super::*;
use std::sync::atomic::{AtomicUsize, Ordering};
use tch_extension::autograd::{
    Context, Function, GradOptions, Inputs, Saver, Tensors, apply, grad,
};
use tch_extension::view::view_flat;
use tch_extension::{Error, library};

fn by_levels(name: &str) -> Operator {
    compiled::callers();
    Operator::find(&format!("tch_levels::{name}")).expect(name)
}

/// The square of its input, by an operator that calls itself below autograd.
struct Square<const DIFFERENTIABLE: bool>;

impl<const DIFFERENTIABLE: bool> Function for Square<DIFFERENTIABLE> {
    const NAME: &'static str = "square";
    const DOUBLE_BACKWARD: bool = DIFFERENTIABLE;

    fn forward(&mut self, saver: &mut Saver<'_>, inputs: Inputs<'_>) -> Result<Tensors> {
        let x = inputs.get(0)?;
        saver.save(x);
        let name = if DIFFERENTIABLE { "tch_squares::differentiable" } else { "tch_squares::once" };
        let y: Tensor = library::below_autograd(|| Operator::find(name)?.call(args![x]))?;
        Ok(y.into())
    }

    fn backward(&self, ctx: &Context<'_>, grads: &Tensors) -> Result<Tensors> {
        assert_eq!(ctx.create_graph(), DIFFERENTIABLE);
        Ok((grads.get(0)? * ctx.saved(0)? * 2.0).into())
    }
}

/// The square of its input, with operations of tch in the forward pass, and an intermediate saved.
struct Direct;

impl Function for Direct {
    const NAME: &'static str = "direct";

    fn forward(&mut self, saver: &mut Saver<'_>, inputs: Inputs<'_>) -> Result<Tensors> {
        let x = inputs.get(0)?;
        saver.save(&(x * 2.0));
        Ok((x * x).into())
    }

    fn backward(&self, ctx: &Context<'_>, grads: &Tensors) -> Result<Tensors> {
        Ok((grads.get(0)? * ctx.saved(0)?).into())
    }
}

fn tensor(arguments: &[Output]) -> Result<&Tensor> {
    match arguments {
        [Output::Tensor(x)] => Ok(x),
        _ => Err(Error::msg("one tensor")),
    }
}

fn defined(name: &str, kernels: [(&str, library::Kernel); 2]) -> String {
    library::define("tch_squares", &format!("{name}(Tensor x) -> Tensor")).expect(name);
    for (key, kernel) in kernels {
        library::implement("tch_squares", name, key, kernel).expect(name);
    }
    format!("tch_squares::{name}")
}

fn squares() -> [String; 3] {
    let cpu: library::Kernel = |arguments| Ok(vec![Output::Tensor(tensor(arguments)?.f_square()?)]);
    let once: library::Kernel = |arguments| {
        let y = apply(Square::<false>, &[Some(tensor(arguments)?)])?.single()?;
        Ok(vec![Output::Tensor(y)])
    };
    let differentiable: library::Kernel = |arguments| {
        let y = apply(Square::<true>, &[Some(tensor(arguments)?)])?.single()?;
        Ok(vec![Output::Tensor(y)])
    };
    let direct: library::Kernel = |arguments| {
        let y = apply(Direct, &[Some(tensor(arguments)?)])?.single()?;
        Ok(vec![Output::Tensor(y)])
    };
    [
        defined("once", [("CPU", cpu), ("Autograd", once)]),
        defined("differentiable", [("CPU", cpu), ("Autograd", differentiable)]),
        defined("direct", [("CPU", cpu), ("Autograd", direct)]),
    ]
}

#[test]
fn derivatives_are_right_at_every_level() {
    // The loss is the sum of x³.
    let x = doubles(&[1.0, 2.0]);
    for name in squares() {
        let derivative = |of: &str| -> Tensor {
            by_levels(of)
                .call(args![name.as_str(), &x])
                .unwrap_or_else(|e| panic!("{name}: {of}: {e}"))
        };
        assert_eq!(derivative("second"), doubles(&[6.0, 12.0]), "{name}");
        assert_eq!(derivative("second_outside"), doubles(&[6.0, 12.0]), "{name}");
        assert_eq!(derivative("third"), doubles(&[6.0, 6.0]), "{name}");
    }
}

#[test]
fn below_autograd_there_is_no_graph() {
    let x = leaf(&[3.0]);
    let y = library::below_autograd(|| apply(Direct, &[Some(&x)])).and_then(Tensors::single);
    assert!(!y.expect("a forward").requires_grad());
    assert!(apply(Direct, &[Some(&x)]).and_then(Tensors::single).expect("one").requires_grad());
}

/// Twice its input. The backward pass reads the memory of its gradient, and counts itself.
struct Twice;

static PASSES: AtomicUsize = AtomicUsize::new(0);

impl Function for Twice {
    const NAME: &'static str = "twice";

    fn forward(&mut self, saver: &mut Saver<'_>, inputs: Inputs<'_>) -> Result<Tensors> {
        let x = inputs.get(0)?;
        saver.save(x);
        Ok((x * 2.0).into())
    }

    fn backward(&self, ctx: &Context<'_>, grads: &Tensors) -> Result<Tensors> {
        PASSES.fetch_add(1, Ordering::Relaxed);
        assert!(!ctx.is_last_backward(), "another element needs what was saved");
        assert_eq!(ctx.saved(0)?.size(), [2]);
        let grad = view_flat::<f64>(grads.get(0)?)?;
        let twice: Vec<f64> = grad.iter().map(|grad| grad * 2.0).collect();
        Ok(doubles(&twice).into())
    }
}

#[test]
fn gradients_of_a_batch_are_computed_one_by_one() {
    let x = leaf(&[1.0, 2.0]);
    let y = apply(Twice, &[Some(&x)]).and_then(Tensors::single).expect("a forward");
    let batch = Tensor::arange(12, (tch::Kind::Double, tch::Device::Cpu)).view([2, 3, 2]);
    // As torch.autograd.grad(is_grads_batched=True) makes them, of one vmap and of two.
    let add = Operator::find("aten::_add_batch_dim").expect("an operator");
    let remove = Operator::find("aten::_remove_batch_dim").expect("an operator");
    let gradient = |of: &Tensor| {
        let options = GradOptions { grad_outputs: &[Some(of)], ..Default::default() };
        let options = GradOptions { retain_graph: Some(true), ..options };
        grad(&[&y], &[&x], &options).and_then(Tensors::single)
    };
    let of: Tensor = add.call(args![&batch.get(0), 0, 1]).expect("a batch");
    let found = gradient(&of).expect("a batch of gradients");
    let found: Tensor = remove.call(args![&found, 1, 3, 0]).expect("a tensor");
    assert_eq!(found, batch.get(0) * 2.0);
    assert_eq!(PASSES.load(Ordering::Relaxed), 3);
    let of: Tensor = add.call(args![&batch, 0, 1]).expect("a batch");
    let of: Tensor = add.call(args![&of, 0, 2]).expect("a batch of batches");
    let found = gradient(&of).expect("a batch of gradients");
    let found: Tensor = remove.call(args![&found, 2, 3, 0]).expect("a tensor");
    let found: Tensor = remove.call(args![&found, 1, 2, 0]).expect("a tensor");
    assert_eq!(found, batch * 2.0);
    let none = Tensor::zeros([0, 2], (tch::Kind::Double, tch::Device::Cpu));
    let of: Tensor = add.call(args![&none, 0, 1]).expect("an empty batch");
    let error = gradient(&of).expect_err("no element").to_string();
    assert!(
        error.contains("twice: backward: expected a batch of gradients, got one of size 0"),
        "{error}"
    );
}
