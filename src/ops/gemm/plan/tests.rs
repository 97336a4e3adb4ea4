use super::super::costs::COSTS;
use super::*;
use std::ptr::{dangling_mut, null, without_provenance};

/// What is known besides the product.
#[derive(Clone, Copy, Debug, Default)]
struct Known {
    tf32: bool,
    skinny: Option<Skinny>,
    padding: Option<Padding>,
    hopper: bool,
}

const PLAIN: Known = Known { tf32: false, skinny: None, padding: None, hopper: false };

fn choose(product: &Product, known: &Known) -> Way {
    let described = Description {
        product: *product,
        skinny: known.skinny.unwrap_or_default(),
        padding: known.padding.unwrap_or_default(),
        size: [0; MOST_DIMS],
        dims: 0,
        device: 0,
        tf32: known.tf32,
        small: true,
        hopper: known.hopper,
    };
    super::choose(&described, || Ok((COSTS.h200(), 132))).expect("a way")
}

/// A product of contiguous matrices.
fn product(kind: Kind, [m, k, n]: [i64; 3], bias: Bias) -> Product {
    let matrices = |row: i64| Matrices { data: without_provenance(256), row, column: 1, batch: 0 };
    let bias = match bias {
        Bias::None => Matrices { data: null(), ..matrices(0) },
        Bias::Row => matrices(0),
        Bias::Full => matrices(n),
    };
    Product {
        batch: 1,
        m,
        n,
        k,
        lhs: matrices(k),
        rhs: matrices(n),
        bias,
        out: dangling_mut(),
        kind: kind.code(),
        relu: 1,
    }
}

#[test]
fn large_products_take_a_plan_and_without_a_bias_libtorch() {
    for kind in [Kind::Float, Kind::Half, Kind::BFloat16] {
        let way = |bias| choose(&product(kind, [1024, 1024, 1024], bias), &PLAIN);
        assert_eq!(
            [way(Bias::None), way(Bias::Row), way(Bias::Full)],
            [Way::Composite, Way::Plan, Way::Plan]
        );
    }
    // In f64 up to 2²⁴ multiplications.
    let way = |m| choose(&product(Kind::Double, [m, 256, 256], Bias::Row), &PLAIN);
    assert_eq!((way(256), way(257)), (Way::Plan, Way::Composite));
}

#[test]
fn small_products_have_few_tiles_and_short_sums() {
    let way = |kind, sizes, bias| choose(&product(kind, sizes, bias), &PLAIN);
    for kind in [Kind::Half, Kind::Float, Kind::Double] {
        assert_eq!(way(kind, [64, 16, 64], Bias::Row), Way::Small, "{kind:?}");
        assert_eq!(way(kind, [16, 32, 16], Bias::None), Way::Small, "{kind:?}");
        // Many tiles, and a long sum.
        assert_ne!(way(kind, [1024, 32, 1024], Bias::Row), Way::Small, "{kind:?}");
        assert_ne!(way(kind, [16, 1024, 16], Bias::Row), Way::Small, "{kind:?}");
    }
}

#[test]
fn skinny_products_take_dot_products_where_the_kernel_reads_them() {
    let way =
        |kind, sizes, bias, skinny| choose(&product(kind, sizes, bias), &Known { skinny, ..PLAIN });
    let along_k = |rows, shorts| Some(Skinny { rows, shorts, by_rows: 1, by_tensor: 0 });
    let along_rows = |rows, shorts| Some(Skinny { rows, shorts, by_rows: 0, by_tensor: 0 });
    let by_tensor = |rows, shorts| Some(Skinny { rows, shorts, by_rows: 1, by_tensor: 1 });
    assert_eq!(way(Kind::Half, [4, 2048, 132], Bias::Row, along_k(132, 4)), Way::Skinny);
    assert_eq!(way(Kind::Float, [1, 1000, 1000], Bias::Row, along_k(1000, 1)), Way::Skinny);
    assert_eq!(way(Kind::Float, [2, 64, 5000], Bias::None, along_rows(5000, 2)), Way::Skinny);
    // A library splits a long sum between blocks, unless there are rows for all multiprocessors.
    let long = [1, 100_352, 10];
    assert_ne!(way(Kind::Float, long, Bias::Row, along_k(10, 1)), Way::Skinny);
    assert_ne!(way(Kind::BFloat16, [1, 1_000_000, 1], Bias::None, along_k(1, 1)), Way::Skinny);
    assert_eq!(way(Kind::Float, [1, 100_352, 132], Bias::Row, along_k(132, 1)), Way::Skinny);
    // Tensor cores take up to 8.
    assert_eq!(way(Kind::BFloat16, [8, 2048, 4096], Bias::Row, by_tensor(4096, 8)), Way::Skinny);
    assert_ne!(way(Kind::BFloat16, [9, 2048, 4096], Bias::Row, by_tensor(4096, 9)), Way::Skinny);
    // Too many rows, and no such kernel.
    assert_ne!(way(Kind::Half, [5, 512, 500], Bias::Row, along_k(500, 5)), Way::Skinny);
    assert_ne!(way(Kind::Half, [4, 512, 500], Bias::Row, None), Way::Skinny);
}

