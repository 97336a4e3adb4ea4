//! What a package computes.

use super::*;
use tch_extension::amp::Autocast;

#[test]
fn outputs_are_those_of_the_model_for_any_batch() {
    let Some(folder) = packages("outputs_are_those_of_the_model_for_any_batch") else { return };
    let package = load(folder, "model.pt2");
    assert_eq!(package.device(), Device::Cpu);
    for batch in [5, 1, 2, 64, 33] {
        let inputs = inputs(batch);
        let outputs = run(&package, &inputs).unwrap();
        assert_equal(&outputs, &expected(&inputs, &eighths(&[3, 4]), &eighths(&[3])));
    }
    let fixed = load(folder, "fixed.pt2");
    let (x, weight) = (eighths(&[2, 4]), eighths(&[4, 4]));
    let outputs = fixed.run(&[&x]).unwrap();
    assert_equal(&outputs, &[x.matmul(&(&weight + weight.tr()))]);
}

#[test]
fn outputs_outlive_the_package() {
    let Some(folder) = packages("outputs_outlive_the_package") else { return };
    let package = load(folder, "model.pt2");
    let inputs = inputs(5);
    let outputs = run(&package, &inputs).unwrap();
    let expected = expected(&inputs, &eighths(&[3, 4]), &eighths(&[3]));
    // One of them is a constant of the model.
    package
        .update_constants(&[("scale", &Tensor::zeros([3], (Kind::Float, Device::Cpu)))])
        .unwrap();
    assert_equal(&outputs, &expected);
    drop(package);
    assert_equal(&outputs, &expected);
}

#[test]
fn neither_gradients_nor_autocast_reach_into_it() {
    let Some(folder) = packages("neither_gradients_nor_autocast_reach_into_it") else { return };
    let package = load(folder, "model.pt2");
    let mut inputs = inputs(3);
    let expected = expected(&inputs, &eighths(&[3, 4]), &eighths(&[3]));
    {
        let _autocast = Autocast::new(Device::Cpu, Kind::BFloat16).unwrap();
        assert_equal(&run(&package, &inputs).unwrap(), &expected);
    }
    inputs[1] = inputs[1].set_requires_grad(true);
    let error = message(run(&package, &inputs));
    assert_eq!(
        error,
        "model.pt2: input 1 (others_0): expected a constant, because compiled code has no backward pass, \
         got one that requires grad; detach it, or run within tch::no_grad"
    );
    let outputs = tch::no_grad(|| run(&package, &inputs)).unwrap();
    assert_equal(&outputs, &expected);
    assert!(outputs.iter().all(|output| !output.requires_grad()));
}

#[test]
fn the_package_tells_what_it_is() {
    let Some(folder) = packages("the_package_tells_what_it_is") else { return };
    let package = load(folder, "model.pt2");
    assert_eq!(package.metadata()["author"], "tests");
    assert_eq!(package.metadata()["AOTI_DEVICE_KEY"], "cpu");
    let (inputs, outputs) = package.call_spec().unwrap();
    assert!(inputs.contains("builtins.tuple") && inputs.contains("builtins.list"), "{inputs}");
    assert!(outputs.contains("sum") && outputs.contains("twice"), "{outputs}");
    let text = format!("{package:?}");
    assert!(text.contains("x: Float [s") && text.contains("k: Int64 [1]"), "{text}");
}

/// The docs show a Python function. It is the one that wrote these packages' descriptions.
#[test]
fn the_documented_function_is_the_tested_one() {
    let root = support::root();
    let read = |path: &str| std::fs::read_to_string(root.join(path)).expect(path);
    let script = read("tests/package/packages.py");
    let docs = read("src/library/package/mod.rs");
    let documented = docs.lines().filter_map(|line| line.strip_prefix("///")).map(str::trim);
    let body = documented
        .skip_while(|line| !line.starts_with("def describe"))
        .skip_while(|line| !line.starts_with("nodes ="))
        .take_while(|line| !line.starts_with("batch ="));
    let lines: Vec<&str> = body.filter(|line| !line.is_empty()).collect();
    assert!(lines.len() > 15, "{lines:?}");
    for line in lines {
        assert!(script.lines().any(|found| found.trim() == line), "packages.py lacks {line}");
    }
}
