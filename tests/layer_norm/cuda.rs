//! Tests that need a GPU.

use super::*;
use std::io::Write;
use support::gpu::caching_or_skip;
use support::{among_nan, assert_as_close};
use tch_extension::cuda::Graph;
use tch_extension::testing::cuda_or_skip;

#[test]
fn cuda_agrees_with_the_cpu() {
    for case in CASES.into_iter().chain(all_ways()) {
        case.suite(|suite| suite.cuda_agrees_with_the_cpu("cuda_agrees_with_the_cpu"));
    }
}

#[test]
fn cuda_mixed_devices_are_named() {
    let Some(device) = cuda_or_skip("cuda_mixed_devices_are_named") else { return };
    for (index, name) in [(1, "weight"), (2, "bias")] {
        let mut inputs = AFFINE.samples(&[[3, 4]], Kind::Float, device).remove(0).inputs;
        inputs[index] = inputs[index].to_device(Device::Cpu);
        let error = AFFINE.fused(&inputs).expect_err("mixed devices").to_string();
        let expected = format!("layer_norm: {name}: expected device Cuda(0), as input, got Cpu");
        assert!(error.starts_with(&expected), "{error}");
    }
}

/// The graph contains only kernels on the current stream. If a kernel ran on another stream, a
/// replay would leave the outputs unchanged.
#[test]
fn cuda_the_work_is_one_kernel_forward_and_two_backward_on_the_current_stream() {
    let test = "cuda_the_work_is_one_kernel_forward_and_two_backward_on_the_current_stream";
    let Some(device) = caching_or_skip(test) else { return };
    for case in [AFFINE, PLAIN].into_iter().chain(all_ways()) {
        for sizes in [[600, 40], [64, 1024], [3, 70_000]] {
            let inputs = case.samples(&[sizes], Kind::Float, device).remove(0).inputs;
            let leaves = leaves(&inputs);
            let vector = inputs[0].cos();
            check_kernels(device, 1, &format!("{case:?} {sizes:?}"), || case.fused(&inputs));
            check_kernels(device, 1, &format!("{case:?} {sizes:?} with a graph"), || {
                case.fused(&leaves)
            });
            // With a weight and a bias, one kernel more finishes their gradients' sums, and another
            // one is needed where rows are read again. For a few rows that fit in registers, one
            // kernel computes the whole backward pass.
            let is_long = sizes[1] > 65536;
            let sums = match case.way {
                _ if !case.weight => 0,
                NormWay::Automatic => usize::from(sizes != [64, 1024]),
                NormWay::Few if !is_long => 0,
                NormWay::Few | NormWay::FewPasses => 1,
                NormWay::Passes => 2,
                _ => 1 + usize::from(is_long),
            };
            check_kernels(
                device,
                2 + sums,
                &format!("{case:?} {sizes:?}, both directions"),
                || {
                    let output = case.fused(&leaves)?.remove(0);
                    let options =
                        GradOptions { grad_outputs: &[Some(&vector)], ..Default::default() };
                    let gradients = grad(&[&output], &leaves.iter().collect::<Vec<_>>(), &options)?;
                    Ok(gradients.into_vec().into_iter().flatten().collect())
                },
            );
        }
    }
}

fn check_kernels(
    device: Device,
    kernels: usize,
    context: &str,
    work: impl Fn() -> Result<Vec<Tensor>>,
) {
    let expected = work().expect("outputs");
    let (graph, outputs) = Graph::capture(device, work).expect("a capture");
    assert_eq!((graph.kernels(), graph.other_nodes()), (kernels, 0), "{context}");
    for output in &outputs {
        let _ = output.detach().fill_(f64::NAN);
    }
    graph.replay().expect("a replay");
    for (output, expected) in outputs.iter().zip(&expected) {
        assert!(output.equal(expected), "{context}");
    }
}

