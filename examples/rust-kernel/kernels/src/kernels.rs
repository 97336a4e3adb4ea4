//! The kernels. A tile is what one block computes; how many threads do it, and which
//! instructions, is the compiler's choice.
//!
//! `E` is the kind of the tensors, and `C` the one that is computed in: f32 for the half kinds. What
//! lies outside of a tensor is read as 0 and not written, so that no size has to be a multiple of a
//! tile's.

#[cutile::module]
pub mod tile {
    use cutile::core::*;

    /// y = x / (1 + exp(-x))
    #[cutile::entry()]
    fn silu<E: ElementType, C: ElementType, const B: i32>(
        y: &mut Tensor<E, { [B] }>,
        x: &Tensor<E, { [-1] }>,
    ) {
        let v: Tile<C, { [B] }> = convert_tile(x.load_like(y));
        let zero: Tile<C, { [B] }> = constant(C::ZERO, y.shape());
        let one: Tile<C, { [B] }> = exp(zero);
        let result: Tile<E, { [B] }> = convert_tile(v / (one + exp(zero - v)));
        y.store(result);
    }

    /// dx = g * s * (1 + x * (1 - s)), where s = 1 / (1 + exp(-x))
    #[cutile::entry()]
    fn silu_backward<E: ElementType, C: ElementType, const B: i32>(
        dx: &mut Tensor<E, { [B] }>,
        x: &Tensor<E, { [-1] }>,
        g: &Tensor<E, { [-1] }>,
    ) {
        let v: Tile<C, { [B] }> = convert_tile(x.load_like(dx));
        let g: Tile<C, { [B] }> = convert_tile(g.load_like(dx));
        let zero: Tile<C, { [B] }> = constant(C::ZERO, dx.shape());
        let one: Tile<C, { [B] }> = exp(zero);
        let s = one / (one + exp(zero - v));
        let result: Tile<E, { [B] }> = convert_tile(g * s * (one + v * (one - s)));
        dx.store(result);
    }

    /// z = max(x @ y + bias, 0), where NaN stays NaN
    ///
    /// There may be fewer blocks than tiles: each block computes one tile after another. The order is
    /// by bands of 8 rows of tiles, so that what runs at the same time shares rows and columns.
    #[cutile::entry()]
    fn matmul_add_relu<
        E: ElementType,
        C: ElementType,
        const BM: i32,
        const BN: i32,
        const BK: i32,
    >(
        mut z: MappedPartitionMut<E, { [BM, BN] }, { [8, 1] }>,
        x: &Tensor<E, { [-1, -1] }>,
        y: &Tensor<E, { [-1, -1] }>,
        bias: &Tensor<E, { [-1] }>,
    ) {
        let rows = x.partition(const_shape![BM, BK]);
        let columns = y.partition(const_shape![BK, BN]);
        let biases = bias.partition(const_shape![BN]);
        for index in z.iter_indices() {
            let (row, column) = index.components();
            let zero: Tile<C, { [BM, BN] }> = constant(C::ZERO, const_shape![BM, BN]);
            let mut sum = zero;
            for k in 0i32..num_tiles(&rows, 1) {
                sum = mma(rows.load([row, k]), columns.load([k, column]), sum);
            }
            let b: Tile<C, { [BN] }> = convert_tile(biases.load([column]));
            let sum = sum + b.reshape(const_shape![1, BN]).broadcast(const_shape![BM, BN]);
            // A maximum would make a NaN 0. No comparison with a NaN is true.
            let negative: Tile<bool, { [BM, BN] }> = lt_tile(sum, zero);
            let result: Tile<E, { [BM, BN] }> = convert_tile(select(negative, zero, sum));
            z.store(result, index);
        }
    }
}
