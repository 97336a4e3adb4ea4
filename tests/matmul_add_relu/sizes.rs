//! Tests of the ways for sizes that do not suit tensor cores: few rows or columns, rows that begin
//! at any address, and a ReLU after the product.

use super::*;
use support::gpu::has_caching_allocator;
use tch_extension::cuda::{matmul_allow_tf32, set_matmul_allow_tf32};
use tch_extension::ops::ProductWay;
use tch_extension::testing::cuda_or_skip;
use ways::{inputs, kernels, one};

/// The error that each kind's rounding allows for values around 1.
fn tolerance(kind: Kind) -> f64 {
    match kind {
        Kind::Double => 1e-10,
        Kind::Float => 1e-4,
        Kind::Half => 4e-3,
        _ => 3e-2,
    }
}

fn assert_right(way: ProductWay, arguments: &[Tensor; 3], what: &str) {
    let kind = arguments[0].kind();
    let exact = arguments.each_ref().map(|argument| argument.to_kind(Kind::Double));
    let expected = call(matmul_add_relu_reference, &exact).expect("reference");
    let found = one(way, arguments);
    assert_eq!(
        (found.kind(), found.size(), found.is_contiguous()),
        (kind, expected.size(), true),
        "{what}"
    );
    let tolerance = tolerance(kind);
    let found = found.to_kind(Kind::Double);
    assert!(found.allclose(&expected, tolerance, tolerance, false), "{what} {kind:?} {way:?}");
    assert!(
        one(way, arguments).equal(&one(way, arguments)),
        "{what} {kind:?} {way:?}: not the same bits"
    );
}

/// The same values in other places: unchanged, transposed, with gaps between rows, and at an
/// unaligned address.
fn placements(tensor: &Tensor) -> [Tensor; 4] {
    let mut size = tensor.size();
    let rows = size.len() - 2;
    let transposed = tensor.transpose(-2, -1).contiguous().transpose(-2, -1);
    size[rows + 1] += 3;
    let gaps = Tensor::full(&size, f64::NAN, (tensor.kind(), tensor.device())).narrow(
        -1,
        2,
        size[rows + 1] - 3,
    );
    gaps.shallow_clone().copy_(tensor);
    let memory =
        Tensor::full([tensor.numel() as i64 + 1], f64::NAN, (tensor.kind(), tensor.device()));
    let beside = memory.narrow(0, 1, tensor.numel() as i64).view(tensor.size().as_slice());
    beside.shallow_clone().copy_(tensor);
    [tensor.shallow_clone(), transposed, gaps, beside]
}

fn is_right_in_all_places(way: ProductWay, sizes: [&[i64]; 3], device: Device) {
    for kind in KINDS {
        let [lhs, rhs, bias] = inputs(sizes, kind, device);
        for (at, lhs) in placements(&lhs).into_iter().enumerate() {
            for (of, rhs) in placements(&rhs).into_iter().enumerate() {
                let arguments = [lhs.shallow_clone(), rhs, bias.shallow_clone()];
                assert_right(way, &arguments, &format!("{sizes:?} placed {at} {of}"));
            }
        }
    }
}

/// One to four columns or rows; K shorter than a warp, longer than a block, and split between the
/// blocks of a cluster; several rows computed by one warp, and each row by a block; parts of
/// vectors and of tiles.
#[test]
fn cuda_half_kinds_and_others_skinny_products_are_right() {
    let Some(device) = cuda_or_skip("cuda_half_kinds_and_others_skinny_products_are_right") else {
        return;
    };
    let sizes: [[&[i64]; 3]; 19] = [
        [&[1, 1], &[1, 1], &[1]],
        [&[5, 40], &[40, 1], &[1]],
        [&[6, 3973], &[3973, 1], &[1]],
        [&[3, 9000], &[9000, 4], &[4]],
        [&[2600, 70], &[70, 2], &[2]],
        [&[2100, 1031], &[1031, 3], &[2100, 3]],
        [&[1, 431], &[431, 93], &[93]],
        [&[2, 4096], &[4096, 24], &[24]],
        [&[4, 515], &[515, 1000], &[1, 1]],
        [&[3, 2, 130], &[3, 130, 65], &[65]],
        [&[1, 2, 130], &[3, 130, 64], &[3, 2, 64]],
        [&[7, 33, 264], &[7, 264, 1], &[7, 1, 1]],
        [&[2115, 2056], &[2056, 4], &[4]],
        [&[2, 1101, 4104], &[2, 4104, 3], &[2, 1, 3]],
        [&[1, 3019], &[3019, 2], &[2]],
        [&[600, 1, 96], &[600, 96, 1], &[1]],
        [&[4, 2056], &[2056, 4300], &[4300]],
        [&[3, 264], &[264, 17], &[3, 17]],
        [&[2, 4104], &[4104, 33], &[33]],
    ];
    for size in sizes {
        is_right_in_all_places(ProductWay::Skinny, size, device);
        let arguments = inputs(size, Kind::Half, device);
        assert!(
            !has_caching_allocator() || kernels(ProductWay::Skinny, &arguments, device) == 1,
            "{size:?}"
        );
    }
}

