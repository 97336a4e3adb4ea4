//! Into how many chunks the rows are cut.

use crate::ops::kinds::Kind;

/// What the cuts depend on.
pub(super) struct Sizes {
    pub rows: i64,
    pub classes: i64,
    pub features: i64,
    pub kind: Kind,
    pub is_cuda: bool,
    /// The kind of the weight's gradient, if it is computed: `kind` or `Float`.
    pub of_weight: Option<Kind>,
}

#[derive(Debug, PartialEq)]
pub(super) struct Chunks {
    /// The rows of each chunk but the last one, which may have fewer; at least 1.
    pub rows: i64,
    /// Whether the weight's gradient is added up in `Float` although the kind is a half kind.
    pub in_float: bool,
}

/// Rounded once for each of so many chunks, a sum has less than twice the error of one rounding.
const MOST_ROUNDED: i64 = 6;
/// Chunks are multiples of so many rows, as the tiles of products are.
const TILE: i64 = 256;
/// A chunk whose weight has no gradient reads the weight twice. The operations of so many rows take longer.
const ROWS_WORTH_A_WEIGHT: i64 = 1024;
/// A chunk of logits of so many bytes is small enough, however few chunks there are.
const SMALL: i64 = 64 << 20;

impl Chunks {
    /// `memory` bounds the bytes of a chunk of logits and of a sum in `Float`. It is exceeded only if
    /// otherwise the weight's gradient were rounded more than six times.
    pub(super) fn new(sizes: &Sizes, memory: Option<i64>, in_float: bool) -> Chunks {
        let of_row = (sizes.classes * sizes.kind.elt_size_in_bytes() as i64).max(1);
        let few = match sizes.of_weight {
            Some(_) => to_tiles_above(div_ceil(sizes.rows, MOST_ROUNDED)),
            None => ROWS_WORTH_A_WEIGHT,
        };
        let in_float = in_float && sizes.can_add_in_float();
        let Some(memory) = memory else {
            let rows = few.max(to_tiles_below(SMALL / of_row)).max(sizes.rows_worth_a_sum());
            return Chunks { rows, in_float };
        };
        let rows = to_tiles_below(memory / of_row);
        let is_rounded_often = div_ceil(sizes.rows, rows) > MOST_ROUNDED;
        if !(in_float || is_rounded_often && sizes.can_add_in_float()) {
            return Chunks { rows, in_float };
        }
        let of_sum = sizes.bytes_of_sum();
        let rows_beside_sum = to_tiles_below((memory - of_sum) / of_row);
        let at_end = sizes.bytes_at_end();
        if rows_beside_sum >= TILE.min(sizes.rows) && at_end <= memory {
            return Chunks { rows: rows_beside_sum, in_float: true };
        }
        match in_float || at_end.max(of_sum + TILE * of_row) < few * of_row {
            true => Chunks { rows: TILE, in_float: true },
            false => Chunks { rows: few, in_float: false },
        }
    }
}

impl Sizes {
    /// A chunk reads and writes the weight's gradient, V·D values, in addition to its logits, V
    /// values a row. From two thirds of D rows on, the logits are at least two thirds of these.
    fn rows_worth_a_sum(&self) -> i64 {
        if self.of_weight.is_some() { to_tiles_above(div_ceil(2 * self.features, 3)) } else { 0 }
    }

    fn can_add_in_float(&self) -> bool {
        self.of_weight.is_some() && matches!(self.kind, Kind::Half | Kind::BFloat16)
    }

    /// The bytes of a sum in `Float`, less those of the gradient that it becomes. On the CPU each
    /// chunk's product is computed in memory of its own.
    fn bytes_of_sum(&self) -> i64 {
        let size = |kind: Kind| kind.elt_size_in_bytes() as i64;
        let of_gradient = self.of_weight.map_or(0, size);
        let of_product = if self.is_cuda { 0 } else { size(self.kind) };
        self.classes * self.features * (4 - of_gradient + of_product)
    }

    /// The bytes of a sum in `Float` in the end, besides the gradient that is made of it: there are no
    /// logits any more, and a gradient in `Float` is the sum itself.
    fn bytes_at_end(&self) -> i64 {
        let is_gradient = self.of_weight == Some(Kind::Float);
        if is_gradient { 0 } else { self.classes * self.features * 4 }
    }
}

