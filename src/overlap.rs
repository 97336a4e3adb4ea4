//! Which elements of tensors share memory.

use crate::Result;
use tch::Tensor;

/// Whether two elements share memory.
pub(crate) fn overlaps(size: &[i64], stride: &[i64]) -> bool {
    if size.contains(&0) {
        return false;
    }
    let mut dims: Vec<(i64, i64)> =
        stride.iter().copied().zip(size.iter().copied()).filter(|&(_, size)| size > 1).collect();
    dims.sort_unstable();
    let mut reach = 0;
    let nested = dims.iter().all(|&(stride, size)| {
        let clear = stride > reach;
        reach += stride * (size - 1);
        clear
    });
    !nested && collides(&dims)
}

/// Whether two offsets are equal, found by listing them all. Only needed for the rare strides for
/// which the quick test fails.
fn collides(dims: &[(i64, i64)]) -> bool {
    if dims.first().is_some_and(|&(stride, _)| stride == 0) {
        return true;
    }
    // There are more elements than places in memory. If not, the list below is no longer than the
    // memory.
    let places = 1 + dims.iter().map(|&(stride, size)| stride * (size - 1)).sum::<i64>();
    if dims.iter().map(|&(_, size)| size).product::<i64>() > places {
        return true;
    }
    let mut offsets = dims.iter().fold(vec![0], |offsets, &(stride, size)| {
        offsets
            .iter()
            .flat_map(|&start| (0..size).map(move |index| start + index * stride))
            .collect()
    });
    offsets.sort_unstable();
    offsets.windows(2).any(|pair| pair[0] == pair[1])
}

/// Whether two tensors with memory have a byte in common. It is exact for tensors of a few dimensions,
/// such as interleaved slices of one tensor. Where strides allow too many combinations, it says yes.
pub(crate) fn share_memory(a: &Tensor, b: &Tensor) -> Result<bool> {
    if a.device() != b.device() || a.numel() == 0 || b.numel() == 0 {
        return Ok(false);
    }
    let (mut dims, mut reach) = (Vec::new(), [0; 2]);
    for (place, tensor) in [a, b].into_iter().enumerate() {
        let bytes = tensor.f_kind()?.elt_size_in_bytes() as i64;
        let outer = tensor.stride().into_iter().zip(tensor.size());
        let outer = outer.map(|(stride, size)| (stride * bytes, size)).chain([(1, bytes)]);
        for (stride, size) in outer.filter(|&(stride, size)| size > 1 && stride > 0) {
            let most = size - 1;
            reach[place] += stride * most;
            dims.push(if place == 0 { (stride, 0, most) } else { (stride, -most, 0) });
        }
    }
    let distance = b.data_ptr() as i64 - a.data_ptr() as i64;
    if distance > reach[0] || -distance > reach[1] {
        return Ok(false);
    }
    dims.sort_unstable_by_key(|&(stride, ..)| std::cmp::Reverse(stride));
    dims.dedup_by(|next, kept| {
        let is_same = next.0 == kept.0;
        if is_same {
            (kept.1, kept.2) = (kept.1 + next.1, kept.2 + next.2);
        }
        is_same
    });
    Ok(is_reached(&dims, distance, &mut 100_000))
}

