//! Where each parameter lies in the flat buffers, and which part of them belongs to a rank. Nothing
//! here touches a tensor.

use std::ops::Range;
use tch::Kind;

/// Each parameter and each part of a rank begins at a multiple of this many bytes, as tensors of
/// libtorch's allocator for CUDA nearly do: products choose their kernels by the alignment.
const ALIGNMENT: usize = 256;

/// What the layout needs to know about a parameter.
#[derive(Clone, Copy, Debug)]
pub(super) struct Entry {
    pub len: i64,
    pub kind: Kind,
}

/// How large buckets may become.
#[derive(Clone, Copy, Debug)]
pub(super) struct Caps {
    /// The largest number of bytes of a bucket. A parameter that is larger has a bucket of its own.
    pub bytes: usize,
    /// The same for the bucket whose gradients are complete first, so that communication begins
    /// early.
    pub first: usize,
}

/// A parameter in a bucket, in values.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Slot {
    pub parameter: usize,
    pub range: Range<i64>,
}

/// Parameters that are communicated together.
#[derive(Clone, Debug)]
pub(super) struct Bucket {
    pub kind: Kind,
    pub slots: Vec<Slot>,
    /// The number of values of each rank's part. The bucket has as many of them as there are ranks.
    pub part: i64,
}

/// The part of a parameter that belongs to a rank, in values.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Piece {
    pub parameter: usize,
    pub bucket: usize,
    /// Within the parameter.
    pub range: Range<i64>,
    /// The first value's place in the rank's part of the bucket.
    pub place: i64,
}

/// All buckets, in the order in which their gradients become complete: the backward pass is taken to
/// reach the parameters in the reverse order of their creation.
#[derive(Clone, Debug)]
pub(super) struct Layout {
    pub buckets: Vec<Bucket>,
    /// For each parameter, its bucket and its slot there.
    pub places: Vec<(usize, usize)>,
}

fn aligned(len: i64, kind: Kind) -> i64 {
    let unit = (ALIGNMENT / kind.elt_size_in_bytes()) as i64;
    (len + unit - 1) / unit * unit
}

/// A bucket that may still grow.
struct Open {
    kind: Kind,
    parameters: Vec<usize>,
    bytes: usize,
}

impl Layout {
    pub fn new(entries: &[Entry], ranks: i64, caps: Caps) -> Layout {
        let mut closed: Vec<Open> = Vec::new();
        let mut open: Vec<Open> = Vec::new();
        for (parameter, Entry { len, kind }) in entries.iter().enumerate().rev() {
            let bytes = aligned(*len, *kind) as usize * kind.elt_size_in_bytes();
            let cap = if closed.is_empty() { caps.first.min(caps.bytes) } else { caps.bytes };
            let known = open.iter().position(|bucket| bucket.kind == *kind);
            let fits = known.is_some_and(|known| open[known].bytes + bytes <= cap);
            if let Some(known) = known.filter(|_| !fits) {
                closed.push(open.remove(known));
            }
            match open.iter_mut().find(|bucket| bucket.kind == *kind) {
                Some(bucket) => {
                    bucket.parameters.push(parameter);
                    bucket.bytes += bytes;
                }
                None => open.push(Open { kind: *kind, parameters: vec![parameter], bytes }),
            }
        }
        closed.extend(open);
        // A bucket is complete when its parameter that was created first has its gradient.
        closed.sort_by_key(|bucket| std::cmp::Reverse(bucket.parameters.last().copied()));
        Layout::of_buckets(entries, ranks, &closed)
    }

    fn of_buckets(entries: &[Entry], ranks: i64, closed: &[Open]) -> Layout {
        let mut places = vec![(0, 0); entries.len()];
        let mut buckets = Vec::with_capacity(closed.len());
        for Open { kind, parameters, .. } in closed {
            let (mut slots, mut end) = (Vec::with_capacity(parameters.len()), 0);
            for &parameter in parameters {
                places[parameter] = (buckets.len(), slots.len());
                let len = entries[parameter].len;
                slots.push(Slot { parameter, range: end..end + len });
                end += aligned(len, *kind);
            }
            let part = aligned((end + ranks - 1) / ranks, *kind);
            buckets.push(Bucket { kind: *kind, slots, part });
        }
        Layout { buckets, places }
    }

    pub fn slot(&self, parameter: usize) -> &Slot {
        let (bucket, slot) = self.places[parameter];
        &self.buckets[bucket].slots[slot]
    }

    /// The part of a parameter that belongs to a rank, if one does.
    pub fn piece(&self, parameter: usize, rank: i64) -> Option<Piece> {
        let bucket = self.places[parameter].0;
        let part = self.buckets[bucket].part;
        let slot = &self.slot(parameter).range;
        let own = rank * part..(rank + 1) * part;
        let both = overlap(slot, &own)?;
        Some(Piece {
            parameter,
            bucket,
            range: both.start - slot.start..both.end - slot.start,
            place: both.start - own.start,
        })
    }

