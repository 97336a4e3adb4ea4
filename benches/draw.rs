//! Draws random sizes, which nobody chose by hand. The same seed gives the same sizes on every
//! machine.

/// A SplitMix64 random number generator.
pub struct Draw(u64);

impl Draw {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// A number from 0 up to, but not including, 1.
    fn uniform(&mut self) -> f64 {
        (self.next() >> 11) as f64 / (1_u64 << 53) as f64
    }

    /// A multiple of `step` from 1 to about `most`; each order of magnitude is equally likely.
    pub fn size(&mut self, most: i64, step: i64) -> i64 {
        let size = (self.uniform() * ((most + 1) as f64).ln()).exp() as i64;
        (size.clamp(1, most) + step - 1) / step * step
    }

    /// The step of a size: 64, 8 or 1.
    pub fn step(&mut self) -> i64 {
        [64, 8, 1][(self.next() % 3) as usize]
    }

    /// True in one of `many` cases.
    pub fn one_in(&mut self, many: u64) -> bool {
        self.next().is_multiple_of(many)
    }
}

impl Draw {
    /// The generator of one of many cases.
    pub fn of(seed: u64, case: u64) -> Self {
        let mut draw = Draw(seed.wrapping_mul(0x2545_f491_4f6c_dd1d).wrapping_add(case));
        draw.next();
        draw
    }

    /// Sizes up to these, whose product is at most `limit`: the first, the rows, in a step of its own,
    /// and the others in the same step.
    pub fn sizes<const N: usize>(&mut self, most: [i64; N], limit: i64) -> [i64; N] {
        loop {
            let mut sizes = most;
            let mut step = self.step();
            for (index, size) in sizes.iter_mut().enumerate() {
                if index == 1 {
                    step = self.step();
                }
                *size = self.size(*size, step);
            }
            let product = sizes.iter().try_fold(1_i64, |all, &size| all.checked_mul(size));
            if product.is_some_and(|product| product <= limit) {
                return sizes;
            }
        }
    }

    /// Up to 200,000 rows, and columns of every step; at most 2²⁸ elements.
    pub fn rows_and_columns(&mut self, most_columns: i64) -> (i64, i64) {
        const MOST: i64 = 1 << 28;
        loop {
            let step = self.step();
            let size = (self.size(200_000, 1), self.size(most_columns, step));
            if size.0 * size.1 <= MOST {
                return size;
            }
        }
    }

    /// How many elements lie between a multiple of the widest load and a tensor's first element: in
    /// half of the cases none.
    pub fn offset(&mut self) -> i64 {
        if self.one_in(2) { 0 } else { self.size(64, 1) }
    }
}

/// No product needs more multiplications.
pub const MOST_PRODUCTS: i64 = 1 << 38;