fn div_ceil(a: i64, b: i64) -> i64 {
    a / b + i64::from(a % b != 0)
}

/// Fewer rows than a tile stay as they are, here and below.
fn to_tiles_above(rows: i64) -> i64 {
    if rows < TILE { rows.max(1) } else { div_ceil(rows, TILE) * TILE }
}

fn to_tiles_below(rows: i64) -> i64 {
    if rows < TILE { rows.max(1) } else { rows / TILE * TILE }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sizes(rows: i64, features: i64, classes: i64) -> Sizes {
        let kind = Kind::BFloat16;
        Sizes { rows, classes, features, kind, is_cuda: true, of_weight: Some(kind) }
    }

    #[test]
    fn few_chunks_by_default() {
        let of = |sizes: &Sizes| Chunks::new(sizes, None, false);
        assert_eq!(of(&sizes(16_384, 768, 50_304)), Chunks { rows: 2816, in_float: false });
        assert_eq!(of(&sizes(8192, 4096, 128_256)), Chunks { rows: 2816, in_float: false });
        let alone = Sizes { of_weight: None, ..sizes(8192, 4096, 128_256) };
        assert_eq!(of(&alone), Chunks { rows: 1024, in_float: false });
        // 64 MiB are enough for all rows.
        assert!(of(&sizes(1000, 64, 100)).rows >= 1000);
        assert!(of(&sizes(0, 0, 0)).rows >= 1);
    }

    #[test]
    fn the_memory_is_a_bound_unless_the_gradient_were_rounded_too_often() {
        for memory in [1_i64, 1 << 20, 100 << 20, 300 << 20, 1 << 40] {
            let all = [sizes(16_384, 768, 50_304), sizes(16_384, 2048, 248_320), sizes(7, 3, 5)];
            let wide = all.iter().map(|sizes| Sizes { of_weight: Some(Kind::Float), ..*sizes });
            for sizes in wide.collect::<Vec<_>>().into_iter().chain(all) {
                let chunks = Chunks::new(&sizes, Some(memory), false);
                let sum = if chunks.in_float { sizes.bytes_of_sum() } else { 0 };
                let of_end = sizes.bytes_at_end();
                let at_end = if chunks.in_float { of_end } else { 0 };
                let bytes = at_end.max(chunks.rows * sizes.classes * 2 + sum);
                let count = div_ceil(sizes.rows, chunks.rows);
                assert!(chunks.in_float || count <= MOST_ROUNDED, "{memory} {chunks:?}");
                let least = (sizes.bytes_of_sum() + TILE * sizes.classes * 2)
                    .max(of_end)
                    .min(to_tiles_above(div_ceil(sizes.rows, 6)) * sizes.classes * 2);
                assert!(bytes <= memory.max(least), "{memory} {chunks:?}");
                let alone = Sizes { of_weight: None, ..sizes };
                let chunks = Chunks::new(&alone, Some(memory), true);
                let bytes = chunks.rows * alone.classes * 2;
                assert!(!chunks.in_float && (chunks.rows == 1 || bytes <= memory));
            }
        }
    }

    #[test]
    fn many_chunks_are_added_up_in_float() {
        let sizes = sizes(16_384, 768, 50_304);
        let of = |mebibytes: i64| Chunks::new(&sizes, Some(mebibytes << 20), false);
        assert_eq!(of(300), Chunks { rows: 3072, in_float: false });
        assert_eq!(of(200), Chunks { rows: 1280, in_float: true });
        // There is no room for the sum, and it is smaller than six chunks.
        assert_eq!(of(80), Chunks { rows: 256, in_float: true });
        let asked = Chunks::new(&sizes, None, true);
        assert_eq!(asked, Chunks { rows: 2816, in_float: true });
        // A gradient in `Float` is the sum itself.
        let wide = Sizes { of_weight: Some(Kind::Float), ..sizes };
        assert_eq!((wide.bytes_of_sum(), wide.bytes_at_end()), (0, 0));
        let of = |mebibytes: i64| Chunks::new(&wide, Some(mebibytes << 20), false);
        assert_eq!(of(200), Chunks { rows: 2048, in_float: true });
        let single = Sizes { kind: Kind::Float, of_weight: Some(Kind::Float), ..sizes };
        assert!(!Chunks::new(&single, Some(1), true).in_float);
    }
}