    /// All pieces of a rank, in the order of the parameters.
    pub fn pieces(&self, rank: i64) -> Vec<Piece> {
        (0..self.places.len()).filter_map(|parameter| self.piece(parameter, rank)).collect()
    }
}

/// What two ranges have in common, if that is not nothing.
pub(super) fn overlap(left: &Range<i64>, right: &Range<i64>) -> Option<Range<i64>> {
    let both = left.start.max(right.start)..left.end.min(right.end);
    (both.start < both.end).then_some(both)
}

#[cfg(test)]
mod tests {
    use super::*;

    const CAPS: Caps = Caps { bytes: 4096, first: 1024 };

    fn floats(lens: &[i64]) -> Vec<Entry> {
        lens.iter().map(|&len| Entry { len, kind: Kind::Float }).collect()
    }

    /// The parameters of each bucket.
    fn contents(layout: &Layout) -> Vec<Vec<usize>> {
        let parameters = |bucket: &Bucket| bucket.slots.iter().map(|slot| slot.parameter).collect();
        layout.buckets.iter().map(parameters).collect()
    }

    #[test]
    fn buckets_are_in_the_order_of_the_backward_pass() {
        // In bytes: 40, 2000, 2400, 800, 100; those that were created last are first.
        let layout = Layout::new(&floats(&[10, 500, 600, 200, 25]), 2, CAPS);
        assert_eq!(contents(&layout), [vec![4], vec![3, 2], vec![1, 0]]);
    }

    #[test]
    fn a_large_parameter_has_its_own_bucket() {
        let layout = Layout::new(&floats(&[5000, 10, 10]), 2, CAPS);
        assert_eq!(contents(&layout), [vec![2, 1], vec![0]]);
        let layout = Layout::new(&floats(&[10, 5000, 10]), 2, CAPS);
        assert_eq!(contents(&layout), [vec![2], vec![1], vec![0]]);
    }

    #[test]
    fn each_kind_has_buckets_of_its_own() {
        let kinds = [Kind::Float, Kind::BFloat16, Kind::Float, Kind::BFloat16, Kind::Float];
        let entries = kinds.map(|kind| Entry { len: 64, kind });
        let layout = Layout::new(&entries, 2, CAPS);
        assert_eq!(contents(&layout), [vec![3, 1], vec![4, 2, 0]]);
        assert_eq!(layout.buckets[0].kind, Kind::BFloat16);
    }

    #[test]
    fn every_value_belongs_to_exactly_one_rank() {
        let lens = [0, 1, 7, 64, 65, 1000, 4097, 3, 0, 12345];
        for ranks in 1..=5 {
            for kind in [Kind::Float, Kind::Half, Kind::Double] {
                let entries = lens.map(|len| Entry { len, kind });
                let layout = Layout::new(&entries, ranks, CAPS);
                for (parameter, &len) in lens.iter().enumerate() {
                    let mut end = 0;
                    for piece in (0..ranks).filter_map(|rank| layout.piece(parameter, rank)) {
                        assert_eq!((piece.parameter, piece.range.start), (parameter, end));
                        end = piece.range.end;
                    }
                    assert_eq!(end, len, "parameter {parameter} on {ranks} ranks");
                }
            }
        }
    }

    #[test]
    fn slots_and_parts_are_aligned_and_do_not_overlap() {
        let lens = [3, 700, 64, 1, 9000];
        for (kind, unit) in [(Kind::Float, 64), (Kind::BFloat16, 128), (Kind::Double, 32)] {
            let entries = lens.map(|len| Entry { len, kind });
            let layout = Layout::new(&entries, 3, CAPS);
            for bucket in &layout.buckets {
                assert_eq!(bucket.part % unit, 0);
                let mut end = 0;
                for Slot { range, .. } in &bucket.slots {
                    assert!(range.start >= end && range.start % unit == 0);
                    end = range.end;
                }
                assert!(end <= 3 * bucket.part);
            }
        }
    }

    #[test]
    fn a_piece_lies_where_its_slot_says() {
        let layout = Layout::new(&floats(&[100, 1000]), 3, Caps { bytes: 1 << 20, first: 1 << 20 });
        // The second parameter is first: 1000 values, aligned to 1024, and then 100; parts of 384.
        assert_eq!((layout.buckets.len(), layout.buckets[0].part), (1, 384));
        let piece = |parameter, rank| layout.piece(parameter, rank).map(|p| (p.range, p.place));
        assert_eq!(piece(1, 1), Some((384..768, 0)));
        assert_eq!(piece(1, 2), Some((768..1000, 0)));
        assert_eq!(piece(0, 2), Some((0..100, 256)));
        assert_eq!(piece(0, 0), None);
        assert_eq!(layout.pieces(2).len(), 2);
    }

    #[test]
    fn ranks_without_values_have_no_piece() {
        let layout = Layout::new(&floats(&[5, 5]), 4, CAPS);
        // Two slots of 64: parts of 64.
        assert_eq!(layout.pieces(0).len(), 1);
        assert_eq!(layout.pieces(1).len(), 1);
        assert!(layout.pieces(2).is_empty() && layout.pieces(3).is_empty());
    }
}