/// K, N and M that are not multiples of 16 bytes, each alone and together; a shared factor; biases
/// that must be copied, too.
#[test]
fn cuda_half_kinds_and_others_padded_products_are_right() {
    let Some(device) = cuda_or_skip("cuda_half_kinds_and_others_padded_products_are_right") else {
        return;
    };
    let sizes: [[&[i64]; 3]; 9] = [
        [&[64, 67], &[67, 48], &[48]],
        [&[64, 64], &[64, 53], &[53]],
        [&[65, 33], &[33, 131], &[131]],
        [&[65, 33], &[33, 131], &[65, 131]],
        [&[65, 33], &[33, 131], &[1, 1]],
        [&[3, 35, 77], &[3, 77, 43], &[43]],
        [&[3, 35, 77], &[3, 77, 43], &[3, 1, 43]],
        [&[3, 35, 77], &[3, 77, 43], &[3, 35, 43]],
        [&[1, 35, 77], &[3, 77, 43], &[43]],
    ];
    for size in sizes {
        is_right_in_all_places(ProductWay::Padded, size, device);
    }
    for kind in [Kind::Half, Kind::BFloat16] {
        let arguments = inputs([&[65, 33], &[33, 131], &[131]], kind, device);
        // A copy, the product, and a kernel that copies the result without its padding.
        assert!(!has_caching_allocator() || kernels(ProductWay::Padded, &arguments, device) >= 3);
    }
    if !has_caching_allocator() {
        return;
    }
    // There is nothing to pad here, so the composite is used.
    let arguments = inputs([&[64, 64], &[64, 48], &[48]], Kind::Half, device);
    let composite = kernels(ProductWay::Composite, &arguments, device);
    assert_eq!(kernels(ProductWay::Padded, &arguments, device), composite);
}

#[test]
fn cuda_half_kinds_and_others_a_relu_behind_the_product_is_right() {
    let Some(device) =
        cuda_or_skip("cuda_half_kinds_and_others_a_relu_behind_the_product_is_right")
    else {
        return;
    };
    for size in [
        [&[64, 64][..], &[64, 48], &[48]],
        [&[65, 33], &[33, 131], &[131]],
        [&[3, 35, 77], &[3, 77, 43], &[3, 35, 43]],
    ] {
        is_right_in_all_places(ProductWay::Pass, size, device);
    }
    let arguments = inputs([&[256, 64], &[64, 512], &[512]], Kind::Half, device);
    assert!(!has_caching_allocator() || kernels(ProductWay::Pass, &arguments, device) == 2);
}

/// Tests the default way, also with tf32, with sizes from each group that was found to be slow.
#[test]
fn cuda_half_kinds_and_others_are_right_at_sizes_nobody_chose() {
    let Some(device) = cuda_or_skip("cuda_half_kinds_and_others_are_right_at_sizes_nobody_chose")
    else {
        return;
    };
    let sizes: [[&[i64]; 3]; 8] = [
        [&[671, 185], &[185, 2193], &[2193]],
        [&[4099, 257], &[257, 509], &[509]],
        [&[1001, 1419], &[1419, 433], &[433]],
        [&[3, 333, 77], &[3, 77, 1031], &[1031]],
        [&[24, 700, 96], &[24, 96, 700], &[24, 700, 700]],
        [&[9, 1650], &[1650, 24], &[24]],
        [&[8, 104], &[104, 48], &[48]],
        [&[2, 7803], &[7803, 1], &[1]],
    ];
    for size in sizes {
        for kind in KINDS {
            assert_right(ProductWay::Automatic, &inputs(size, kind, device), &format!("{size:?}"));
        }
        let before = matmul_allow_tf32().expect("a switch");
        set_matmul_allow_tf32(true).expect("a switch");
        let arguments = inputs(size, Kind::Float, device);
        let exact = arguments.each_ref().map(|argument| argument.to_kind(Kind::Double));
        let expected = call(matmul_add_relu_reference, &exact).expect("reference");
        let found = one(ProductWay::Automatic, &arguments).to_kind(Kind::Double);
        set_matmul_allow_tf32(before).expect("a switch");
        assert!(found.allclose(&expected, 4e-3, 4e-3, false), "{size:?} tf32");
    }
}

/// Offsets of elements, of vectors and of rows exceed 32 bits.
#[test]
fn cuda_sizes_of_more_than_two_to_the_31_elements_are_right() {
    let Some(device) = cuda_or_skip("cuda_sizes_of_more_than_two_to_the_31_elements_are_right")
    else {
        return;
    };
    let (rows, inner) = (70_001, 30_683);
    let lhs = Tensor::zeros([rows, inner], (Kind::BFloat16, device));
    let _ = lhs.narrow(0, rows - 1, 1).fill_(1.0);
    for (way, columns) in
        [(ProductWay::Skinny, 1), (ProductWay::Skinny, 3), (ProductWay::Padded, 5)]
    {
        let rhs = Tensor::full([inner, columns], 1.0 / 16.0, (Kind::BFloat16, device));
        let bias = Tensor::full([columns], 0.5, (Kind::BFloat16, device));
        let found = one(way, &[lhs.shallow_clone(), rhs, bias]).to_kind(Kind::Double);
        let last = Tensor::full([columns], inner as f64 / 16.0 + 0.5, (Kind::Double, device));
        assert!(found.get(rows - 1).allclose(&last, 1e-2, 0.0, false), "{way:?}");
        assert!(found.narrow(0, 0, rows - 1).eq(0.5).all().int64_value(&[]) == 1, "{way:?}");
    }
}
