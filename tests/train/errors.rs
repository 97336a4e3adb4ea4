//! What is refused, and that a refusal leaves everything usable.

use super::*;

fn simple(
    device: Device,
    options: StepOptions,
) -> Result<(Tensor, impl FnMut(&Tensor, u8) -> Result<Tensor>)> {
    let weight = Tensor::ones([3], (Kind::Float, device)).set_requires_grad(true);
    let optimizer = AdamW::new(vec![weight.shallow_clone()]);
    let inner = weight.shallow_clone();
    let kind = std::rc::Rc::new(std::cell::Cell::new(0));
    let wanted = std::rc::Rc::clone(&kind);
    let mut step = Step::new(options, optimizer, move |batch: &[Tensor]| {
        let loss = (&inner * &batch[0]).f_sum(Kind::Float)?;
        match wanted.get() {
            0 => Ok(loss),
            1 => Ok(&inner * &batch[0]),
            2 => Ok(loss.detach()),
            3 => Ok(loss.to_kind(Kind::Int64)),
            4 => Ok(Tensor::new()),
            5 => Err(Error::msg("of the closure")),
            _ => panic!("on purpose"),
        }
    })?;
    Ok((weight, move |x: &Tensor, kind_of_call: u8| {
        kind.set(kind_of_call);
        step.step(&[x])
    }))
}

#[test]
fn options_out_of_range_are_refused() {
    let refused = |options, says| {
        refuses(
            simple(Device::Cpu, options).map(drop),
            &["train::Step::new: ", says, "expected 1 or more, got 0"],
        );
    };
    refused(StepOptions { warm_up: 0, ..Default::default() }, "warm_up");
    refused(StepOptions { accumulate: 0, ..Default::default() }, "accumulate");
    let none = Step::new(options(true), Parameterless, |_: &[Tensor]| Ok(Tensor::new()));
    refuses(none, &["train::Step::new: optimizer: expected at least one parameter, got none"]);
}

struct Parameterless;

impl Optimizer for Parameterless {
    fn parameters(&self) -> Vec<Tensor> {
        Vec::new()
    }

    fn step(&mut self) -> Result<()> {
        Ok(())
    }
}

#[test]
fn a_loss_that_cannot_be_differentiated_is_refused() {
    let _serial = serially();
    for device in devices() {
        let (weight, mut step) = simple(device, options(true)).expect("a step");
        let before = kept(&weight);
        let x = Tensor::ones([3], (Kind::Float, device));
        let op = "train::Step::step";
        refuses(step(&x, 1), &[op, "loss: expected one element, got shape [3]"]);
        refuses(step(&x, 2), &[op, "loss: expected a loss that requires grad"]);
        refuses(step(&x, 3), &[op, "loss: expected kind Float or Double", "got Int64"]);
        refuses(step(&x, 4), &[op, "loss"]);
        refuses(step(&x, 5), &["of the closure"]);
        assert!(catch_unwind(AssertUnwindSafe(|| step(&x, 6))).is_err());
        let off = tch::no_grad_guard();
        refuses(step(&x, 0), &[op, "is grad mode off"]);
        drop(off);
        same_bits(&[weight.shallow_clone()], &[before.shallow_clone()]);
        let _ = step(&x, 0).expect("a loss");
        assert!(!kept(&weight).equal(&before));
    }
}

#[test]
fn a_batch_that_cannot_be_read_is_refused() {
    let _serial = serially();
    let (_, mut step) = simple(Device::Cpu, options(true)).expect("a step");
    let op = "train::Step::step";
    refuses(step(&Tensor::new(), 0), &[op, "tensor 0 of the batch"]);
    let sparse = Tensor::ones([3], (Kind::Float, Device::Cpu)).to_sparse(None, None::<i64>, None);
    refuses(step(&sparse, 0), &[op, "tensor 0 of the batch: expected a dense tensor"]);
    if let Some(device) = devices().into_iter().find(|device| *device != Device::Cpu) {
        let says =
            ["tensor 0 of the batch: expected a tensor on the CPU, as the parameters", "Cuda(0)"];
        refuses(step(&Tensor::ones([3], (Kind::Float, device)), 0), &says);
    }
}

#[test]
fn a_step_that_fails_in_the_middle_begins_anew() {
    let _serial = serially();
    for device in devices() {
        let run = |fails: &[u8]| {
            let options = StepOptions { accumulate: 2, warm_up: 1, ..Default::default() };
            let (weight, mut step) = simple(device, options).expect("a step");
            for kind in fails {
                let x = Tensor::from_slice(&[1.0_f32, 2.0, 3.0]).to_device(device);
                let outcome = catch_unwind(AssertUnwindSafe(|| step(&x, *kind)));
                assert_eq!(outcome.is_ok_and(|result| result.is_ok()), *kind == 0);
            }
            kept(&weight)
        };
        let expected = run(&[0; 8]);
        same_bits(&[run(&[0, 5, 0, 0, 0, 6, 0, 0, 0, 0, 0, 0])], &[expected]);
    }
}
