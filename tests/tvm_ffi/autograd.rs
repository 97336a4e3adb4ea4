//! Gradients, and what autograd learns of a call.

use super::*;
use tch_extension::autograd::{
    Context, Function as AutogradFunction, GradOptions, Inputs, Saver, Tensors, apply, grad,
};
use tch_extension::ops::f_rms_norm;
use tch_extension::testing::{assert_close, gradcheck};
use tch_extension::tvm_ffi::WithBackward;

fn loss(y: &Tensor) -> Tensor {
    (y * floats(&[1.0, 10.0])).sum(Kind::Float)
}

#[test]
fn an_input_that_requires_grad_is_refused() {
    let add = function!("an_input_that_requires_grad_is_refused", "add_one");
    let (x, mut y) = (leaf(&[1.0, 2.0]), floats(&[0.0; 2]));
    let expected = ["it has no gradient", ".no_grad()", ".with_backward(f)"];
    refused(call(&add, args![&x, out(&mut y)]), &add, &expected);
    assert_eq!(y, floats(&[0.0; 2]));
    call(&add.no_grad(), args![&x, out(&mut y)]).unwrap();
    assert!(y == floats(&[2.0, 3.0]) && !y.requires_grad());
    let mut z = floats(&[0.0; 2]);
    tch::no_grad(|| call(&add, args![&x, out(&mut z)])).unwrap();
    assert_eq!(z, y);
    // A tensor that is written counts, too, and so do those in lists.
    let mut part_of_graph = &x * 1.0;
    refused(call(&add, args![&y, out(&mut part_of_graph)]), &add, &expected);
    let elements = function!("an_input_that_requires_grad_is_refused", "elements");
    refused(elements.call::<i64>(args![&[&x]]).map(drop), &elements, &expected);
}

#[test]
fn a_leaf_that_requires_grad_is_not_written() {
    let add = function!("a_leaf_that_requires_grad_is_not_written", "add_one");
    let (x, mut y) = (floats(&[1.0, 2.0]), leaf(&[0.0; 2]));
    let with_backward = add.with_backward(|_, _| Ok([None, None].into()));
    let outcome = with_backward.call::<()>(args![&x, out(&mut y)]);
    refused(outcome, &add, &["a leaf Variable that requires grad"]);
    assert_eq!(y.detach(), floats(&[0.0; 2]));
    call(&add.no_grad(), args![&x, out(&mut y)]).unwrap();
    assert!(y.detach() == floats(&[2.0, 3.0]) && y.requires_grad());
}

/// libtorch's graph knows no such change, and finds out only after the function has run.
#[test]
fn a_view_that_is_not_the_first_tensor_is_not_written() {
    let add = function!("a_view_that_is_not_the_first_tensor_is_not_written", "add_one");
    let with_backward =
        add.with_backward(|_, grads| Ok([Some(grads.get(0)?.shallow_clone()), None].into()));
    let all = floats(&[0.0; 4]);
    let outcome =
        with_backward.call::<()>(args![&leaf(&[1.0, 2.0]), out(&mut all.slice(0, 0, 2, 1))]);
    refused(
        outcome,
        &add,
        &["argument 1", "has to be the first input", "write to a new tensor and copy it"],
    );
    assert_eq!(all, floats(&[0.0; 4]));
    // Without a graph, there is no such limit.
    let x = floats(&[1.0, 2.0]);
    with_backward.call::<()>(args![&x, out(&mut all.slice(0, 0, 2, 1))]).unwrap();
    assert_eq!(all, floats(&[2.0, 3.0, 0.0, 0.0]));
}

/// A saved tensor that a function writes to is an error of the backward pass, and no wrong gradient.
#[test]
fn the_version_of_what_is_written_is_counted() {
    let add = function!("the_version_of_what_is_written_is_counted", "add_one");
    let (x, mut y) = (leaf(&[1.0, 2.0]), floats(&[3.0, 4.0]));
    let product = &x * &y;
    call(&add, args![&floats(&[5.0, 6.0]), out(&mut y)]).unwrap();
    let error = product.sum(Kind::Float).f_backward().expect_err("a changed tensor").to_string();
    assert!(error.contains("modified by an inplace operation"), "{error}");
    // The function fails, and may have written.
    let product = &x * &y;
    refused(call(&add, args![&floats(&[5.0]), out(&mut y)]), &add, &["1 elements, and y has 2"]);
    assert!(product.sum(Kind::Float).f_backward().is_err());
}

/// y = 2x, of which the module computes y = x + 1 for tensors that the caller makes.
fn doubled(add: &Function) -> WithBackward {
    add.with_backward(|ctx, grads| {
        assert_eq!(ctx.saved(1)?, ctx.saved(0)? + 1.0);
        assert!(ctx.argument::<i64>("x").unwrap_err().to_string().contains("no argument `x`"));
        Ok([Some(grads.get(0)? * 2.0), None].into())
    })
}