/// Rows may begin at any distance from a multiple of 16 bytes. Kernels then read whole vectors that
/// also contain other values, here NaN. The arrays' alignment must not change a bit of the results,
/// with one exception: for gradients of long rows in arrays that are all aligned, there is a kernel
/// of its own.
#[test]
fn cuda_rows_may_begin_anywhere() {
    use NormWay::{Automatic, Cluster, Few, InPlace, Registers, Ring};
    let Some(device) = cuda_or_skip("cuda_rows_may_begin_anywhere") else { return };
    for kind in KINDS {
        for sizes in [
            [5, 1],
            [6, 3],
            [40, 17],
            [37, 255],
            [300, 41],
            [9, 1029],
            [3, 4097],
            [5, 8223],
            [3, 9001],
        ] {
            let sample = AFFINE.samples(&[sizes], kind, device).remove(0);
            let vector = support::incoming(&sample.inputs[0]);
            for way in [Automatic, Ring, InPlace, Few, Cluster, Registers] {
                let run = |offsets: [i64; 3]| {
                    let leaf = |index: usize| {
                        among_nan(&sample.inputs[index], offsets[index]).set_requires_grad(true)
                    };
                    let (x, w, b) = (leaf(0), leaf(1), leaf(2));
                    let y = force(way, || f_layer_norm(&x, &w.size(), Some(&w), Some(&b), EPS))
                        .expect("output");
                    let vector = among_nan(&vector, offsets[2]);
                    let options =
                        GradOptions { grad_outputs: &[Some(&vector)], ..Default::default() };
                    let gradients =
                        grad(&[&y], &[&x, &w, &b], &options).expect("gradients").into_vec();
                    std::iter::once(y.detach())
                        .chain(gradients.into_iter().flatten())
                        .collect::<Vec<_>>()
                };
                let (aligned, shifted) = (run([0, 0, 0]), run([1, 3, 6]));
                // The kernel for aligned arrays is used where several warps share a row: if the row
                // is too long for one warp, or if the test names that kernel.
                let may_be_in_place = match way {
                    Automatic => sizes[1] > 256,
                    InPlace => true,
                    _ => false,
                };
                for (aligned, shifted) in aligned.iter().zip(&shifted) {
                    assert_as_close(shifted, aligned, kind);
                    assert!(
                        may_be_in_place || shifted.equal(aligned),
                        "{way:?} {sizes:?} {kind:?}"
                    );
                }
                for offset in 1..=8 {
                    let offsets = [offset, (offset + 2) % 5, (offset + 5) % 7];
                    let size = kind.elt_size_in_bytes() as i64;
                    let is_aligned = offsets.iter().all(|offset| offset * size % 16 == 0);
                    let expected = if is_aligned { &aligned } else { &shifted };
                    let found = run(offsets);
                    assert!(
                        found[0].equal(&aligned[0]),
                        "y, {way:?} {sizes:?} {kind:?} at {offset}"
                    );
                    for (name, (found, expected)) in
                        ["y", "dx", "dw", "db"].iter().zip(found.iter().zip(expected))
                    {
                        assert!(
                            found.equal(expected),
                            "{name}, {way:?} {sizes:?} {kind:?} at {offset}"
                        );
                    }
                }
            }
        }
    }
}

/// Rows that begin at multiples of 8 bytes are read 8 bytes at a time in the forward pass, without
/// any value from outside, which is NaN here. Which multiple it is must not change a bit of y, and
/// neither must it which of the arrays are not at a multiple of 16 bytes.
#[test]
fn cuda_rows_may_begin_at_multiples_of_8_bytes() {
    use NormWay::{Automatic, Cluster, Passes, Registers};
    let Some(device) = cuda_or_skip("cuda_rows_may_begin_at_multiples_of_8_bytes") else { return };
    for kind in KINDS {
        let size = kind.elt_size_in_bytes() as i64;
        for (rows, eights) in support::ROWS_OF_EIGHTS {
            let sizes = [rows, eights * 8 / size];
            let inputs = AFFINE.samples(&[sizes], kind, device).remove(0).inputs;
            let exact: Vec<Tensor> =
                inputs.iter().map(|input| input.to_kind(Kind::Double)).collect();
            for case in [AFFINE, PLAIN] {
                let expected = case.reference(&exact).expect("reference").remove(0).to_kind(kind);
                for way in [Automatic, Registers, Cluster, Passes] {
                    let context = format!("{way:?} {case:?} {sizes:?} {kind:?}");
                    let run = |eights: [i64; 3]| {
                        let arguments: Vec<Tensor> = std::iter::zip(&inputs, eights)
                            .map(|(tensor, eights)| among_nan(tensor, eights * 8 / size))
                            .collect();
                        Case { way, ..case }.fused(&arguments).expect("output").remove(0)
                    };
                    let found = run([1, 0, 0]);
                    eprintln!("{context}");
                    assert_as_close(&found, &expected, kind);
                    for offsets in [[3, 0, 0], [5, 1, 3], [0, 1, 0], [0, 0, 1], [0, 0, 0]] {
                        // Otherwise all that is read may be at multiples of 16 bytes.
                        let of_x = offsets[0] % 2 == 1 || eights % 2 == 1;
                        let again = run(offsets);
                        assert_as_close(&again, &expected, kind);
                        let of_parameters = case.weight && offsets != [0; 3];
                        assert!(
                            again.equal(&found) || !of_x && !of_parameters,
                            "{context} at {offsets:?}"
                        );
                    }
                }
            }
        }
    }
}

