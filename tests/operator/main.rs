//! Tests of operators that are one definition.

mod prove;
#[path = "../support/unit_rows.rs"]
mod unit_rows;

use tch::{Device, Kind, Tensor};
use tch_extension::amp::{Autocast, CastPolicy};
use tch_extension::library::{NONE, Operator as Registered, registration_error};
use tch_extension::operator::*;
use tch_extension::testing::{conformance, gradcheck, gradgradcheck};
use tch_extension::{Error, Result, args};
use unit_rows::{UnitRows, UnitRowsIn, UnitRowsOut};

tch_extension::register! { namespace one_definition; UnitRows, Broken }

const DOUBLE: (Kind, Device) = (Kind::Double, Device::Cpu);

fn arguments() -> [Tensor; 3] {
    let [x, weight] = [&[3, 4][..], &[4]].map(|size| Tensor::rand(size, DOUBLE) + 0.5);
    [x.set_requires_grad(true), weight.set_requires_grad(true), Tensor::rand([3], DOUBLE)]
}

fn unit_rows(inputs: &[Tensor]) -> Result<[Tensor; 2]> {
    let [x, weight, mask] = inputs else { return Err(Error::msg("three inputs")) };
    let of = UnitRowsIn { x, weight: Some(weight), mask };
    let UnitRowsOut { y, norm } = call(UnitRows { scale: 2.0 }, &of)?;
    Ok([y, norm])
}

#[test]
fn values_and_gradients_are_right() {
    let [x, weight, mask] = arguments();
    let inputs = [&x, &weight, &mask];
    let norm = x.square().sum_dim_intlist([1].as_slice(), false, Kind::Double).sqrt();
    let expected = &x / norm.unsqueeze(1) * &weight * mask.unsqueeze(1) * 2.0;
    let [y, found] = unit_rows(&inputs.map(Tensor::shallow_clone)).expect("a result");
    assert!(y.allclose(&expected, 1e-12, 0.0, false) && found.allclose(&norm, 1e-12, 0.0, false));
    gradcheck(unit_rows, &inputs, &Default::default()).expect("right gradients");
    gradgradcheck(unit_rows, &inputs, &Default::default()).expect("right second derivatives");
    conformance(unit_rows, &inputs, &Default::default()).expect("a good citizen");
}

#[test]
fn registered_parts_agree_with_the_node() {
    registration_error().expect("registered");
    let [x, weight, mask] = arguments();
    let find = |name: &str| Registered::find(&format!("one_definition::{name}")).expect(name);
    let values = args![&x, &weight, &mask, 2.0];
    let [y, norm] = unit_rows(&[&x, &weight, &mask].map(Tensor::shallow_clone)).expect("a result");
    let (own, _): (Tensor, Tensor) = find("unit_rows").call(values).expect("registered");
    assert_eq!(own, y);
    let (grad_y, grad_norm) = (y.detach().sin(), norm.detach().cos());
    let loss = (&y * &grad_y).sum(Kind::Double) + (&norm * &grad_norm).sum(Kind::Double);
    let expected = Tensor::run_backward(&[loss], &[&x, &weight], false, false);
    tch::no_grad(|| {
        let forward = find("unit_rows_forward");
        let (kept_y, kept_norm, rows): (Tensor, Tensor, Tensor) =
            forward.call(args![&x, &weight, &mask, 2.0, 0b11]).expect("a forward pass");
        assert_eq!((&kept_y, &kept_norm), (&y.detach(), &norm.detach()));
        let backward = find("unit_rows_backward");
        let gradients = |rows: &Tensor, needs: i64| -> Result<(Tensor, Tensor)> {
            let (x, weight, mask) = (&x, &weight, &mask);
            backward.call(args![&grad_y, &grad_norm, &norm, rows, x, weight, mask, 2.0, needs])
        };
        let (of_x, of_weight) = gradients(&rows, 0b11).expect("gradients");
        assert!(of_x.allclose(&expected[0], 1e-12, 1e-12, false));
        assert!(of_weight.allclose(&expected[1], 1e-12, 1e-12, false));
        // Nothing depends on y: its part of the gradients is zero.
        let values = args![NONE, &grad_norm, &norm, &rows, &x, &weight, &mask, 2.0, 0b11];
        let (_, of_weight): (Tensor, Tensor) = backward.call(values).expect("gradients");
        assert_eq!(of_weight, weight.zeros_like());
        // Kernels read by address, so nothing of another size or kind reaches them.
        for (wrong, words) in [
            (
                rows.narrow(0, 0, 2),
                "kept_rows: expected torch.float64 cpu [3, 4], got torch.float64 cpu [2, 4]",
            ),
            (
                rows.to_kind(Kind::Float),
                "kept_rows: expected torch.float64 cpu [3, 4], got torch.float32 cpu [3, 4]",
            ),
        ] {
            let error = gradients(&wrong, 0b11).expect_err(words).to_string();
            assert!(error.contains(words), "{error}");
        }
        let short = grad_y.narrow(0, 0, 2);
        let values = args![&short, &grad_norm, &norm, &rows, &x, &weight, &mask, 2.0, 0b11];
        let error = backward.call::<(Tensor, Tensor)>(values).expect_err("it is short").to_string();
        assert!(
            error.contains(
                "grad_y: expected torch.float64 cpu [3, 4], got torch.float64 cpu [2, 4]"
            ),
            "{error}"
        );
        // What is not needed is empty, and what was not kept is absent.
        assert_eq!(gradients(&rows, 0b10).expect("gradients").0.size(), [0]);
        let (_, _, absent): (Tensor, Tensor, Tensor) =
            forward.call(args![&x, &weight, &mask, 2.0, 0]).expect("a forward pass");
        let error = gradients(&absent, 0b11).expect_err("nothing was kept").to_string();
        assert!(error.contains("what was kept is gone"), "{error}");
    });
}

