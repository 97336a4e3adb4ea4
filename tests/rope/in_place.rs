//! Tests of `in_place`.

use super::*;
use tch_extension::testing::ConformanceOptions;

fn in_place(case: Case) -> RopeOptions {
    RopeOptions { in_place: true, ..case.options() }
}

/// In place gives the same bits in the memory of q and k, which libtorch counts as changed.
#[test]
fn in_place_gives_the_same_bits() {
    for (device, kind) in devices().into_iter().flat_map(|d| KINDS.map(|kind| (d, kind))) {
        for (case, d) in cases().flat_map(|case| [64, 80, 20, 7].map(|d| (case, d))) {
            let packed = Tensor::randn([2, 3, 3, 4, d], (Kind::Float, device)).to_kind(kind);
            let before = packed.copy();
            let part = |of: &Tensor, index| of.select(2, index);
            let expected = case
                .call(f_rope, &[part(&packed, 0), part(&packed, 1)], case.options())
                .expect("outputs");
            assert!(packed.equal(&before), "unchanged");
            let (q, k) = (part(&packed, 0), part(&packed, 1));
            let version = q.internal_version();
            let found = case.call(f_rope, &[q, k], in_place(case)).expect("in place");
            for (place, (found, expected)) in found.iter().zip(&expected).enumerate() {
                assert!(found.equal(expected), "{kind:?} {case:?} {d} on {device:?}");
                assert!(part(&packed, place as i64).equal(expected));
                assert_eq!(found.data_ptr(), part(&packed, place as i64).data_ptr());
            }
            assert!(part(&packed, 2).equal(&part(&before, 2)), "the values are not touched");
            assert!(packed.internal_version() > version);
        }
    }
}

#[test]
fn conformance_in_place() {
    let options = ConformanceOptions { changed_inputs: &[0, 1], ..Default::default() };
    for case in cases() {
        case.suite(|suite| {
            let fused = |inputs: &[Tensor]| case.call(f_rope, inputs, in_place(case));
            let in_place = Suite { fused: &fused, ..*suite };
            in_place.conformance_with(&options, |kind, device| {
                let sizes = [[2, 3, 2, 8], [3, 1, 2, 6], [2, 3, 0, 4]];
                // One case of each convention in each layout.
                match case.rest {
                    5 => case.samples(&sizes, kind, device),
                    _ => case.table(&sizes).samples(kind, device).expect("samples"),
                }
            });
        });
    }
}

/// The gradients of two views of one packed projection that are changed in place, each the first input
/// of its own node, are those of the reference.
#[test]
fn gradients_of_a_packed_projection() {
    for (device, interleaved) in
        devices().into_iter().flat_map(|device| [(device, false), (device, true)])
    {
        let leaf = Tensor::randn([2, 3, 3, 2, 20], (Kind::Double, device)).set_requires_grad(true);
        let case = Case { interleaved, rest: 4, float_tables: false };
        let run = |in_place_of: bool| {
            let packed = &leaf * 1.5;
            let parts = [packed.select(2, 0), packed.select(2, 1)];
            let options = if in_place_of { in_place(case) } else { case.options() };
            let op = if in_place_of { f_rope as Op } else { rope_reference };
            let outputs = case.call(op, &parts, options).expect("outputs");
            let weights = Tensor::arange(240, (Kind::Double, device)).sin().view([2, 3, 2, 20]);
            let loss = (&outputs[0] * &outputs[1] * &weights + packed.select(2, 2).square())
                .sum(Kind::Double);
            let twice = GradOptions { create_graph: true, ..Default::default() };
            let first = grad(&[&loss], &[&leaf], &twice).expect("first").single().expect("one");
            let square = first.square().sum(Kind::Double);
            let second = grad(&[&square], &[&leaf], &GradOptions::default());
            [first.detach(), second.expect("second").single().expect("one")]
        };
        for (found, expected) in run(true).iter().zip(&run(false)) {
            assert_close(found, expected, 1e-12, 1e-12);
        }
    }
}

/// What autograd or the memory forbids is refused before anything is changed.
#[test]
fn refusals_change_nothing() {
    let case = Case { interleaved: false, rest: 0, float_tables: true };
    for device in devices() {
        let options = (Kind::Float, device);
        let leaf = Tensor::randn([1, 2, 2, 4], options).set_requires_grad(true);
        let free = Tensor::randn([1, 2, 2, 4], options);
        let moved = &leaf * 1.0;
        let chunks = (&leaf * 1.0).chunk(2, 2);
        let one = free.narrow(2, 0, 1);
        let half = |x: &Tensor| x.narrow(2, 0, 1);
        for (place, text, q, k) in [
            ("rope: q: in_place", "leaf", &leaf, &free),
            ("rope: q: in_place", "leaf", &half(&leaf), &free),
            ("rope: k: in_place", "leaf", &moved, &leaf),
            ("rope: k: in_place", "multiple views", &moved, &chunks[0]),
            ("rope: q: expected", "do not share", &one.expand([1, 2, 2, 4], false), &moved),
            ("rope: k: expected", "do not share", &moved, &one.expand([1, 2, 2, 4], false)),
            ("rope: k: expected", "memory of its own", &free, &free),
            ("rope: k: expected", "memory of its own", &free, &half(&free)),
        ] {
            let before = [q.detach().copy(), k.detach().copy()];
            let inputs = [q.shallow_clone(), k.shallow_clone()];
            let error = case.call(f_rope, &inputs, in_place(case)).expect_err(text).to_string();
            assert!(error.starts_with(place) && error.contains(text), "{error}");
            assert!(!error.contains('\n'), "{error}");
            assert!(q.detach().equal(&before[0]) && k.detach().equal(&before[1]), "{error}");
        }
        // Without a graph, a leaf may be changed.
        let expected =
            case.call(f_rope, &[leaf.detach(), free.copy()], case.options()).expect("it");
        let inputs = [leaf.shallow_clone(), free.copy()];
        let found = tch::no_grad(|| case.call(f_rope, &inputs, in_place(case))).expect("no graph");
        assert!(found[0].equal(&expected[0]) && leaf.detach().equal(&expected[0]));

        let (cos, sin) = rope_tables(4, 4, 10000.0, options);
        let cos = cos.set_requires_grad(true);
        let moved = &leaf * 1.0;
        let error = f_rope(&moved, &free, &cos, &sin, &in_place(case)).expect_err("a gradient");
        assert!(error.to_string().starts_with("rope: cos: expected a table without"), "{error}");
        // A table in the memory of q.
        let q = Tensor::randn([1, 2, 2, 4], options);
        let table = q.view([8, 2]);
        let error = f_rope(&q, &free, &table, &sin.copy().repeat([2, 1]), &in_place(case));
        let error = error.expect_err("shared").to_string();
        assert!(error.starts_with("rope: cos: expected memory of its own"), "{error}");
    }
}

/// A graph that saved the old values of q says so in its backward pass.
#[test]
fn earlier_users_of_q_notice() {
    for device in devices() {
        let leaf = Tensor::randn([1, 2, 2, 4], (Kind::Float, device)).set_requires_grad(true);
        let case = Case { interleaved: true, rest: 0, float_tables: true };
        let (q, k) = (&leaf * 1.0, &leaf * 2.0);
        let square = q.square().sum(Kind::Float);
        case.call(f_rope, &[q, k], in_place(case)).expect("in place");
        let error = grad(&[&square], &[&leaf], &GradOptions::default()).expect_err("changed since");
        assert!(error.to_string().contains("modified by an inplace operation"), "{error}");
    }
}
