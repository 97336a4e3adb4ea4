//! Constants: the parameters and buffers of the exported model.

use super::*;

fn zeros(shape: &[i64]) -> Tensor {
    Tensor::zeros(shape, (Kind::Float, Device::Cpu))
}

#[test]
fn constants_are_read_and_replaced() {
    let Some(folder) = packages("constants_are_read_and_replaced") else { return };
    let package = load(folder, "model.pt2");
    let names: Vec<&str> = package.constants().collect();
    assert_eq!(names, ["linear.bias", "linear.weight", "scale"]);
    let (weight, bias) = (eighths(&[3, 4]), eighths(&[3]));
    assert!(package.constant("linear.weight").unwrap().equal(&weight));
    let inputs = inputs(5);
    // A value in other strides, and one that is part of more memory than the constant has.
    let new = (&weight * 3.0).tr().contiguous().tr();
    let long = Tensor::arange(1000, (Kind::Float, Device::Cpu));
    let other = long.slice(0, 500, 503, 1);
    assert_eq!(new.stride(), [1, 3]);
    package.update_constants(&[("linear.weight", &new)]).unwrap();
    assert_equal(&run(&package, &inputs).unwrap(), &expected(&inputs, &new, &bias));
    package.update_constants(&[("linear.bias", &other)]).unwrap();
    assert_equal(&run(&package, &inputs).unwrap(), &expected(&inputs, &new, &other));
    assert!(package.constant("linear.bias").unwrap().equal(&other));
    // The package has copies.
    let _ = long.shallow_clone().zero_();
    assert!(package.constant("linear.bias").unwrap().max().double_value(&[]) == 502.0);
    let scale = Tensor::from_slice(&[1.0_f32, 2.0, 4.0]);
    let all = [("scale", &scale), ("linear.weight", &weight), ("linear.bias", &bias)];
    package.load_constants(&all).unwrap();
    assert_equal(&run(&package, &inputs).unwrap(), &expected(&inputs, &weight, &bias));
}

#[test]
fn a_copy_of_a_constant_is_not_the_constant() {
    let Some(folder) = packages("a_copy_of_a_constant_is_not_the_constant") else { return };
    let package = load(folder, "model.pt2");
    let _ = package.constant("linear.bias").unwrap().zero_();
    assert!(package.constant("linear.bias").unwrap().equal(&eighths(&[3])));
}

#[test]
fn constants_that_depend_on_others_follow_them() {
    let Some(folder) = packages("constants_that_depend_on_others_follow_them") else { return };
    // In the second package the constant is in a file of its own.
    for name in ["fixed.pt2", "weights.pt2"] {
        let package = load(folder, name);
        assert_eq!(package.constants().collect::<Vec<_>>(), ["weight"]);
        assert!(package.constant("weight").unwrap().equal(&eighths(&[4, 4])));
        let x = eighths(&[2, 4]);
        for factor in [1.0, 2.0, -1.0, 4.0] {
            let weight = eighths(&[4, 4]) * factor;
            if factor != 1.0 {
                package.update_constants(&[("weight", &weight)]).unwrap();
            }
            let outputs = package.run(&[&x]).unwrap();
            assert_equal(&outputs, &[x.matmul(&(&weight + weight.tr()))]);
        }
    }
}

#[test]
fn a_value_that_does_not_fit_changes_nothing() {
    let Some(folder) = packages("a_value_that_does_not_fit_changes_nothing") else { return };
    let package = load(folder, "model.pt2");
    let good = zeros(&[3, 4]);
    let sparse = zeros(&[3]).to_sparse(None, None::<&[i64]>, None);
    for (name, value, expected) in [
        ("linear.bias", zeros(&[4]), "constant linear.bias: expected the shape [3], got [4]"),
        ("linear.bias", zeros(&[3, 1]), "constant linear.bias: expected the shape [3], got [3, 1]"),
        ("linear.bias", zeros(&[3]).to_kind(Kind::Double), "expected kind Float, got Double"),
        ("linear.bias", sparse, "expected a dense tensor"),
        ("linear.bias", Tensor::new(), "expected a tensor, got none"),
        (
            "linear_bias",
            zeros(&[3]),
            "constant linear_bias: expected one of the constants (linear.bias, linear.weight, scale)",
        ),
        ("linear.weight", zeros(&[3, 4]), "constant linear.weight: expected one value, got two"),
    ] {
        let error = message(package.update_constants(&[("linear.weight", &good), (name, &value)]));
        assert!(error.starts_with("model.pt2: ") && error.contains(expected), "{error}");
    }
    let error = message(package.load_constants(&[("linear.weight", &good)]));
    assert!(error.contains("got none of linear.bias, scale; update_constants leaves"), "{error}");
    assert!(message(package.constant("nothing")).contains("expected one of the constants"));
    let inputs = inputs(5);
    let expected = expected(&inputs, &eighths(&[3, 4]), &eighths(&[3]));
    assert_equal(&run(&package, &inputs).unwrap(), &expected);
}
