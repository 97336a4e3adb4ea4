//! Tests torchvision's operators, a library from another project, against known answers.

use super::*;
use std::io::Write;
use std::sync::OnceLock;
use tch_extension::autograd::{GradOptions, grad};
use tch_extension::testing::{assert_close, cuda_or_skip, gradcheck};

/// The file with the operators in torchvision's wheel, which `cargo xtask test` installs.
fn file() -> PathBuf {
    let installed = root().join(".venv/vision/torchvision/_C.so");
    std::env::var_os("TCH_EXTENSION_TORCHVISION").map_or(installed, PathBuf::from)
}

/// Loads torchvision. If it or Python's library is missing, this prints a line on stderr and
/// returns `None`, unless `TCH_EXTENSION_REQUIRE_TORCHVISION=1` makes that a failure.
fn loaded(test: &str) -> Option<&'static Library> {
    static LIBRARY: OnceLock<Result<Library>> = OnceLock::new();
    let reason = match LIBRARY.get_or_init(|| Library::load(file())) {
        Ok(library) => return Some(library),
        Err(error) => error.to_string(),
    };
    // Python's library, or libtorch's CUDA library, may be missing.
    let lacks = ["TCH_EXTENSION_LIBPYTHON", "cannot open shared object file"];
    let is_missing = !file().exists() || lacks.iter().any(|what| reason.contains(what));
    let required =
        std::env::var_os("TCH_EXTENSION_REQUIRE_TORCHVISION").is_some_and(|value| value == "1");
    assert!(is_missing && !required, "{reason}");
    // A single write directly to stderr, because the test harness discards the output of a test
    // that passes.
    let line = format!(
        "SKIPPED {test}: {reason}; `cargo xtask test` installs torchvision, or set TCH_EXTENSION_TORCHVISION to its _C.so\n"
    );
    let _ = std::io::stderr().write_all(line.as_bytes());
    None
}

fn vision(name: &str) -> Operator {
    Operator::find(&format!("torchvision::{name}")).expect(name)
}

fn on(values: &[f64], size: &[i64], device: Device) -> Tensor {
    Tensor::from_slice(values).view(size).to_device(device)
}

#[test]
fn torchvision_lists_its_operators() {
    let Some(library) = loaded("torchvision_lists_its_operators") else { return };
    for name in ["nms", "roi_align", "_roi_align_backward", "deform_conv2d"] {
        let name = format!("torchvision::{name}");
        assert!(library.operators().contains(&name), "{name} is not in {:?}", library.operators());
    }
    assert_eq!(
        vision("nms").schema(),
        "torchvision::nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
    );
}

/// Tests boxes whose overlaps are 1/2 (0 and 3), 81/119 (0 and 1) and 36/114 (1 and 3).
fn suppresses(device: Device) {
    let boxes = [
        [0.0, 0.0, 10.0, 10.0],
        [1.0, 1.0, 11.0, 11.0],
        [20.0, 20.0, 30.0, 30.0],
        [0.0, 0.0, 10.0, 5.0],
    ]
    .concat();
    let (boxes, scores) = (on(&boxes, &[4, 4], device), on(&[0.9, 0.8, 0.7, 0.95], &[4], device));
    let nms = vision("nms");
    for (threshold, expected) in
        [(0.6, &[3_i64, 0, 2][..]), (0.4, &[3, 1, 2]), (0.7, &[3, 0, 1, 2]), (0.1, &[3, 2])]
    {
        let kept: Tensor = nms.call(args![&boxes, &scores, threshold]).unwrap();
        assert_eq!(Vec::<i64>::try_from(kept).unwrap(), expected, "{threshold}");
    }
    // nms has a kernel for each device but no gradient.
    assert!(!nms.has_autograd(device).unwrap());
    let scores = scores.set_requires_grad(true);
    let text = message(nms.call::<Tensor>(args![&boxes, &scores, 0.5]));
    assert!(text.contains("it has no autograd kernel"), "{text}");
    let kept: Tensor = nms.no_grad().call(args![&boxes, &scores, 0.6]).unwrap();
    assert_eq!(Vec::<i64>::try_from(kept).unwrap(), [3, 0, 2]);
}

/// The weight of each row of an image in each bin of a box, along one dimension.
fn weights(start: f64, end: f64, bins: usize, samples: usize, size: usize) -> Tensor {
    let mut weights = vec![0.0; bins * size];
    let step = (end - start) / bins as f64;
    for bin in 0..bins {
        for sample in 0..samples {
            let place = start - 0.5 + step * (bin as f64 + (sample as f64 + 0.5) / samples as f64);
            let place = place.clamp(0.0, (size - 1) as f64);
            let low = (place as usize).min(size - 2);
            let fraction = place - low as f64;
            weights[bin * size + low] += (1.0 - fraction) / samples as f64;
            weights[bin * size + low + 1] += fraction / samples as f64;
        }
    }
    Tensor::from_slice(&weights).view([bins as i64, size as i64])
}

