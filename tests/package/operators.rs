//! Packages and modules that call an operator of the user's, which is written in Rust.

use super::*;
use tch::{CModule, IValue};
use tch_extension::library::{Operator, Output, define, implement};
use tch_extension::{Error, args};

/// `muladd(Tensor a, Tensor b, float c) -> Tensor`, which refuses numbers above 100.
fn muladd(arguments: &[Output]) -> Result<Vec<Output>> {
    let [Output::Tensor(a), Output::Tensor(b), Output::Float(c)] = arguments else {
        return Err(Error::msg("wrong arguments"));
    };
    if a.max().double_value(&[]) > 100.0 {
        return Err(Error::msg("a is too large"));
    }
    Ok(vec![Output::Tensor(a * b + *c)])
}

#[test]
fn packages_and_modules_call_operators_that_are_written_in_rust() {
    let test = "packages_and_modules_call_operators_that_are_written_in_rust";
    let Some(folder) = packages(test) else { return };
    let (path, script) = (folder.join("custom.pt2"), folder.join("script.pt"));
    // Before there is an operator.
    let error = message(Package::load(&path));
    assert!(error.contains("tch_package_test::muladd") && !error.contains('\n'), "{error}");
    assert!(CModule::load(&script).is_err());

    define("tch_package_test", "muladd(Tensor a, Tensor b, float c) -> Tensor").unwrap();
    implement("tch_package_test", "muladd", "CompositeImplicitAutograd", muladd).unwrap();
    let (x, y) = (eighths(&[2, 3]), eighths(&[2, 3]).flip([0]));
    let operator = Operator::find("tch_package_test::muladd").unwrap();
    let own: Tensor = operator.call(args![&x, &y, 0.5]).unwrap();
    assert!(own.equal(&(&x * &y + 0.5)));

    let package = Package::load(&path).unwrap();
    assert_equal(&package.run(&[&x, &y]).unwrap(), &[&x * &y + 3.0]);
    an_error_of_the_operator_is_one_of_the_run(&package, &x, &y);

    let module = CModule::load(&script).expect("a module");
    let (a, b) = (x.copy().set_requires_grad(true), y.copy().set_requires_grad(true));
    let result = module.forward_ts(&[&a, &b]).expect("a result");
    assert!(result.equal(&own));
    result.sum(Kind::Float).backward();
    assert!(a.grad().equal(&y) && b.grad().equal(&x));
    let large = IValue::Tensor(&x + 1000.0);
    let error = module.forward_is(&[large, IValue::Tensor(y.copy())]).expect_err("an error");
    assert!(error.to_string().contains("a is too large"), "{error}");
}

/// A thread that waits for its turn must not wait for ever after a run has failed.
fn an_error_of_the_operator_is_one_of_the_run(package: &Package, x: &Tensor, y: &Tensor) {
    let (good, large) = (vec![x.copy(), y.copy()], vec![x + 1000.0, y.copy()]);
    let expected = [x * y + 3.0];
    let error = message(run(package, &large));
    assert!(error.starts_with("custom.pt2: the compiled model failed"), "{error}");
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
