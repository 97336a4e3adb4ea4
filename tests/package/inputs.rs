//! Wrong inputs, which compiled code would take without asking.

use super::*;

#[track_caller]
fn refused(package: &Package, inputs: &[Tensor], expected: &str) {
    let error = message(run(package, inputs));
    assert!(error.contains(expected) && !error.contains('\n'), "{error}\ninstead of\n{expected}");
}

/// The inputs for a batch of 5, with another one at this index.
fn with(index: usize, other: Tensor) -> Vec<Tensor> {
    let mut inputs = inputs(5);
    inputs[index] = other;
    inputs
}

#[test]
fn each_wrong_input_is_named() {
    let Some(folder) = packages("each_wrong_input_is_named") else { return };
    let package = load(folder, "model.pt2");
    let float = |shape: &[i64]| Tensor::zeros(shape, (Kind::Float, Device::Cpu));
    refused(
        &package,
        &inputs(5)[..3],
        "model.pt2: inputs: expected 4 tensors: x, others_0, others_1, k, got 3",
    );
    refused(&package, &[], "expected 4 tensors: x, others_0, others_1, k, got 0");
    for (index, other, expected) in [
        (
            0,
            float(&[5, 4]).to_kind(Kind::Double),
            "input 0 (x): expected kind Float, got Double; cast it",
        ),
        (3, Tensor::from_slice(&[2_i32]), "input 3 (k): expected kind Int64, got Int"),
        (0, float(&[5, 3]), "input 0 (x): expected size 4 in dimension 1, got [5, 3]"),
        (0, float(&[20]), "input 0 (x): expected the shape [s"),
        (0, float(&[5, 4, 1]), "input 0 (x): expected the shape [s"),
        (3, Tensor::from(2_i64), "input 3 (k): expected the shape [1], got []"),
        (1, float(&[4, 3]), "input 1 (others_0): expected size 5 (s"),
        (1, float(&[6, 3]), "is dimension 0 of input 0 (x)) in dimension 0, got [6, 3]"),
        (2, float(&[5, 2]).to_kind(Kind::Double), "input 2 (others_1): expected size 10 (2*s"),
        (
            0,
            float(&[0, 4]),
            "input 0 (x): expected size at least 1 and at most 64 in dimension 0, got [0, 4]",
        ),
        (0, float(&[65, 4]), "at most 64 in dimension 0, got [65, 4]"),
        (
            0,
            float(&[4, 5]).tr(),
            "input 0 (x): expected strides [4, 1], got [1, 5]; make it so by contiguous",
        ),
        (0, float(&[5, 8]).slice(1, 0, 8, 2), "input 0 (x): expected strides [4, 1], got [8, 2]"),
        (
            0,
            float(&[1, 4]).expand([5, 4], false),
            "input 0 (x): expected strides [4, 1], got [0, 1]",
        ),
        (1, Tensor::new(), "input 1 (others_0): expected a tensor, got none"),
        (0, float(&[5, 4]).to_sparse(None, None::<&[i64]>, None), "whose values are in memory"),
    ] {
        refused(&package, &with(index, other), expected);
    }
    // The strides of a dimension of one element are never used.
    let mut single = inputs(1);
    single[0] = Tensor::zeros([4, 1], (Kind::Float, Device::Cpu)).tr();
    assert_eq!(single[0].stride(), [1, 1]);
    assert!(run(&package, &single).is_ok());
    // Nothing has gone wrong for the next run.
    let inputs = inputs(5);
    let expected = expected(&inputs, &eighths(&[3, 4]), &eighths(&[3]));
    assert_equal(&run(&package, &inputs).unwrap(), &expected);
}

