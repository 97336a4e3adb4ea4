//! Packages and modules that call an operator of the user's, which is written in Rust.

use super::*;
use tch::{CModule, IValue};
use tch_extension::library::{Operator, Output, define, implement};
use tch_extension::{Error, args};

/// `muladd(Tensor a, Tensor b, float c) -> Tensor`, which refuses numbers above 1000.
fn muladd(arguments: &[Output]) -> Result<Vec<Output>> {
    let [Output::Tensor(a), Output::Tensor(b), Output::Float(c)] = arguments else {
        return Err(Error::msg("wrong arguments"));
    };
    refuse_large(a)?;
    Ok(vec![Output::Tensor(a * b + *c)])
}

/// `limit_(Tensor(a!) x, float most) -> ()`, which refuses the same.
fn limit(arguments: &[Output]) -> Result<Vec<Output>> {
    let [Output::Tensor(x), Output::Float(most)] = arguments else {
        return Err(Error::msg("wrong arguments"));
    };
    refuse_large(x)?;
    let _ = x.shallow_clone().f_clamp_max_(*most)?;
    Ok(vec![])
}

fn refuse_large(x: &Tensor) -> Result<()> {
    let most = x.max().double_value(&[]);
    if most > 1000.0 { Err(Error::msg(format!("{most} is too large"))) } else { Ok(()) }
}

#[test]
fn packages_and_modules_call_operators_that_are_written_in_rust() {
    let test = "packages_and_modules_call_operators_that_are_written_in_rust";
    let Some(folder) = packages(test) else { return };
    let (path, script) = (folder.join("custom.pt2"), folder.join("script.pt"));
    // Before there is an operator.
    let error = message(Package::load(&path));
    assert!(error.contains("tch_package_test::") && !error.contains('\n'), "{error}");
    assert!(CModule::load(&script).is_err());

    define("tch_package_test", "muladd(Tensor a, Tensor b, float c) -> Tensor").unwrap();
    implement("tch_package_test", "muladd", "CompositeImplicitAutograd", muladd).unwrap();
    define("tch_package_test", "limit_(Tensor(a!) x, float most) -> ()").unwrap();
    implement("tch_package_test", "limit_", "CPU", limit).unwrap();
    let (x, y) = (eighths(&[2, 3]), eighths(&[2, 3]).flip([0]));
    let operator = Operator::find("tch_package_test::muladd").unwrap();
    let own: Tensor = operator.call(args![&x, &y, 0.5]).unwrap();
    assert!(own.equal(&(&x * &y + 0.5)));

    let package = Package::load(&path).unwrap();
    for rows in [2, 1, 7] {
        let (x, y) = (eighths(&[rows, 3]) * 100.0, eighths(&[rows, 3]));
        let outputs = package.run(&[&x, &y]).unwrap();
        assert_equal(&outputs, &[(&x + 1.0).clamp_max(100.0) * &y + 3.0]);
    }
    an_error_of_the_operator_is_one_of_the_run(&package, &x, &y);

    let module = CModule::load(&script).expect("a module");
    let (a, b) = (x.copy().set_requires_grad(true), y.copy().set_requires_grad(true));
    let result = module.forward_ts(&[&a, &b]).expect("a result");
    assert!(result.equal(&own));
    result.sum(Kind::Float).backward();
    assert!(a.grad().equal(&y) && b.grad().equal(&x));
    let large = IValue::Tensor(&x + 2000.0);
    let error = module.forward_is(&[large, IValue::Tensor(y.copy())]).expect_err("an error");
    assert!(error.to_string().contains("is too large"), "{error}");
}

/// A thread that waits for its turn must not wait for ever after a run has failed.
fn an_error_of_the_operator_is_one_of_the_run(package: &Package, x: &Tensor, y: &Tensor) {
    let (good, large) = (vec![x.copy(), y.copy()], vec![x + 2000.0, y.copy()]);
    let expected = [(x + 1.0) * y + 3.0];
    let error = message(run(package, &large));
    // The operator that failed returns nothing, so the compiled code would not notice.
    assert_eq!(error, "custom.pt2: tch_package_test::limit_: 2001.875 is too large");
    std::thread::scope(|scope| {
        for thread in 0..4 {
            let inputs = if thread % 2 == 0 { &good } else { &large };
            let inputs: Vec<Tensor> = inputs.iter().map(Tensor::copy).collect();
            let expected = expected.each_ref().map(Tensor::copy);
            scope.spawn(move || {
                for _ in 0..25 {
                    match run(package, &inputs) {
                        Ok(outputs) => assert_equal(&outputs, &expected),
                        Err(_) => assert!(thread % 2 == 1),
                    }
                }
            });
        }
    });
}
