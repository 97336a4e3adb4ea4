//! What a caller sees of a result, apart from its values, is the same by each way.

use super::*;

#[test]
fn each_way_gives_the_same_sizes_kinds_strides_and_memory() {
    use NormWay::{Automatic, Cluster, Few, FewPasses, InPlace, Passes, Registers, Ring};
    let ways = [Automatic, Registers, Cluster, Ring, InPlace, Few, Passes, FewPasses];
    let of = |case: Case, input: &[&[i64]]| {
        support::alike::assert_alike(&ways, &[input], |way, arguments| {
            Case { way, ..case }.fused(arguments)
        });
    };
    for input in
        [&[6, 40][..], &[2, 3, 33], &[1, 5], &[5, 1], &[1, 1], &[0, 5], &[5, 0], &[3, 4100]]
    {
        let parameter = &input[input.len() - 1..];
        of(AFFINE, &[input, parameter, parameter]);
        of(Case { bias: false, ..AFFINE }, &[input, parameter]);
        of(Case { weight: false, ..AFFINE }, &[input, parameter]);
        of(PLAIN, &[input]);
    }
    of(Case { dims: 2, ..AFFINE }, &[&[4, 2, 33], &[2, 33], &[2, 33]]);
    of(Case { dims: 2, ..AFFINE }, &[&[4, 1, 33], &[1, 33], &[1, 33]]);
}
