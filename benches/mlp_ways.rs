//! `cargo xtask bench gelu_mlp ways [WORD…]`: the GPU time of each way of `gelu_mlp`. The rule of
//! `src/ops/mlp/plan.rs` comes from here.

use crate::clock::{OnTheGpu, median};
use tch::{Device, Kind, Tensor};
use tch_extension::Result;
use tch_extension::autograd::{GradOptions, grad};
use tch_extension::cuda::{Stream, StreamGuard};
use tch_extension::ops::{GeluMlpOptions, MlpWay, f_gelu_mlp, force};
use tch_extension::testing::devices;

/// (M, D, H).
const SIZES: [(i64, i64, i64); 7] = [
    (512, 768, 3072),
    (4096, 512, 2048),
    (4096, 768, 3072),
    (16_384, 384, 1536),
    (16_384, 768, 3072),
    (8192, 2048, 8192),
    (8192, 4096, 16_384),
];
const ROUNDS: usize = 5;

const WAYS: [MlpWay; 2] = [MlpWay::Pass, MlpWay::Activation];

/// A call whose directions are measured.
type Call<'a> = &'a dyn Fn(&[Tensor]) -> Result<Tensor>;

/// The forward pass and the backward pass as graphs, with the tensors that they read.
struct Captured {
    graphs: [OnTheGpu; 2],
    _tensors: Vec<Tensor>,
}

fn capture(sizes: &[Vec<i64>], call: Call<'_>, kind: Kind, device: Device) -> Result<Captured> {
    let stream = Stream::new(device)?;
    stream.wait_stream(&Stream::current(device)?)?;
    let _guard = StreamGuard::new(&stream)?;
    let normal = |size: &Vec<i64>| {
        let scale = size.last().map_or(1.0, |&columns| (columns as f64).sqrt().recip());
        (Tensor::randn(size, (Kind::Float, device)) * scale).to_kind(kind)
    };
    let leaves: Vec<Tensor> =
        sizes.iter().map(|size| normal(size).set_requires_grad(true)).collect();
    let output = call(&leaves)?;
    let vector = normal(&output.size());
    let bytes: usize = leaves.iter().map(|leaf| 2 * leaf.numel()).sum();
    // Both directions record a graph, so that the forward pass keeps what a training step keeps.
    let forward = OnTheGpu::capture(&stream, bytes, &mut || {
        drop(call(&leaves).expect("an output"));
    })?;
    let options = GradOptions {
        grad_outputs: &[Some(&vector)],
        retain_graph: Some(true),
        ..Default::default()
    };
    let inputs: Vec<&Tensor> = leaves.iter().collect();
    let backward = OnTheGpu::capture(&stream, bytes, &mut || {
        drop(grad(&[&output], &inputs, &options).expect("gradients"));
    })?;
    drop(inputs);
    let tensors = leaves.into_iter().chain([output, vector]).collect();
    Ok(Captured { graphs: [forward, backward], _tensors: tensors })
}

/// The medians of both directions, each of these calls in turn.
fn measure(sizes: &[Vec<i64>], calls: &[Call<'_>], kind: Kind, device: Device) -> Result<()> {
    let mut captured =
        calls.iter().map(|call| capture(sizes, call, kind, device)).collect::<Result<Vec<_>>>()?;
    let mut times = vec![[Vec::new(), Vec::new()]; calls.len()];
    for _ in 0..ROUNDS {
        for (captured, times) in captured.iter_mut().zip(&mut times) {
            for (graph, times) in captured.graphs.iter_mut().zip(times) {
                times.push(graph.time());
            }
        }
    }
    let medians: Vec<[f64; 2]> = times.into_iter().map(|times| times.map(median)).collect();
    for (direction, name) in ["forward", "backward"].into_iter().enumerate() {
        let first = medians[0][direction];
        let line = medians.iter().map(|each| {
            let time = each[direction];
            format!("{time:>9.2} ({:>5.3})", time / first)
        });
        println!("  {name:<8} {}", line.collect::<Vec<_>>().join("  "));
    }
    Ok(())
}

/// Prints the times in microseconds, and in brackets those compared with the first way's.
///
/// # Errors
/// If a CUDA call fails.
pub fn run(words: &[String]) -> Result<()> {
    for device in devices().into_iter().filter(|device| device.is_cuda()) {
        for kind in [Kind::BFloat16, Kind::Half] {
            for (m, d, h) in SIZES {
                let title = format!("{:?} {kind:?}", (m, d, h));
                if !words.iter().all(|word| title.contains(word.as_str())) {
                    continue;
                }
                let sizes = [vec![m, d], vec![h, d], vec![h], vec![d, h], vec![d]];
                for save_activations in [true, false] {
                    println!("gelu_mlp {title}, with a: {save_activations}: {WAYS:?}");
                    let options = GeluMlpOptions { save_activations, ..Default::default() };
                    let calls = WAYS.map(|way| {
                        move |tensors: &[Tensor]| {
                            let [x, w1, b1, w2, b2] = tensors else { panic!("five tensors") };
                            force(way, || f_gelu_mlp(x, w1, Some(b1), w2, Some(b2), &options))
                        }
                    });
                    let calls = calls.each_ref().map(|call| call as Call<'_>);
                    measure(&sizes, &calls, kind, device)?;
                }
            }
        }
    }
    Ok(())
}