/// Tests more rows than the blocks can take at the same time, so that each block's ring buffer
/// wraps around.
#[test]
fn cuda_many_rows_for_each_block() {
    use NormWay::{Automatic, InPlace, Ring};
    // With 1029, 4099 and 8195 columns, a few are left over for the lanes of a team's last warp.
    // With 1500 columns, rows begin at two different alignments, with 1502 at four, and with other
    // numbers at all of them. With 8200 columns, a whole cluster works on one row.
    const SIZES: [[i64; 2]; 10] = [
        [70_000, 3],
        [20_000, 41],
        [1500, 1023],
        [300, 8191],
        [2500, 1029],
        [1200, 4099],
        [600, 8195],
        [1300, 1500],
        [1300, 1502],
        [500, 8200],
    ];
    let Some(_) = cuda_or_skip("cuda_many_rows_for_each_block") else { return };
    for way in [Automatic, Ring, InPlace] {
        with_samples_on_the_gpu(Case { way, ..AFFINE }, &SIZES, |suite| {
            suite.gradients_agree_with_the_reference();
        });
    }
}

/// Rows that are too long for one warp, but short enough for a whole Jacobian.
#[test]
fn cuda_gradcheck_of_rows_of_several_warps() {
    let Some(_) = cuda_or_skip("cuda_gradcheck_of_rows_of_several_warps") else { return };
    for case in std::iter::once(AFFINE).chain(all_ways().filter(|case| case.weight)) {
        with_samples_on_the_gpu(case, &[[2, 264], [2, 265]], |suite| {
            suite.gradcheck_of_every_small_sample();
        });
    }
}

/// Runs one of the tests that all operators share, with samples of these sizes, on CUDA only.
fn with_samples_on_the_gpu(case: Case, sizes: &[[i64; 2]], test: impl FnOnce(&Suite<'_>)) {
    test(&Suite {
        fused: &move |arguments: &[Tensor]| case.fused(arguments),
        reference: &move |arguments: &[Tensor]| case.reference(arguments),
        small: &|kind, device: Device| match device.is_cuda() {
            true => case.samples(sizes, kind, device),
            false => Vec::new(),
        },
        large: &|_, _| Vec::new(),
        terms: &move |sample: &Sample| sample.inputs[0].size()[0].max(columns(case, sample)),
    });
}

/// More elements than 32 bits can count. The test compares the first rows, those around 2³¹
/// elements, and the last ones.
#[test]
fn cuda_more_than_two_to_the_31_elements() {
    let test = "cuda_more_than_two_to_the_31_elements";
    let Some(device) = cuda_or_skip(test) else { return };
    const COLUMNS: i64 = 1024;
    const ROWS: i64 = (1 << 31) / COLUMNS + 8;
    // The input, the output, the incoming gradient and the gradient take 4 GiB each; the rest is
    // room for libtorch's temporary tensors.
    let needed = 6 * ROWS * COLUMNS * 2;
    if !has_room(device, needed) {
        let line = format!("SKIPPED {test}: no {} GiB of free memory on the GPU\n", needed >> 30);
        let _ = std::io::stderr().write_all(line.as_bytes());
        return;
    }
    for kind in [Kind::Half, Kind::BFloat16] {
        let sample = AFFINE.samples(&[[8, COLUMNS]], kind, device).remove(0);
        let [pattern, w, b] = &sample.inputs[..] else { unreachable!("with weight and bias") };
        // The same eight rows again and again, written without another copy of that size.
        let x = Tensor::empty([ROWS, COLUMNS], (kind, device));
        x.view([ROWS / 8, 8, COLUMNS]).copy_(pattern);
        let run = |way, x: &Tensor, vector: &Tensor| {
            let x = x.detach().set_requires_grad(true);
            let y =
                force(way, || f_layer_norm(&x, &[COLUMNS], Some(w), Some(b), EPS)).expect("output");
            let options = GradOptions { grad_outputs: &[Some(vector)], ..Default::default() };
            let gradient = grad(&[&y], &[&x], &options).expect("gradients").single().expect("one");
            (y.detach(), gradient)
        };
        let vector = support::incoming(pattern);
        // The number of threads for each row must be the same as with many rows. For few rows, the
        // automatic choice would take more threads, which changes the last bits.
        let (expected, expected_gradient) = run(NormWay::Ring, pattern, &vector);

        let large_vector = Tensor::empty([ROWS, COLUMNS], (kind, device));
        large_vector.view([ROWS / 8, 8, COLUMNS]).copy_(&vector);
        let (y, gradient) = run(NormWay::Automatic, &x, &large_vector);
        for (name, large, small) in [("y", y, expected), ("dx", gradient, expected_gradient)] {
            for first in [0, ROWS - 16, ROWS - 8] {
                assert!(
                    large.narrow(0, first, 8).equal(&small),
                    "{name} from row {first}, {kind:?}"
                );
            }
        }
    }
}

/// Whether the GPU has this much free memory. tch has no function that tells, so this tries an
/// allocation.
fn has_room(device: Device, bytes: i64) -> bool {
    Tensor::f_empty([bytes], (Kind::Uint8, device)).is_ok()
}