/// The mean of bilinear samples in each bin, computed by a product from the left and one from the
/// right.
fn roi_align_reference(
    image: &Tensor,
    boxes: &[[f64; 5]],
    bins: (usize, usize),
    samples: usize,
) -> Tensor {
    let size = image.size();
    let results: Vec<Tensor> = boxes
        .iter()
        .map(|&[index, x1, y1, x2, y2]| {
            let rows = weights(y1, y2, bins.0, samples, size[2] as usize).to_device(image.device());
            let columns =
                weights(x1, x2, bins.1, samples, size[3] as usize).to_device(image.device());
            rows.matmul(&image.get(index as i64)).matmul(&columns.transpose(0, 1))
        })
        .collect();
    Tensor::stack(&results, 0)
}

fn aligns(device: Device) {
    let image = Tensor::rand([2, 3, 9, 11], (Kind::Double, device)).set_requires_grad(true);
    let boxes = [[0.0, 1.2, 0.7, 8.1, 7.9], [1.0, 0.0, 0.0, 11.0, 9.0], [1.0, 3.3, 2.1, 4.0, 6.5]];
    let tensor = on(&boxes.concat(), &[3, 5], device);
    let align = vision("roi_align");
    assert!(align.has_autograd(device).unwrap());
    let ours: Tensor =
        align.call(args![&image, &tensor, 1.0, 4, 3, aligned = true, sampling_ratio = 2]).unwrap();
    let reference = roi_align_reference(&image, &boxes, (4, 3), 2);
    assert_close(&ours, &reference, 1e-12, 1e-12);
    let incoming = Tensor::rand_like(&ours);
    let gradient = |output: &Tensor| {
        let options = GradOptions { grad_outputs: &[Some(&incoming)], ..Default::default() };
        grad(&[output], &[&image], &options).unwrap().single().unwrap()
    };
    assert_close(&gradient(&ours), &gradient(&reference), 1e-12, 1e-12);
}

/// Tests a deformable convolution without offsets and with all masks one, which is an ordinary
/// convolution.
fn deforms(device: Device) {
    let rand = |size: &[i64]| Tensor::rand(size, (Kind::Double, device)).set_requires_grad(true);
    let (input, weight, bias) = (rand(&[2, 4, 6, 7]), rand(&[3, 4, 3, 3]), rand(&[3]));
    let (offset, mask) = (
        Tensor::zeros([2, 18, 6, 7], (Kind::Double, device)),
        Tensor::ones([2, 9, 6, 7], (Kind::Double, device)),
    );
    let ours: Tensor = vision("deform_conv2d")
        .call(args![&input, &weight, &offset, &mask, &bias, 1, 1, 1, 1, 1, 1, 1, 1, true])
        .unwrap();
    let reference = input.conv2d(&weight, Some(&bias), [1, 1], [1, 1], [1, 1], 1);
    assert_close(&ours, &reference, 1e-11, 1e-11);
    let gradients = |output: &Tensor| {
        let output = output.square().sum(Kind::Double);
        let gradients =
            grad(&[&output], &[&input, &weight, &bias], &GradOptions::default()).unwrap();
        gradients.exactly::<3>().unwrap()
    };
    for (ours, reference) in gradients(&ours).iter().zip(&gradients(&reference)) {
        assert_close(ours, reference, 1e-10, 1e-10);
    }
}

#[test]
fn torchvision_agrees_with_known_answers() {
    if loaded("torchvision_agrees_with_known_answers").is_none() {
        return;
    }
    suppresses(Device::Cpu);
    aligns(Device::Cpu);
    deforms(Device::Cpu);
}

#[test]
fn torchvision_passes_gradcheck() {
    if loaded("torchvision_passes_gradcheck").is_none() {
        return;
    }
    let image = Tensor::rand([1, 1, 4, 5], (Kind::Double, Device::Cpu)).set_requires_grad(true);
    let boxes = on(&[0.0, 0.3, 0.2, 4.1, 3.3], &[1, 5], Device::Cpu);
    let align = vision("roi_align");
    let function =
        |inputs: &[Tensor]| align.call::<Tensor>(args![&inputs[0], &boxes, 1.0, 2, 2, 2, true]);
    gradcheck(function, &[&image], &Default::default()).unwrap();
}

#[test]
fn cuda_torchvision_agrees_with_known_answers() {
    const NAME: &str = "cuda_torchvision_agrees_with_known_answers";
    let Some(device) = cuda_or_skip(NAME) else { return };
    // Use the GPU first, so that the child of the rehearsal is forked from a process that has used
    // it.
    let _ = Tensor::ones([1], (Kind::Float, device)).double_value(&[0]);
    if loaded(NAME).is_none() {
        return;
    }
    suppresses(device);
    aligns(device);
    deforms(device);
}
