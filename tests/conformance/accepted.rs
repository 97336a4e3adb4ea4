//! Tests that operators that keep the rules are accepted, with all kinds of inputs and callers.

use super::*;

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
    // Absent and undefined outputs, and an output that has no derivative.
    check(&|inputs| Ok(vec![None, Some(&inputs[0] * &inputs[1]), Some(Tensor::new())].into()));
    check(&|inputs| Ok([inputs[0].gt_tensor(&inputs[1]), inputs[0].exp()].into()));
    // Only one of the inputs has a derivative.
    check(&|inputs| Ok((&inputs[0] * inputs[1].detach()).into()));
    // An operator whose second derivative is an error and not a wrong number.
    check(&|inputs| apply(Once, &[Some(&inputs[0])]));
    check(&|inputs| {
        let run = |inputs: &[Option<Tensor>]| match inputs {
            [Some(x), Some(w)] => Ok((x * w).sin().into()),
            _ => unreachable!("two inputs"),
        };
        checkpoint(run, &[Some(&inputs[0]), Some(&inputs[1])])
    });
}

#[test]
fn complex_numbers() {
    let conjugated = |_: &Context<'_>, [x, w]: [&Tensor; 2], grad: &Tensor| {
        Ok([grad * w.conj(), grad * x.conj()].into())
    };
    let in_rows = |x: &Tensor, w: &Tensor| Ok(taken_for_contiguous(x) * w);
    for device in devices() {
        for kind in [Kind::ComplexFloat, Kind::ComplexDouble] {
            let leaf = || Tensor::randn([4, 6], (kind, device)).set_requires_grad(true);
            let inputs = [leaf(), leaf()];
            let inputs = [&inputs[0], &inputs[1]];
            conformance(product(value, conjugated), &inputs, &defaults()).unwrap();
            let wrong = conformance(product(in_rows, conjugated), &inputs, &defaults());
            let report = wrong.expect_err("strides are ignored").to_string();
            assert!(report.contains("layouts: with inputs Transposed, output 0: "), "{report}");
            let real = |inputs: &[Tensor]| Ok((&inputs[0] * &inputs[1]).abs());
            conformance(real, &inputs, &defaults()).unwrap();
        }
        // Real inputs of complex numbers have second derivatives.
        let square = |inputs: &[Tensor]| Ok(Tensor::complex(&inputs[0], &inputs[1]).square());
        let (names, report) = broken(square, device, &defaults());
        assert!(names.is_empty(), "{report}");
    }
}

/// sin, which has no second derivative.
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

/// Over several chained steps, the values or gradients of these operators exceed the range of a
/// double.
#[test]
fn operators_that_grow_fast() {
    for device in devices() {
        let x = Tensor::full([4, 6], 1.879, (Kind::Double, device)).set_requires_grad(true);
        conformance(|inputs| Ok(inputs[0].exp()), &[&x], &defaults()).expect("exp");
    }
}

#[test]
fn inputs_of_any_kind_and_size() {
    for device in devices() {
        let options = (Kind::Float, device);
        let table = Tensor::randn([5, 3], options).set_requires_grad(true);
        let index = Tensor::from_slice(&[4_i64, 0, 4, 2]).to_device(device);
        conformance(
            |inputs| Ok(inputs[0].index_select(0, &inputs[1])),
            &[&table, &index],
            &defaults(),
        )
        .expect("an integer input");
        for kind in [Kind::Half, Kind::BFloat16, Kind::Float] {
            let x = Tensor::randn([3, 8], (kind, device)).set_requires_grad(true);
            conformance(|inputs| Ok(inputs[0].relu() * 2.0), &[&x], &defaults())
                .expect("a smaller kind");
        }
        for size in [&[0, 3][..], &[], &[1], &[2, 3, 4]] {
            let x = Tensor::randn(size, options).set_requires_grad(true);
            conformance(|inputs| Ok(inputs[0].sigmoid()), &[&x], &defaults()).expect("any size");
        }
        let rows = leaf(&[1, 6], device).detach().expand([4, 6], false).set_requires_grad(true);
        conformance(|inputs| Ok(inputs[0].exp()), &[&rows], &defaults())
            .expect("elements in one place");
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
fn errors_of_the_operator_itself() {
    let x = leaf(&[4, 6], Device::Cpu);
    let error = conformance(|inputs| Ok(inputs[0].f_view([5, 5])?), &[&x], &defaults())
        .expect_err("a shape");
    assert!(error.to_string().contains("shape '[5, 5]' is invalid"), "{error}");
    let error = conformance(|inputs| Ok(&inputs[0] + 1), &[&Tensor::new()], &defaults())
        .expect_err("undefined");
    assert!(error.to_string().starts_with("conformance: inputs[0]: expected a tensor"), "{error}");
}

#[test]
fn a_panic_is_an_error() {
    let x = leaf(&[4, 6], Device::Cpu);
    let error =
        conformance(|inputs| Ok(inputs[0].view([5, 5])), &[&x], &defaults()).expect_err("a shape");
    let error = error.to_string();
    assert!(
        error.contains("it panicked") && error.contains("shape '[5, 5]' is invalid"),
        "{error}"
    );
    assert_eq!(error.lines().count(), 1, "{error}");
}

#[test]
fn zeros_without_memory_share_none() {
    let zeros = |inputs: &[Tensor]| {
        let zeros =
            || Tensor::internal_efficientzerotensor([4, 6], (Kind::Double, inputs[0].device()));
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
    let leaf =
        |size: &[i64]| Tensor::randn(size, (Kind::Float, Device::Cpu)).set_requires_grad(true);
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
    // The suite also tries expanded inputs. Their rows are equal, and such a matrix has no inverse.
    conformance(|inputs| Ok(Tensor::linalg_inv(&inputs[0])), &[&square], &defaults())
        .expect("an inverse");
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
    assert_breaks(
        product(alike, gradient),
        &["layouts"],
        "with input 0 Transposed, output 0: element",
    );
}
