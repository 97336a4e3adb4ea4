//! Tests of `backward`, `retain_grad` and `grad_fn`.

use super::*;

#[test]
fn backward_adds_to_the_leaves() {
    let _alone = alone();
    let (x, w) = (leaf(&[1.0, 2.0]), leaf(&[3.0, 4.0]));
    let v = Tensor::from_slice(&[1.0, 10.0]);
    for times in [1.0, 2.0] {
        let y = square(&x) * &w;
        backward(&[&y], &BackwardOptions { grad_outputs: &[Some(&v)], ..Default::default() })
            .expect("runs");
        assert_eq!(values(&x.grad()), [6.0 * times, 160.0 * times]);
        assert_eq!(values(&w.grad()), [times, 40.0 * times]);
    }
}

#[test]
fn backward_of_several_outputs_into_chosen_inputs() {
    let _alone = alone();
    let (x, w) = (leaf(&[3.0]), leaf(&[5.0]));
    let (a, b) = ((&x * &w).sum(Kind::Double), square(&x).sum(Kind::Double));
    let options =
        BackwardOptions { inputs: Some(&[&x]), retain_graph: Some(true), ..Default::default() };
    backward(&[&a, &b], &options).expect("runs");
    assert_eq!(values(&x.grad()), [11.0]);
    assert!(!w.grad().defined());
    backward(&[&a, &b], &Default::default()).expect("the graph was kept");
    assert_eq!((values(&x.grad()), values(&w.grad())), (vec![22.0], vec![3.0]));
    let error = backward(&[&a], &Default::default()).expect_err("it was freed").to_string();
    assert!(error.contains("second time"), "{error}");
}

#[test]
fn a_grad_made_with_create_graph_can_be_differentiated() {
    let _alone = alone();
    let x = leaf(&[3.0]);
    let y = run(Square::<true>, &x).sum(Kind::Double);
    backward(&[&y], &BackwardOptions { create_graph: true, ..Default::default() }).expect("runs");
    let mut x = x;
    let first = x.grad();
    assert_eq!(values(&gradient_of(&first, &x).expect("second")), [2.0]);
    x.zero_grad();
}

#[test]
fn backward_reports_misuse() {
    let _alone = alone();
    let x = leaf(&[1.0, 2.0]);
    let error =
        backward(&[&square(&x)], &Default::default()).expect_err("two elements").to_string();
    assert!(error.contains("scalar"), "{error}");
    let vectors = [None, None];
    let options = BackwardOptions { grad_outputs: &vectors, ..Default::default() };
    let error = backward(&[&x], &options).expect_err("two for one").to_string();
    assert!(error.contains("backward: grad_outputs: expected 1 entries"), "{error}");
    let options = BackwardOptions { inputs: Some(&[]), ..Default::default() };
    let error = backward(&[&x], &options).expect_err("nowhere to add").to_string();
    assert!(error.contains("backward: inputs: expected at least one tensor"), "{error}");
    let constant = Tensor::from_slice(&[1.0]);
    assert!(backward(&[&constant], &Default::default()).is_err(), "no graph");
}

#[test]
fn retain_grad_fills_in_the_grad_of_an_intermediate() {
    let _alone = alone();
    let x = leaf(&[3.0]);
    let middle = square(&x);
    retain_grad(&middle).expect("it requires grad");
    backward(&[&(&middle * 7.0)], &Default::default()).expect("runs");
    assert_eq!((values(&middle.grad()), values(&x.grad())), (vec![7.0], vec![42.0]));
    retain_grad(&x).expect("nothing to do for a leaf");
    let error = retain_grad(&Tensor::from_slice(&[1.0])).expect_err("a constant").to_string();
    assert!(error.contains("retain_grad:"), "{error}");
    assert!(retain_grad(&Tensor::new()).is_err(), "undefined");
}

#[test]
fn grad_fn_names_the_node() {
    let _alone = alone();
    let x = leaf(&[3.0]);
    let name = |tensor: &Tensor| grad_fn(tensor).expect("libtorch knows");
    assert_eq!(name(&square(&x)).as_deref(), Some("squareBackward"));
    assert_eq!(name(&(&x * &x)).as_deref(), Some("MulBackward0"));
    assert_eq!((name(&x), name(&Tensor::new())), (None, None));
}

#[test]
fn two_closures_make_an_operator() {
    let _alone = alone();
    let before = live_nodes();
    let (x, factor) = (leaf(&[3.0]), 5.0);
    let y = apply_with(
        "scaled_square",
        &[Some(&x)],
        |saver, inputs| {
            saver.save(inputs.get(0)?);
            Ok((inputs.get(0)?.square() * factor).into())
        },
        move |ctx, grads| Ok((grads.get(0)? * ctx.saved(0)? * (2.0 * factor)).into()),
    )
    .and_then(Tensors::single)
    .expect("one output");
    assert_eq!(grad_fn(&y).expect("a node").as_deref(), Some("scaled_squareBackward"));
    let first = grad(&[&y], &[&x], &create()).and_then(Tensors::single).expect("gradient");
    assert_eq!(values(&first), [30.0]);
    let error = gradient_of(&first, &x).expect_err("no second derivative").to_string();
    assert!(error.contains("scaled_square: the second derivative is not defined"), "{error}");
    drop((y, first));
    assert_eq!(live_nodes(), before);
}
