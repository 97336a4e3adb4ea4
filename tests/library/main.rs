//! Tests of operators from libraries of other projects.

use compiled::operator;
use std::path::{Path, PathBuf};
use support::root;
use tch::{Device, Kind, Tensor};
use tch_extension::library::{
    Args, Layout, Library, LoadOptions, MemoryFormat, Operator, Output, Outputs, operators,
};
use tch_extension::{Result, args};

mod arguments;
mod compiled;
mod defined;
mod exceptions;
mod gradients;
mod levels;
mod loading;
mod messages;
mod mismatched;
mod registrations;
mod results;
mod speed;
mod threads;
mod vision;

fn doubles(values: &[f64]) -> Tensor {
    Tensor::from_slice(values)
}

fn leaf(values: &[f64]) -> Tensor {
    doubles(values).set_requires_grad(true)
}

fn message<T>(result: Result<T>) -> String {
    result.err().expect("an error").to_string()
}
