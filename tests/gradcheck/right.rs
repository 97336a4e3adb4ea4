//! Tests that right gradients pass.

use super::*;

#[test]
fn right_functions_pass() -> Result<()> {
    let right = square(|x, grad| grad * x * 2.0);
    check(&right, &[&variable(&[5])])?;
    check(|inputs| Ok(&inputs[0] * &inputs[0]), &[&variable(&[2, 3])])?;
    check(|inputs| Ok(inputs[0].matmul(&inputs[1])), &[&variable(&[3, 4]), &variable(&[4, 2])])
}

#[test]
fn several_outputs_pass() -> Result<()> {
    check(powers(right_powers), &[&variable(&[4])])?;
    // Two outputs of different shapes; the second depends on one input only.
    let function =
        |inputs: &[Tensor]| Ok([inputs[0].matmul(&inputs[1]), inputs[0].sin().sum(Kind::Double)]);
    check(function, &[&variable(&[3, 2]), &variable(&[2, 1])])
}

#[test]
fn an_output_may_be_an_input_a_view_of_one_or_absent() -> Result<()> {
    check(|inputs| Ok(inputs[0].shallow_clone()), &[&variable(&[3])])?;
    check(
        |inputs| Ok([inputs[0].transpose(0, 1), inputs[0].narrow(0, 0, 1)]),
        &[&variable(&[2, 3])],
    )?;
    check(|inputs| Ok(vec![None, Some(inputs[0].exp())]), &[&variable(&[3])])?;
    check(|inputs| Ok(vec![Some(Tensor::new()), Some(inputs[0].exp())]), &[&variable(&[3])])
}

#[test]
fn any_layout_passes() -> Result<()> {
    let base = random(&[5, 6]);
    let views = [
        base.transpose(0, 1),
        base.slice(1, 1, 6, 2),
        base.narrow(0, 2, 3),
        base.slice(1, 1, 6, 2).transpose(0, 1).narrow(0, 1, 2),
        base.select(1, 3),
        base.select(1, 3).select(0, 2),
    ];
    for view in views {
        let view = view.detach().set_requires_grad(true);
        check(square(|x, grad| grad * x * 2.0), &[&view])?;
    }
    Ok(())
}

/// A kernel may choose its code path by strides and alignment, so gradcheck's copies must have
/// those of the caller's tensors.
#[test]
fn the_function_sees_the_callers_layout_and_never_the_callers_memory() -> Result<()> {
    let x = random(&[4, 6]).slice(1, 1, 6, 2).transpose(0, 1).detach().set_requires_grad(true);
    let index = Tensor::arange(8, (Kind::Int64, Device::Cpu)).narrow(0, 3, 3);
    let originals = [x.shallow_clone(), index.shallow_clone()];
    let alignment = |tensor: &Tensor| tensor.data_ptr() as usize % 64;
    let function = |inputs: &[Tensor]| {
        for (input, original) in inputs.iter().zip(&originals) {
            assert_eq!(input.stride(), original.stride());
            assert_eq!(input.size(), original.size());
            assert_eq!(input.requires_grad(), original.requires_grad());
            assert_eq!(alignment(input), alignment(original));
            assert_ne!(input.data_ptr(), original.data_ptr());
            assert!(input.is_leaf());
        }
        assert_eq!(inputs[1], index);
        Ok(&inputs[0] * &inputs[1].unsqueeze(1))
    };
    check(function, &[&x, &index])
}

#[test]
fn scalars_and_empty_tensors_pass() -> Result<()> {
    check(square(|x, grad| grad * x * 2.0), &[&variable(&[])])?;
    check(square(|x, grad| grad * x * 2.0), &[&variable(&[0])])?;
    check(|inputs| Ok(inputs[0].matmul(&inputs[1])), &[&variable(&[2, 0]), &variable(&[0, 3])])?;
    check(|inputs| Ok(inputs[0].narrow(0, 0, 0)), &[&variable(&[3])])
}

#[test]
fn a_wrong_gradient_of_a_scalar_is_found() {
    let text = refusal(check(square(|x, grad| grad * x), &[&variable(&[])]));
    assert_says(
        &text,
        &["row 0 (output element [])", "column 0 (input element [])", "1 of 1 entries is wrong"],
    );
}

#[test]
fn inputs_that_require_no_grad_may_be_of_any_kind_and_layout() -> Result<()> {
    let index = Tensor::from_slice(&[2_i64, 0, 2]);
    let scale = Tensor::from_slice(&[2_f32]).expand([3], false);
    let function = |inputs: &[Tensor]| Ok(inputs[1].index_select(0, &inputs[0]) * &inputs[2]);
    check(function, &[&index, &variable(&[3]), &scale])
}

#[test]
fn a_non_leaf_input_passes() -> Result<()> {
    check(|inputs| Ok(inputs[0].exp()), &[&(variable(&[3]) * 2.0)])
}

#[test]
fn the_same_input_twice_is_two_inputs() -> Result<()> {
    let x = variable(&[3]);
    check(|inputs| Ok(&inputs[0] * &inputs[1]), &[&x, &x])
}

#[test]
fn an_absent_gradient_is_zero() -> Result<()> {
    struct First;
    impl Function for First {
        const NAME: &'static str = "first";
        fn forward(&mut self, _: &mut Saver<'_>, inputs: Inputs<'_>) -> Result<Tensors> {
            Ok((inputs.get(0)? * 2.0).into())
        }
        fn backward(&self, _: &Context<'_>, grads: &Tensors) -> Result<Tensors> {
            Ok([Some(grads.get(0)? * 2.0), None].into())
        }
    }
    check(
        |inputs| apply(First, &[Some(&inputs[0]), Some(&inputs[1])]),
        &[&variable(&[3]), &variable(&[2])],
    )
}

#[test]
fn outputs_without_a_derivative_are_passed_over() -> Result<()> {
    let function =
        |inputs: &[Tensor]| Ok([inputs[0].argmax(0, false), inputs[0].exp(), inputs[0].detach()]);
    check(function, &[&variable(&[4])])
}

#[test]
fn a_second_derivative_passes() -> Result<()> {
    let first = |inputs: &[Tensor]| {
        let options = GradOptions {
            grad_outputs: &[Some(&inputs[1])],
            create_graph: true,
            ..Default::default()
        };
        grad(&[&(&inputs[0] * inputs[0].sin())], &[&inputs[0]], &options)
    };
    check(first, &[&variable(&[3]), &variable(&[3])])
}