#[test]
fn a_tensor_without_a_gradient_makes_no_graph() {
    let [x, weight, mask] = arguments();
    let mask = mask.set_requires_grad(true);
    let [y, _] = unit_rows(&[x.detach(), weight.detach(), mask.shallow_clone()]).expect("a result");
    assert!(!y.requires_grad());
    let [y, norm] = unit_rows(&[&x, &weight, &mask].map(Tensor::shallow_clone)).expect("a result");
    let wanted = [&x, &weight];
    let first = Tensor::run_backward(&[y.sum(Kind::Double)], &wanted, true, true);
    assert!(first.iter().all(Tensor::defined));
    // Nothing depends on y.
    let found = Tensor::run_backward(&[norm.sum(Kind::Double)], &[&x], false, false).remove(0);
    assert!(found.allclose(&(&x / norm.unsqueeze(1)).detach(), 1e-12, 0.0, false));
    let registered = Registered::find("one_definition::unit_rows").expect("it is registered");
    let constant = x.detach();
    let values = args![&constant, NONE, &mask, 2.0];
    let (y, _): (Tensor, Tensor) = registered.call(values).expect("a result");
    assert!(!y.requires_grad());
}

#[test]
fn results_of_registered_parts_are_new_and_contiguous() {
    let backward = Registered::find("one_definition::broken_backward").expect("it is registered");
    let (x, grad) = (Tensor::ones([2, 3], DOUBLE), Tensor::ones([3, 2], DOUBLE).tr());
    let found: Tensor = backward.call(args![&grad, &x, 6, 1]).expect("a gradient");
    assert!(found.is_contiguous() && found == grad);
    let grad = grad.contiguous();
    let found: Tensor = backward.call(args![&grad, &x, 6, 1]).expect("a gradient");
    assert!(found.data_ptr() != grad.data_ptr() && found == grad);
    let own = Registered::find("one_definition::broken").expect("it is registered");
    let y: Tensor = own.call(args![&x.tr()]).expect("a result");
    assert!(y.is_contiguous() && y == x.tr() * 2.0);
}

