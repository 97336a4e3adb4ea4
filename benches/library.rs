//! The cost of calling an operator that was looked up by name, compared with tch's own binding.

use criterion::{Criterion, criterion_group};
use std::hint::black_box;
use tch::Tensor;
use tch_extension::args;
use tch_extension::library::Operator;

fn calls(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("library/cpu");
    let (x, y) = (Tensor::from_slice(&[1.0]), Tensor::from_slice(&[2.0]));
    let add = Operator::find("aten::add.Tensor").expect("add");
    let view = Operator::find("aten::view_as").expect("view_as");
    group.bench_function("add, tch", |bencher| bencher.iter(|| black_box(&x) + &y));
    group.bench_function("add, found", |bencher| {
        bencher.iter(|| add.call::<Tensor>(args![black_box(&x), &y]).expect("a sum"));
    });
    group.bench_function("view_as, tch", |bencher| bencher.iter(|| black_box(&x).view_as(&y)));
    group.bench_function("view_as, found", |bencher| {
        bencher.iter(|| view.call::<Tensor>(args![black_box(&x), &y]).expect("a view"));
    });
    group.finish();
}

criterion_group!(benches, calls);
