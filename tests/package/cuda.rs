//! Packages for a GPU.

use super::*;
use support::gpu::caching_or_skip;
use tch_extension::cuda::{Graph, Stream, StreamGuard, synchronize};

/// The GPU and the folder of packages for it. Python compiles them there.
fn gpu_packages(test: &str) -> Option<(Device, &'static Path)> {
    let device = caching_or_skip(test)?;
    Some((device, packages::packages_for("cuda", test)?))
}

fn on(device: Device, inputs: &[Tensor]) -> Vec<Tensor> {
    inputs.iter().map(|input| input.to_device(device)).collect()
}

fn on_cpu(outputs: &[Tensor]) -> Vec<Tensor> {
    on(Device::Cpu, outputs)
}

#[test]
fn cuda_outputs_and_constants() {
    let Some((device, folder)) = gpu_packages("cuda_outputs_and_constants") else { return };
    let package = load(folder, "model.pt2");
    assert_eq!(package.device(), device);
    let (weight, bias) = (eighths(&[3, 4]), eighths(&[3]));
    for batch in [5, 1, 64] {
        let inputs = inputs(batch);
        let outputs = run(&package, &on(device, &inputs)).unwrap();
        assert!(outputs.iter().all(|output| output.device() == device));
        assert_equal(&on_cpu(&outputs), &expected(&inputs, &weight, &bias));
    }
    let error = message(run(&package, &inputs(5)));
    assert!(error.contains("input 0 (x): expected Cuda(0), got Cpu"), "{error}");
    // Values come from the CPU or from the GPU.
    let inputs = inputs(5);
    for value in [&weight * 3.0, (&weight * 5.0).to_device(device)] {
        package.update_constants(&[("linear.weight", &value)]).unwrap();
        let value = value.to_device(Device::Cpu);
        assert!(package.constant("linear.weight").unwrap().to_device(Device::Cpu).equal(&value));
        let outputs = run(&package, &on(device, &inputs)).unwrap();
        assert_equal(&on_cpu(&outputs), &expected(&inputs, &value, &bias));
    }
    let fixed = load(folder, "fixed.pt2");
    let (x, weight) = (eighths(&[2, 4]), eighths(&[4, 4]) * 2.0);
    fixed.update_constants(&[("weight", &weight)]).unwrap();
    let outputs = fixed.run(&[&x.to_device(device)]).unwrap();
    assert_equal(&on_cpu(&outputs), &[x.matmul(&(&weight + weight.tr()))]);
    let options = PackageOptions { device: Some(Device::Cuda(99)), ..Default::default() };
    let error = message(Package::load_with(folder.join("fixed.pt2"), options));
    assert!(error.contains("there is no Cuda(99)"), "{error}");
}

#[test]
fn cuda_runs_are_on_the_current_stream() {
    let Some((device, folder)) = gpu_packages("cuda_runs_are_on_the_current_stream") else {
        return;
    };
    let options = PackageOptions { single_threaded: true, ..Default::default() };
    let package = Package::load_with(folder.join("model.pt2"), options).unwrap();
    let inputs = inputs(64);
    let expected = expected(&inputs, &eighths(&[3, 4]), &eighths(&[3]));
    // The first run loads the kernels, for which it waits.
    run(&package, &on(device, &inputs)).unwrap();
    let stream = Stream::new(device).unwrap();
    let outputs = {
        let _guard = StreamGuard::new(&stream).unwrap();
        // The inputs get their values on this stream after a long time.
        let mut late: Vec<Tensor> =
            inputs.iter().map(|x| x.zeros_like().to_device(device)).collect();
        let values = on(device, &inputs);
        synchronize(device).unwrap();
        let mut slow = Tensor::ones([4096, 4096], (Kind::Float, device));
        for _ in 0..200 {
            slow = slow.matmul(&slow) / 4096.0;
        }
        for (late, values) in late.iter_mut().zip(&values) {
            late.copy_(values);
        }
        let outputs = run(&package, &late).unwrap();
        assert!(!stream.is_idle().unwrap(), "the run waited for the GPU");
        outputs
    };
    stream.synchronize().unwrap();
    assert_equal(&on_cpu(&outputs), &expected);
}

#[test]
fn cuda_a_run_is_captured_in_a_graph() {
    let Some((device, folder)) = gpu_packages("cuda_a_run_is_captured_in_a_graph") else { return };
    let options = PackageOptions { single_threaded: true, ..Default::default() };
    let package = Package::load_with(folder.join("model.pt2"), options).unwrap();
    let first = inputs(8);
    let mut inputs = on(device, &first);
    // The first run loads the kernels, which cannot be captured.
    run(&package, &inputs).unwrap();
    synchronize(device).unwrap();
    let (graph, outputs) = Graph::capture(device, || run(&package, &inputs)).unwrap();
    assert!(graph.kernels() > 0);
    let _ = inputs[0].neg_();
    graph.replay().unwrap();
    synchronize(device).unwrap();
    let mut changed = first;
    let _ = changed[0].neg_();
    assert_equal(&on_cpu(&outputs), &expected(&changed, &eighths(&[3, 4]), &eighths(&[3])));
}

/// A graph keeps the model with its constants.
#[test]
fn cuda_a_captured_run_outlives_its_package() {
    let test = "cuda_a_captured_run_outlives_its_package";
    let Some((device, folder)) = gpu_packages(test) else { return };
    let options = PackageOptions { single_threaded: true, ..Default::default() };
    let package = Package::load_with(folder.join("model.pt2"), options).unwrap();
    let inputs = inputs(8);
    let on_gpu = on(device, &inputs);
    run(&package, &on_gpu).unwrap();
    synchronize(device).unwrap();
    let (graph, outputs) = Graph::capture(device, move || {
        let outputs = run(&package, &on_gpu);
        drop(package);
        outputs
    })
    .unwrap();
    // Others take what was given back.
    let junk = |size: i64| Tensor::full([size], f64::NAN, (Kind::Float, device));
    let _junk: Vec<Tensor> = (0..200).map(|place| junk(1 << (place % 12))).collect();
    graph.replay().unwrap();
    synchronize(device).unwrap();
    assert_equal(&on_cpu(&outputs), &expected(&inputs, &eighths(&[3, 4]), &eighths(&[3])));
}

#[test]
fn cuda_constants_change_after_the_kernels_that_read_them() {
    let test = "cuda_constants_change_after_the_kernels_that_read_them";
    let Some((device, folder)) = gpu_packages(test) else { return };
    let options = PackageOptions { runners: 4, ..Default::default() };
    let package = Package::load_with(folder.join("model.pt2"), options).unwrap();
    let (weight, bias) = (eighths(&[3, 4]), eighths(&[3]));
    let inputs = inputs(64);
    let on_gpu = on(device, &inputs);
    for round in 0..20 {
        let stream = Stream::new(device).unwrap();
        let old = &weight * f64::from(1 + round % 3);
        package.update_constants(&[("linear.weight", &old)]).unwrap();
        let outputs = {
            let _guard = StreamGuard::new(&stream).unwrap();
            let mut slow = Tensor::ones([2048, 2048], (Kind::Float, device));
            for _ in 0..20 {
                slow = slow.matmul(&slow) / 2048.0;
            }
            run(&package, &on_gpu).unwrap()
        };
        package.update_constants(&[("linear.weight", &weight.zeros_like())]).unwrap();
        stream.synchronize().unwrap();
        assert_equal(&on_cpu(&outputs), &expected(&inputs, &old, &bias));
    }
}
