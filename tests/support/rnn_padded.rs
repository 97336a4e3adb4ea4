//! Tests of sequences of different lengths that lstm and gru share.

use crate::rnn::Rnn;
use support::packed::{is_zero_in_padding, with_padding_of_nan};
use tch::{Kind, Tensor};
use tch_extension::testing::devices;

/// Lengths from 1 to T in no order, with the longest one among them if there are three; `None`
/// without steps.
pub fn some_lengths(input: &Tensor) -> Option<Vec<i64>> {
    let [steps, batch, _] = input.size()[..] else { panic!("{:?}", input.size()) };
    let some = |row: i64| if row % 3 == 2 { steps } else { 1 + (5 * row + 2) % steps };
    (steps > 0).then(|| (0..batch).map(some).collect())
}

impl Rnn {
    /// Padding is never used, even where it is NaN, and has gradients of zero.
    pub fn padding_is_never_used(&self) {
        for device in devices() {
            for sizes in [[7, 9, 3, 20], [5, 4, 8, 128], [3, 2, 0, 5]] {
                let mut inputs = self.inputs(sizes, Kind::Float, device);
                let lengths = some_lengths(&inputs[0]).expect("lengths");
                let expected = self.everything(self.fused, &inputs);
                inputs[0] = with_padding_of_nan(&inputs[0], &lengths);
                let found = self.everything(self.fused, &inputs);
                for (index, (found, expected)) in found.iter().zip(&expected).enumerate() {
                    assert!(found.equal(expected), "{sizes:?} {device:?}: result {index}");
                }
                let grad_input = &found[self.states + 1];
                assert!(is_zero_in_padding(&found[0], &lengths), "{sizes:?} {device:?}");
                assert!(is_zero_in_padding(grad_input, &lengths), "{sizes:?} {device:?}");
            }
        }
    }
}

/// The tests of an operator over sequences of different lengths, given its `Rnn` and a call with
/// given lengths.
macro_rules! padded_tests {
    ($rnn:expr, $call:expr) => {
        static RNN_OF_PADDED_TESTS: Rnn = $rnn;

        #[test]
        fn padded_forward_agrees_with_the_reference() {
            RNN_OF_PADDED_TESTS.check(|suite| suite.forward_agrees_with_the_reference());
        }

        #[test]
        fn padded_gradients_agree_with_the_reference() {
            RNN_OF_PADDED_TESTS.check(|suite| suite.gradients_agree_with_the_reference());
        }

        #[test]
        fn padded_gradcheck_of_every_small_sample() {
            RNN_OF_PADDED_TESTS.check_few(|suite| suite.gradcheck_of_every_small_sample());
        }

        #[test]
        fn padded_second_derivatives_of_every_small_sample() {
            RNN_OF_PADDED_TESTS.check_few(|suite| suite.gradgradcheck_of_every_small_sample());
        }

        #[test]
        fn padded_conformance_in_every_kind() {
            // Lengths are copied to the GPU, which a capture does not allow.
            let options = tch_extension::testing::ConformanceOptions {
                cuda_graph: false,
                ..Default::default()
            };
            RNN_OF_PADDED_TESTS.check(|suite| suite.conformance_with(&options, suite.small));
        }

        #[test]
        fn padded_agrees_with_packed_sequences_of_libtorch() {
            RNN_OF_PADDED_TESTS.agrees_with_libtorch();
        }

        #[test]
        fn padding_is_never_used() {
            RNN_OF_PADDED_TESTS.padding_is_never_used();
        }

        #[test]
        fn cuda_padded_by_every_way_agrees_with_the_reference() {
            RNN_OF_PADDED_TESTS.every_way_agrees(
                &support::KINDS,
                "cuda_padded_by_every_way_agrees_with_the_reference",
            );
        }

        #[test]
        fn wrong_lengths_are_refused() {
            let inputs =
                RNN_OF_PADDED_TESTS.small(tch::Kind::Float, tch::Device::Cpu).remove(0).inputs;
            for (lengths, got) in [
                (&[3_i64][..], "lengths: expected B = 2 lengths"),
                (&[3, 4], "got 4 at 1"),
                (&[0, 3], "got 0 at 0"),
                (&[i64::MIN, 3], "lengths from 1 to T = 3"),
            ] {
                let error = $call(&inputs, lengths).expect_err("wrong lengths").to_string();
                assert!(error.contains(got), "{error}");
            }
        }
    };
}
pub(crate) use padded_tests;