#[test]
fn padded_copies_pay_off_where_the_product_is_long() {
    let elements = |[m, k, n]: [i64; 3]| {
        let up = |size: i64| ((size + 7) / 8 * 8) as f64;
        let (lhs, rhs, out) = (m as f64 * up(k), up(k) * up(n), m as f64 * up(n));
        Some(Padding { lhs, rhs, out, copied: lhs + rhs + out, launches: 2 })
    };
    let way = |kind, sizes, bias, tf32| {
        let known = Known { tf32, padding: elements(sizes), ..PLAIN };
        choose(&product(kind, sizes, bias), &known)
    };
    for kind in [Kind::Half, Kind::BFloat16] {
        assert_eq!(way(kind, [1001, 1001, 1001], Bias::Row, false), Way::Padded);
        assert_eq!(way(kind, [1001, 101, 1001], Bias::None, false), Way::Composite);
        assert_eq!(way(kind, [63, 4001, 4001], Bias::Row, false), Way::Plan);
    }
    assert_eq!(way(Kind::Float, [1501, 1501, 1501], Bias::Row, true), Way::Padded);
    assert_eq!(way(Kind::Float, [1501, 1501, 1501], Bias::Row, false), Way::Plan);
    assert_eq!(way(Kind::Double, [1501, 1501, 1501], Bias::None, true), Way::Composite);
}

/// Found by `cargo xtask tune`: an address off 16 bytes, and narrow products of whole rows.
#[test]
fn narrow_products_are_padded_where_only_an_address_is_off() {
    let way = |sizes, bias, offset| {
        let kinds = (Kind::BFloat16, false);
        let described = contiguous(([1, 1], sizes), bias, kinds, offset, Layout::Linear);
        super::choose(&described, || Ok((COSTS.h200(), 132))).expect("a way")
    };
    assert_eq!(way([8, 3432, 5224], Bias::Row, 19), Way::Padded);
    assert_eq!(way([16, 2360, 1824], Bias::Row, 7), Way::Padded);
    // The copy would be of the large factor: 132 µs for 92.
    assert_eq!(way([13_136, 5760, 8], Bias::Row, 26), Way::Plan);
    assert_eq!(way([1024, 5952, 64], Bias::Row, 0), Way::Plan);
    // Without a bias, and where rows are not whole.
    assert_eq!(way([1024, 5952, 48], Bias::None, 3), Way::Composite);
    assert_ne!(way([4631, 5890, 50], Bias::Row, 0), Way::Padded);
}

#[test]
fn a_full_bias_takes_the_kernel_of_9_0_or_libtorch() {
    let gpu = Known { hopper: true, ..PLAIN };
    let way = |sizes, known: &Known| choose(&product(Kind::Half, sizes, Bias::Full), known);
    assert_eq!(way([4096, 1024, 2048], &gpu), Way::Hopper);
    assert_eq!(way([4096, 1024, 2048], &PLAIN), Way::Plan);
    // K, the number of tiles, and rows that begin in the middle of a cache line.
    assert_eq!(way([4096, 448, 2048], &gpu), Way::Plan);
    assert_eq!(way([4096, 2112, 2048], &gpu), Way::Plan);
    assert_eq!(way([4096, 1024, 1920], &gpu), Way::Plan);
    assert_eq!(way([4096, 1024, 2056], &gpu), Way::Plan);
    assert_eq!(choose(&product(Kind::Half, [4096, 1024, 2048], Bias::Row), &gpu), Way::Plan);
    let batch = |batch, sizes| Product { batch, ..product(Kind::Half, sizes, Bias::Full) };
    assert_eq!(choose(&batch(16, [1024, 1024, 1024]), &gpu), Way::Hopper);
    assert_eq!(choose(&batch(10, [3840, 1280, 4160]), &gpu), Way::Plan);
    // Rows of the bias that do not begin at multiples of 16 bytes.
    assert_eq!(way([4096, 1024, 2049], &gpu), Way::Composite);
    let float = product(Kind::Float, [4096, 1024, 2049], Bias::Full);
    assert_eq!(choose(&float, &PLAIN), Way::Plan);
    assert_eq!(choose(&float, &Known { tf32: true, ..PLAIN }), Way::Composite);
}

#[test]
fn no_size_overflows() {
    const MOST: i64 = i32::MAX as i64;
    let sizes = [0, 1, 2, 4, 5, 63, 128, 1000, 1 << 20, MOST];
    for kind in [Kind::Float, Kind::Double, Kind::Half] {
        for bias in [Bias::None, Bias::Row, Bias::Full] {
            for m in sizes {
                for k in sizes {
                    for n in sizes {
                        let [m_f, k_f, n_f] = [m, k, n].map(|size| size as f64);
                        let (lhs, rhs, out) = (m_f * k_f, k_f * n_f, m_f * n_f);
                        let copied = lhs + rhs + out;
                        let known = Known {
                            tf32: true,
                            skinny: Some(Skinny { rows: m.max(n), ..Default::default() }),
                            padding: Some(Padding { lhs, rhs, out, copied, launches: 2 }),
                            hopper: true,
                        };
                        for batch in [1, 65536, MOST] {
                            let product = Product { batch, ..product(kind, [m, k, n], bias) };
                            assert_ne!(choose(&product, &known), Way::Automatic);
                        }
                    }
                }
            }
        }
    }
}