#[test]
fn a_backward_pass_of_ones_own() {
    let Some(module) = module("a_backward_pass_of_ones_own") else { return };
    let add = doubled(&module.function("add_one").unwrap());
    let x = leaf(&[1.0, 2.0]);
    let mut y = floats(&[0.0; 2]);
    add.call::<()>(args![&x, out(&mut y)]).unwrap();
    assert!(y.requires_grad() && y.detach() == floats(&[2.0, 3.0]));
    loss(&y).backward();
    assert_eq!(x.grad(), floats(&[2.0, 20.0]));
    // The same for a tensor that the function returns.
    let add = doubled(&module.function("add_one_alloc").unwrap());
    let x = leaf(&[1.0, 2.0]);
    loss(&add.call::<Tensor>(args![&x]).unwrap()).backward();
    assert_eq!(x.grad(), floats(&[2.0, 20.0]));
    // Nothing is marked as an output.
    let add = doubled(&module.function("add_one").unwrap());
    let (x, y) = (leaf(&[1.0, 2.0]), floats(&[0.0; 2]));
    refused(
        add.call::<()>(args![&x, &y]),
        &module.function("add_one").unwrap(),
        &["out(&mut tensor)"],
    );
    let add = doubled(&module.function("add_one_alloc").unwrap());
    // Without a graph it is a plain call.
    let y: Tensor = add.call(args![&x.detach()]).unwrap();
    assert!(!y.requires_grad());
}

/// `same` gives back its input, so its numerical gradient is known.
#[test]
fn a_right_backward_pass_passes_gradcheck() {
    let same = function!("a_right_backward_pass_passes_gradcheck", "nested");
    let same = same.with_backward(|_, grads| Ok(grads.get(0)?.shallow_clone().into()));
    let call = |inputs: &[Tensor]| {
        let (y, _): (Tensor, (i64, String)) = same.call(args![&(&inputs[0] * 1.0)])?;
        Ok(y.square())
    };
    let x = Tensor::from_slice(&[1.0, 2.0]).set_requires_grad(true);
    gradcheck(call, &[&x], &Default::default()).unwrap();
}

/// The recipe of docs/kernels-from-elsewhere.md.
#[test]
fn a_norm_of_others_with_the_backward_pass_of_ours() {
    let norm = function!("a_norm_of_others_with_the_backward_pass_of_ours", "rmsnorm");
    let norm = norm.with_backward(|ctx, grads| {
        let leaf = |tensor: Tensor| tensor.detach().set_requires_grad(true);
        let (x, weight) = (leaf(ctx.saved(1)?), leaf(ctx.saved(2)?));
        let y = tch::with_grad(|| f_rms_norm(&x, &weight.size(), Some(&weight), Some(1e-6)))?;
        let given = [Some(grads.get(0)?)];
        let options = GradOptions { grad_outputs: &given, ..Default::default() };
        let [x, weight] = grad(&[&y], &[&x, &weight], &options)?.exactly()?;
        Ok([None, Some(x), Some(weight)].into())
    });
    let call = |inputs: &[Tensor]| {
        let mut y = inputs[0].detach().empty_like();
        norm.call::<()>(args![out(&mut y), &inputs[0], &inputs[1], 1e-6, false])?;
        Ok(y)
    };
    let options = (Kind::Double, Device::Cpu);
    let x = Tensor::randn([3, 5], options).set_requires_grad(true);
    let weight = Tensor::randn([5], options).set_requires_grad(true);
    gradcheck(call, &[&x, &weight], &Default::default()).unwrap();
    let expected = f_rms_norm(&x, &[5], Some(&weight), Some(1e-6)).unwrap();
    assert_close(&call(&[x, weight]).unwrap(), &expected, 1e-12, 1e-12);
}

/// The page's function and its gradient.
#[test]
fn the_pages_own_function_has_its_gradient() {
    if module("the_pages_own_function_has_its_gradient").is_none() {
        return;
    }
    let page = std::fs::read_to_string(root().join("docs/kernels-from-elsewhere.md")).unwrap();
    let source = page.split_once("```cpp\n").and_then(|(_, rest)| rest.split_once("```"));
    let library = compile_text(source.expect("a block of C++").0, "libsoftcap.so", &[]);
    let softcap = Module::load(library).unwrap().function("softcap").unwrap();
    let softcap = softcap.with_backward(|ctx, grads| {
        let y = ctx.saved(1)? / 3.0;
        Ok([Some(grads.get(0)? * (1.0 - y.square())), None].into())
    });
    let call = |inputs: &[Tensor]| {
        let mut y = inputs[0].empty_like();
        softcap.call::<()>(args![&inputs[0], out(&mut y), 3.0])?;
        Ok(y)
    };
    let x = Tensor::randn([2, 3], (Kind::Double, Device::Cpu)).set_requires_grad(true);
    gradcheck(call, &[&x], &Default::default()).unwrap();
    assert_close(&call(&[x.shallow_clone()]).unwrap(), &((&x / 3.0).tanh() * 3.0), 1e-12, 1e-12);
}

/// A function of the module inside of an `autograd::Function`.
struct AddOne(Function);

impl AutogradFunction for AddOne {
    const NAME: &'static str = "add_one";

    fn forward(&mut self, _: &mut Saver<'_>, inputs: Inputs<'_>) -> Result<Tensors> {
        let x = inputs.get(0)?;
        let mut y = x.empty_like();
        self.0.call::<()>(args![x, out(&mut y)])?;
        Ok(y.into())
    }

    fn backward(&self, _: &Context<'_>, grads: &Tensors) -> Result<Tensors> {
        Ok(grads.get(0)?.shallow_clone().into())
    }
}

#[test]
fn inside_of_a_function_it_needs_no_choice() {
    let add = function!("inside_of_a_function_it_needs_no_choice", "add_one");
    let x = leaf(&[1.0, 2.0]);
    let y = apply(AddOne(add), &[Some(&x)]).unwrap().into_vec().remove(0).expect("an output");
    loss(&y).backward();
    assert_eq!(x.grad(), floats(&[1.0, 10.0]));
}