#[test]
fn schemas_follow_from_the_definition() {
    let schema = |name: &str| {
        let operator = Registered::find(&format!("one_definition::{name}")).expect(name);
        operator.schema().to_string()
    };
    assert_eq!(
        schema("unit_rows"),
        "one_definition::unit_rows(Tensor x, Tensor? weight, Tensor mask, float scale=1.) -> (Tensor, Tensor)"
    );
    assert_eq!(
        schema("unit_rows_backward"),
        "one_definition::unit_rows_backward(Tensor? grad_y, Tensor? grad_norm, Tensor? kept_norm, Tensor? kept_rows, \
         Tensor x, Tensor? weight, Tensor mask, float scale, int needs) -> (Tensor, Tensor)"
    );
    // It keeps nothing, so its backward pass needs no other forward pass.
    assert_eq!(schema("broken"), "one_definition::broken(Tensor x, int how=0) -> Tensor");
    assert!(Registered::find("one_definition::broken_forward").is_err());
}

#[test]
fn a_wrong_argument_is_named() {
    let [x, weight, mask] = arguments();
    let refused = |inputs: [&Tensor; 3], expected: &str| {
        let error = unit_rows(&inputs.map(Tensor::shallow_clone)).expect_err(expected).to_string();
        assert!(error.contains(expected) && !error.contains('\n'), "{error}");
    };
    refused([&x, &mask, &mask], "unit_rows: weight: expected shape [D] = [4], got [3]");
    refused(
        [&x.to_kind(Kind::Half), &weight, &mask],
        "unit_rows: x: expected kind Float or Double",
    );
    refused(
        [&x, &weight.to_kind(Kind::Float), &mask],
        "unit_rows: weight: expected kind Double, as x",
    );
    refused(
        [&x, &weight, &Tensor::new()],
        "unit_rows: mask: expected a tensor, got an undefined one",
    );
    refused(
        [&x.unsqueeze(0), &weight, &mask],
        "x: expected 2 dimensions [N, D], got shape [1, 3, 4]",
    );
}

tch_extension::signature! {
    /// An operator with faults.
    Broken: BrokenIn -> BrokenOut = "broken"(x, how: i64 = 0) -> (y)
}

impl Operator for Broken {
    type Kept = ();
    type Plan = ();

    const AUTOCAST: [Option<CastPolicy>; 2] = [Some(CastPolicy::LowerPrecision), None];

    fn plan(&self, _: &Args<'_, Self>, _: &Needs<Self>) -> Result<()> {
        if self.how == 1 { Err(Error::msg("broken: it has no plan")) } else { Ok(()) }
    }

    fn rule<D: Dim>(&self, of: &Metas<Self, D>, _: &Needs<Self>) -> Result<Made<Self, Meta<D>>> {
        assert!(self.how != 2, "its rule panics");
        Ok(Made::only(BrokenOut { y: of.x.sized(of.x.sizes()) }))
    }

    fn forward(&self, call: &Call<'_, Self>) -> Result<Made<Self, Tensor>> {
        call.check()?;
        Ok(Made::only(BrokenOut { y: call.of.x * 2.0 }))
    }

    fn backward(&self, grads: Incoming<Self>, again: Again<'_, Self>) -> Result<Gradients<Self>> {
        match self.how {
            7 if again.may_overwrite()? => Err(Error::msg("it fails after it has written")),
            3 => Err(Error::msg("its backward pass fails")),
            4 => panic!("its backward pass panics"),
            6 => Ok(BrokenIn { x: grads.y }),
            5 => Ok(BrokenIn { x: grads.y.map(|grad| grad.unsqueeze(0).repeat([2, 1])) }),
            _ => Ok(BrokenIn { x: grads.y.map(|grad| grad * 2.0) }),
        }
    }

    fn reference(&self, of: &Args<'_, Self>) -> Result<Outputs<Self>> {
        Ok(BrokenOut { y: of.x * 2.0 })
    }
}

#[test]
fn faults_are_errors() {
    let x = Tensor::from_slice(&[1.0, 2.0]).set_requires_grad(true);
    let broken = |how: i64| call(Broken { how }, &BrokenIn { x: &x });
    assert_eq!(broken(0).expect("a result").y.detach(), x.detach() * 2.0);
    assert_eq!(broken(1).expect_err("no plan").to_string(), "broken: it has no plan");
    assert!(
        std::panic::catch_unwind(|| call(Broken { how: 2 }, &BrokenIn { x: &Tensor::from(1.0) }))
            .is_err()
    );
    let registered = Registered::find("one_definition::broken").expect("it is registered");
    let error = registered.call::<Tensor>(args![&x, 2]).expect_err("it panics").to_string();
    assert!(error.contains("its kernel panicked: its rule panics"), "{error}");
    for (how, words) in
        [(3, "broken: its backward pass fails"), (4, "its backward pass panics"), (5, "broken")]
    {
        let y = broken(how).expect("a result").y;
        let error = Tensor::f_run_backward(&[&y.sum(Kind::Double)], &[&x], false, false);
        let error = error.expect_err(words).to_string();
        assert!(error.contains(words), "{error}");
    }
    // Neither grad mode nor autocast was left off.
    assert!(broken(0).expect("a result").y.requires_grad());
}