#[test]
fn fixed_sizes_are_known_without_a_description() {
    let Some(folder) = packages("fixed_sizes_are_known_without_a_description") else { return };
    let package = load(folder, "fixed.pt2");
    let float = |shape: &[i64]| Tensor::zeros(shape, (Kind::Float, Device::Cpu));
    refused(&package, &[], "fixed.pt2: inputs: expected 1 tensors, got 0");
    refused(&package, &[float(&[3, 4])], "input 0: expected size 2 in dimension 0, got [3, 4]");
    refused(&package, &[float(&[4, 2]).tr()], "input 0: expected strides [4, 1], got [1, 2]");
    refused(&package, &[float(&[8])], "input 0: expected the shape [2, 4], got [8]");
    refused(&package, &[float(&[2, 4]).to_kind(Kind::Half)], "expected kind Float, got Half");
}

fn described(folder: &Path, name: &str, inputs: &str) -> Result<Package> {
    let options = PackageOptions { inputs: Some(inputs.to_string()), ..Default::default() };
    Package::load_with(folder.join(name), options)
}

#[test]
fn sizes_that_the_package_does_not_tell_are_described() {
    let Some(folder) = packages("sizes_that_the_package_does_not_tell_are_described") else {
        return;
    };
    // Which of the sizes must be equal is not in the generated C++.
    let error = message(Package::load(folder.join("bare.pt2")));
    assert!(
        error.contains("does not tell which other size is that of dimension 0 of input 2"),
        "{error}"
    );
    assert!(error.contains("PackageOptions::inputs"), "{error}");
    let description = r#"{"inputs": [
        {"name": "x", "kind": "float32", "sizes": ["b", 4]},
        {"kind": "float32", "sizes": ["b", 3]},
        {"kind": "float64", "sizes": ["b*2", 2], "strides": [2, 1], "device": "cpu"},
        {"kind": "int64", "sizes": [1]}], "ranges": {"b": [1, 64]}}"#;
    let package = described(folder, "bare.pt2", description).unwrap();
    let good = inputs(7);
    assert_equal(
        &run(&package, &good).unwrap(),
        &expected(&good, &eighths(&[3, 4]), &eighths(&[3])),
    );
    let bad = with(1, eighths(&[6, 3]));
    refused(&package, &bad, "input 1: expected size 5 (b, where b is dimension 0 of input 0 (x))");
    for (from, to, expected) in [
        ("float64", "float32", "does not fit the compiled model: input 2 has another kind"),
        ("[\"b\", 3]", "[\"b\", 4]", "input 1 has another size in dimension 1"),
        ("[\"b\", 3]", "[5, 3]", "input 1 has another size in dimension 0"),
        ("[\"b\", 3]", "[\"b\"]", "input 1 has another number of dimensions"),
        ("[2, 1]", "[1, 2]", "input 2 has another stride in dimension 0"),
        ("\"cpu\"", "\"cuda\"", "input 2 has another device"),
        (
            "{\"kind\": \"int64\", \"sizes\": [1]}",
            "",
            "does not describe the inputs: trailing comma",
        ),
        ("\"b*2\"", "\"c\"", "PackageOptions::inputs"),
        ("\"b*2\"", "\"2*c\"", "no input has the size c by itself"),
        ("\"b*2\"", "\"b**2\"", "does not describe the inputs: input 2: \"**2\""),
        ("\"b*2\"", "1.5", "1.5 is no size"),
        ("float64", "float63", "tch does not know the kind \"float63\""),
    ] {
        let changed = description.replace(from, to);
        assert_ne!(changed, description);
        let result = described(folder, "bare.pt2", &changed);
        if to == "\"c\"" {
            // A symbol of its own is a size that may be anything: what is described is trusted.
            assert!(result.is_ok(), "{result:?}");
            continue;
        }
        let error = message(result);
        assert!(error.contains(expected), "{error}\ninstead of\n{expected}");
    }
    let error = message(described(folder, "no_source.pt2", r#"{"inputs": []}"#));
    assert!(error.contains("the model has 1 inputs, but 0 are described"), "{error}");
    let one = r#"{"inputs": [{"kind": "float32", "sizes": [2, 4]}]}"#;
    assert!(described(folder, "no_source.pt2", one).is_ok());
    let error = message(Package::load(folder.join("no_source.pt2")));
    assert!(error.contains("it does not tell what its inputs must be"), "{error}");
}
