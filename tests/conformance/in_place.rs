//! Tests of operators that change their inputs.

use super::*;

/// In place: x := x·w. `tell` says whether libtorch is told of the change.
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
        // This writes like a kernel, without libtorch noticing.
        let values = (x * w).contiguous();
        let (to, from) = (x.data_ptr().cast::<f64>(), values.data_ptr().cast::<f64>());
        // SAFETY: the test passes contiguous tensors of kind Double on the CPU, and both have the
        // same number of elements.
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
    let scale =
        |inputs: &[Tensor]| apply(Scale { tell: true }, &[Some(&inputs[0]), Some(&inputs[1])]);
    let declared = ConformanceOptions { changed_inputs: &[0], ..defaults() };
    let beyond = ConformanceOptions { changed_inputs: &[0, 2], ..defaults() };
    for device in devices() {
        // The changed input is first a constant and then requires grad.
        for x in [leaf(&[4, 6], device).detach(), leaf(&[4, 6], device)] {
            let w = leaf(&[4, 6], device);
            conformance(scale, &[&x, &w], &declared).expect("declared");
            let error = conformance(scale, &[&x, &w], &beyond).expect_err("two inputs").to_string();
            assert!(error.contains("names input 2, but there is no such input"), "{error}");
        }
        let (x, w) = (leaf(&[4, 6], device).detach(), leaf(&[4, 6], device));
        let error = conformance(scale, &[&x, &w], &defaults()).expect_err("undeclared").to_string();
        assert!(error.contains("inputs unchanged: the forward wrote to input 0"), "{error}");
        assert!(error.contains("no aliasing: output 0 shares memory with input 0"), "{error}");
    }
    let silent =
        |inputs: &[Tensor]| apply(Scale { tell: false }, &[Some(&inputs[0]), Some(&inputs[1])]);
    let (x, w) = (leaf(&[4, 6], Device::Cpu).detach(), leaf(&[4, 6], Device::Cpu));
    let error =
        conformance(silent, &[&x, &w], &declared).expect_err("libtorch is not told").to_string();
    assert!(error.contains("its version was not: is mark_dirty missing?"), "{error}");
}

/// Changes its input in place, but wrongly assumes that it is contiguous or, if `beside`, that the
/// memory after it may be written.
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
    let check = |beside| {
        conformance(scale_of_a_buffer(beside), &[&x, &w], &declared).expect_err("wrong").to_string()
    };
    let report = check(true);
    assert!(
        report.contains("inputs unchanged: the forward with grad mode off wrote to input 0"),
        "{report}"
    );
    let report = check(false);
    assert!(report.contains("layouts: with inputs Transposed, output 0"), "{report}");
}
