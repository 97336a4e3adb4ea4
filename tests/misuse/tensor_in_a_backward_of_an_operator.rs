// E0277: cannot be shared between threads safely
// As in a `Function`, a tensor that a backward needs must be saved, not captured.
use tch_extension::library::Operator;
use tch_extension::tch::Tensor;

fn main() {
    let kept = Tensor::from_slice(&[1.0]);
    let abs = Operator::find("aten::abs").expect("abs");
    let _ = abs.with_backward(move |_, grads| Ok((grads.get(0)? * &kept).into()));
}
