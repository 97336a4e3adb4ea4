//! Tests of models that AOTInductor compiled. Python writes them (`packages.py`) if there is one
//! with torch; otherwise the tests say that they were skipped.

use packages::packages;
use std::path::Path;
use tch::{Device, Kind, Tensor};
use tch_extension::Result;
use tch_extension::library::{Package, PackageOptions, libtorch_version};

mod constants;
mod cuda;
mod inputs;
mod loading;
mod operators;
mod outputs;
mod packages;
mod threads;

fn message<T>(result: Result<T>) -> String {
    result.err().expect("an error").to_string()
}

/// The numbers of `packages.py`: small multiples of 1/8.
fn eighths(shape: &[i64]) -> Tensor {
    let count: i64 = shape.iter().product();
    let values = Tensor::arange(count, (Kind::Int64, Device::Cpu)) * 5;
    ((values.remainder(17) - 8).to_kind(Kind::Float) / 8.0).reshape(shape)
}

/// The inputs of the package `model` for a batch of this size.
fn inputs(batch: i64) -> Vec<Tensor> {
    vec![
        eighths(&[batch, 4]),
        eighths(&[batch, 3]),
        eighths(&[2 * batch, 2]).to_kind(Kind::Double),
        Tensor::from_slice(&[2_i64]),
    ]
}

/// What the package `model` computes.
fn expected(inputs: &[Tensor], weight: &Tensor, bias: &Tensor) -> Vec<Tensor> {
    let scale = Tensor::from_slice(&[1.0_f32, 2.0, 4.0]);
    let h = inputs[0].linear(weight, Some(bias)).relu() * &scale;
    let sum = (&h * &inputs[3]).sum_dim_intlist(0, false, None::<Kind>);
    vec![h + &inputs[1], sum, &inputs[2] * 2, scale]
}

fn run(package: &Package, inputs: &[Tensor]) -> Result<Vec<Tensor>> {
    package.run(&inputs.iter().collect::<Vec<_>>())
}

fn assert_equal(found: &[Tensor], expected: &[Tensor]) {
    assert_eq!(found.len(), expected.len());
    for (index, (found, expected)) in found.iter().zip(expected).enumerate() {
        assert_eq!(found.kind(), expected.kind(), "output {index}");
        assert!(found.equal(expected), "output {index} is {found}, not {expected}");
    }
}

fn load(folder: &Path, name: &str) -> Package {
    Package::load(folder.join(name)).expect(name)
}