#[test]
fn what_a_failed_backward_pass_may_have_overwritten_is_not_read_again() {
    let x = Tensor::from_slice(&[1.0, 2.0]).set_requires_grad(true);
    let y = call(Broken { how: 7 }, &BrokenIn { x: &x }).expect("a result").y;
    let loss = y.sum(Kind::Double);
    let run = |keeps_graph| Tensor::f_run_backward(&[&loss], &[&x], keeps_graph, false);
    for _ in 0..2 {
        assert_eq!(run(true).expect("gradients")[0], Tensor::from_slice(&[2.0, 2.0]));
    }
    for (keeps_graph, words) in [
        (false, "it fails after it has written"),
        (true, "run the forward pass again"),
        (false, "run the forward pass again"),
    ] {
        let error = run(keeps_graph).expect_err(words).to_string();
        assert!(error.contains(words), "{error}");
    }
}

#[test]
fn autocast_casts_before_the_operator() {
    let x = Tensor::ones([2], (Kind::Float, Device::Cpu)).set_requires_grad(true);
    let _autocast = Autocast::new(Device::Cpu, Kind::BFloat16).expect("autocast");
    let y = call(Broken { how: 0 }, &BrokenIn { x: &x }).expect("a result").y;
    assert_eq!(y.kind(), Kind::BFloat16);
    y.sum(Kind::Float).backward();
    assert_eq!((x.grad().kind(), x.grad().double_value(&[0])), (Kind::Float, 2.0));
    let registered = Registered::find("one_definition::broken").expect("it is registered");
    let found: Tensor = registered.call(args![&x]).expect("a result");
    assert_eq!(found.kind(), Kind::BFloat16);
}

#[test]
fn sizes_of_any_number_are_known_in_the_backward_pass() {
    let x = Tensor::ones([1, 2, 1, 2, 1, 2, 1], DOUBLE).set_requires_grad(true);
    let y = call(Seven {}, &SevenIn { x: &x }).expect("a result").y;
    y.backward();
    assert_eq!(x.grad(), Tensor::full([1, 2, 1, 2, 1, 2, 1], 0.125, DOUBLE));
}

tch_extension::signature! {
    /// The mean of all elements.
    Seven: SevenIn -> SevenOut = "seven"(x) -> (y)
}

impl Operator for Seven {
    type Kept = ();
    type Plan = ();

    const SECOND: Second = Second::Itself;

    fn rule<D: Dim>(&self, of: &Metas<Self, D>, _: &Needs<Self>) -> Result<Made<Self, Meta<D>>> {
        Ok(Made::only(SevenOut { y: of.x.sized([]) }))
    }

    fn reads(&self, _: &Needs<Self>) -> Needs<Self> {
        SevenIn { x: false }
    }

    fn forward(&self, call: &Call<'_, Self>) -> Result<Made<Self, Tensor>> {
        assert_eq!(call.allocate()?.outputs.y.size(), [0; 0]);
        Ok(Made::only(SevenOut { y: call.of.x.mean(call.of.x.kind()) }))
    }

    fn backward(&self, grads: Incoming<Self>, again: Again<'_, Self>) -> Result<Gradients<Self>> {
        assert!(again.of.x.is_none(), "nobody reads it");
        let sizes = again.metas()?.x.sizes().to_vec();
        let count: i64 = sizes.iter().product();
        Ok(SevenIn { x: grads.y.map(|grad| (grad / count as f64).expand(&sizes, false)) })
    }

    fn reference(&self, of: &Args<'_, Self>) -> Result<Outputs<Self>> {
        Ok(SevenOut { y: of.x.mean(of.x.kind()) })
    }
}
