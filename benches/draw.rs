//! Draws random sizes, which nobody chose by hand. The same seed gives the same sizes on every
//! machine.

/// A SplitMix64 random number generator.
pub struct Draw(u64);

impl Draw {
    pub fn new(seed: u64) -> Self {
        Draw(seed)
    }

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

/// The sizes of a product.
#[derive(Clone, Copy)]
pub struct Product {
    pub batch: i64,
    pub m: i64,
    pub k: i64,
    pub n: i64,
    /// Whether the bias has the output's shape instead of being a row.
    pub has_full_bias: bool,
}

/// Draws products with M, K and N up to 8192. Half of them have batches of up to 32, and a fifth of
/// those have a bias of full shape. No product needs more than 2³⁸ multiplications.
pub fn products(seed: u64, count: usize) -> Vec<Product> {
    const MOST: i64 = 1 << 38;
    let mut draw = Draw::new(seed);
    let mut one = || loop {
        let step = draw.step();
        let [m, k, n] = [(); 3].map(|()| draw.size(8192, step));
        let batch = if draw.one_in(2) { 1 } else { draw.size(32, 1) };
        let has_full_bias = draw.one_in(5) && batch > 1;
        if batch * m * k * n <= MOST {
            return Product { batch, m, k, n, has_full_bias };
        }
    };
    (0..count).map(|_| one()).collect()
}

/// Draws up to 200,000 rows and 70,000 columns, with at most 2²⁸ elements.
pub fn rows_and_columns(seed: u64, count: usize) -> Vec<(i64, i64)> {
    const MOST: i64 = 1 << 28;
    let mut draw = Draw::new(seed);
    let mut one = || loop {
        let step = draw.step();
        let size = (draw.size(200_000, 1), draw.size(70_000, step));
        if size.0 * size.1 <= MOST {
            return size;
        }
    };
    (0..count).map(|_| one()).collect()
}

/// Draws (B, F, H) up to 4096, 2048 and 2048.
pub fn cells(seed: u64, count: usize) -> Vec<(i64, i64, i64)> {
    let mut draw = Draw::new(seed);
    let mut one = || {
        let step = draw.step();
        (draw.size(4096, 1), draw.size(2048, step), draw.size(2048, step))
    };
    (0..count).map(|_| one()).collect()
}