/// Whether a sum of multiples of strides, each between two bounds, is this distance. The strides fall.
/// Nested strides leave two multiples of each to try at most. After `steps` tries it says yes.
fn is_reached(dims: &[(i64, i64, i64)], distance: i64, steps: &mut u32) -> bool {
    let Some((&(stride, least, most), rest)) = dims.split_first() else { return distance == 0 };
    let below: i64 = rest.iter().map(|&(stride, least, _)| stride * least).sum();
    let above: i64 = rest.iter().map(|&(stride, _, most)| stride * most).sum();
    let first = least.max((distance - above + stride - 1).div_euclid(stride));
    let last = most.min((distance - below).div_euclid(stride));
    (first..=last).any(|multiple| {
        if *steps == 0 {
            return true;
        }
        *steps -= 1;
        is_reached(rest, distance - multiple * stride, steps)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use tch::{Device, Kind};

    #[test]
    fn overlap_is_exact() {
        assert!(!overlaps(&[2, 3], &[3, 1]) && !overlaps(&[3, 2], &[1, 3]) && !overlaps(&[], &[]));
        assert!(
            !overlaps(&[2, 0], &[0, 0])
                && !overlaps(&[1, 6], &[0, 1])
                && !overlaps(&[3, 2], &[2, 3])
        );
        assert!(overlaps(&[2], &[0]) && overlaps(&[3, 3], &[1, 1]) && overlaps(&[4, 2], &[2, 6]));
    }

    #[test]
    fn memory_in_common() {
        let options = (Kind::Float, Device::Cpu);
        let shared = |a: &Tensor, b: &Tensor| share_memory(a, b).unwrap();
        let packed = Tensor::zeros([2, 5, 3, 4, 8], options);
        let part = |index| packed.select(2, index);
        assert!(!shared(&part(0), &part(1)) && !shared(&part(2), &part(1)));
        assert!(shared(&part(0), &part(0)) && shared(&part(1), &part(1).narrow(1, 4, 1)));
        // Heads of one projection, of which the second part has fewer; transposed memory.
        let heads = Tensor::zeros([2, 5, 6, 8], options);
        assert!(!shared(&heads.narrow(2, 0, 4), &heads.narrow(2, 4, 2)));
        assert!(shared(&heads.narrow(2, 0, 5), &heads.narrow(2, 4, 2)));
        let turned = heads.transpose(1, 2);
        assert!(!shared(&turned.narrow(2, 0, 3), &turned.narrow(2, 3, 2)));
        assert!(shared(&turned.narrow(2, 0, 3), &heads.narrow(1, 2, 3)));
        // Every second element, and bytes of another kind.
        let flat = Tensor::zeros([64], options);
        let (even, odd) = (flat.slice(0, 0, None, 2), flat.slice(0, 1, None, 2));
        assert!(!shared(&even, &odd) && shared(&even, &flat));
        let words = flat.view_dtype(Kind::Half);
        assert!(
            !shared(&words.slice(0, 2, None, 4), &even) && shared(&words.narrow(0, 1, 1), &even)
        );
        // Other memory, no elements, expanded elements.
        assert!(!shared(&flat, &heads) && !shared(&flat.narrow(0, 3, 0), &flat));
        let one = flat.narrow(0, 7, 1).expand([9], false);
        assert!(shared(&one, &flat) && !shared(&one, &flat.narrow(0, 8, 9)));
        // Whether every combination of these overlaps is compared with the list of all elements.
        let offsets = |size: &[i64], stride: &[i64], begin: i64| -> Vec<i64> {
            size.iter().zip(stride).fold(vec![begin], |offsets, (&size, &stride)| {
                let more = |at: i64| (0..size).map(move |index| at + index * stride);
                offsets.into_iter().flat_map(more).collect()
            })
        };
        let memory = Tensor::zeros([400], options);
        let strides = [[20, 4], [12, 5], [7, 3], [6, 2], [9, 9]];
        let (mut apart, mut together) = (0, 0);
        for (a, b) in strides.iter().flat_map(|a| strides.iter().map(move |b| (a, b))) {
            for begin in 0..40 {
                let (size, other) = ([3, 4], [4, 2]);
                let first = memory.as_strided(size, a.as_slice(), 0);
                let second = memory.as_strided(other, b.as_slice(), begin);
                let places = offsets(&size, a, 0);
                let expected = offsets(&other, b, begin).iter().any(|at| places.contains(at));
                assert_eq!(shared(&first, &second), expected, "{a:?} {b:?} {begin}");
                if expected { together += 1 } else { apart += 1 }
            }
        }
        assert!(apart > 100 && together > 100);
    }
}
