//! What a forward pass may return.

use tch::Tensor;

/// What the closure of [`Ddp::forward`](super::Ddp::forward) returns: a tensor, or tuples, lists
/// and options of such. Implement it for types of your own, such as the outputs of a model.
///
/// ```
/// use tch::Tensor;
/// use tch_extension::distributed::Outputs;
///
/// struct Detections {
///     boxes: Tensor,
///     scores: Vec<Tensor>,
/// }
///
/// impl Outputs for Detections {
///     fn visit(&mut self, f: &mut dyn FnMut(&mut Tensor)) {
///         self.boxes.visit(f);
///         self.scores.visit(f);
///     }
/// }
/// ```
pub trait Outputs {
    /// Calls `f` with each tensor, in an order that stays the same. `f` may replace it.
    fn visit(&mut self, f: &mut dyn FnMut(&mut Tensor));
}

impl Outputs for Tensor {
    fn visit(&mut self, f: &mut dyn FnMut(&mut Tensor)) {
        f(self);
    }
}

impl<T: Outputs> Outputs for Option<T> {
    fn visit(&mut self, f: &mut dyn FnMut(&mut Tensor)) {
        if let Some(output) = self {
            output.visit(f);
        }
    }
}

impl<T: Outputs> Outputs for Vec<T> {
    fn visit(&mut self, f: &mut dyn FnMut(&mut Tensor)) {
        self.iter_mut().for_each(|output| output.visit(f));
    }
}

impl<T: Outputs, const N: usize> Outputs for [T; N] {
    fn visit(&mut self, f: &mut dyn FnMut(&mut Tensor)) {
        self.iter_mut().for_each(|output| output.visit(f));
    }
}

macro_rules! tuples {
    ($(($($name:ident)+))+) => {
        $(impl<$($name: Outputs),+> Outputs for ($($name,)+) {
            #[allow(non_snake_case)]
            fn visit(&mut self, f: &mut dyn FnMut(&mut Tensor)) {
                let ($($name,)+) = self;
                $($name.visit(f);)+
            }
        })+
    };
}

tuples! { (A) (A B) (A B C) (A B C D) (A B C D E) (A B C D E F) }

#[cfg(feature = "train")]
impl Outputs for crate::train::StepOutput {
    fn visit(&mut self, f: &mut dyn FnMut(&mut Tensor)) {
        self.loss.visit(f);
        self.extra.visit(f);
    }
}

/// The tensors, as further handles of them.
pub(super) fn handles(outputs: &mut impl Outputs) -> Vec<Tensor> {
    let mut handles = Vec::new();
    outputs.visit(&mut |tensor| handles.push(tensor.shallow_clone()));
    handles
}

/// Puts tensors in the place of those that [`handles`] found.
pub(super) fn replace(outputs: &mut impl Outputs, tensors: Vec<Tensor>) {
    let mut tensors = tensors.into_iter();
    outputs.visit(&mut |tensor| {
        if let Some(replaced) = tensors.next() {
            *tensor = replaced;
        }
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_tensors_are_found_and_replaced_in_order() {
        let number = |value: i64| Tensor::from(value);
        let mut outputs =
            (number(0), vec![Some((number(1), [number(2), number(3)])), None], (number(4),));
        let found: Vec<i64> = handles(&mut outputs).iter().map(|t| t.int64_value(&[])).collect();
        assert_eq!(found, [0, 1, 2, 3, 4]);
        replace(&mut outputs, found.iter().map(|value| number(10 + value)).collect());
        let found: Vec<i64> = handles(&mut outputs).iter().map(|t| t.int64_value(&[])).collect();
        assert_eq!(found, [10, 11, 12, 13, 14]);
    }
}
