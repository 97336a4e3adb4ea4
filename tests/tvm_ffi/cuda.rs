//! Streams and devices.

use super::*;
use tch_extension::cuda::{Stream, StreamGuard};
use tch_extension::testing::cuda_or_skip;

#[test]
fn cuda_a_function_sees_the_current_stream() {
    const TEST: &str = "cuda_a_function_sees_the_current_stream";
    let stream = function!(TEST, "stream");
    let Some(device) = cuda_or_skip(TEST) else { return };
    let x = Tensor::zeros([2], (Kind::Float, device));
    let seen = || stream.call::<i64>(args![&x]).unwrap();
    let side = Stream::new(device).unwrap();
    {
        let _side = StreamGuard::new(&side).unwrap();
        assert_eq!(seen(), side.as_ptr() as i64);
    }
    assert_eq!(seen(), Stream::current(device).unwrap().as_ptr() as i64);
    // A device that is no tensor's counts, too.
    let same = function!(TEST, "device");
    assert_eq!(same.call::<Device>(args![device]).unwrap(), device);
}

#[test]
fn cuda_a_returned_tensor_is_on_its_device() {
    const TEST: &str = "cuda_a_returned_tensor_is_on_its_device";
    let describe = function!(TEST, "describe");
    let Some(device) = cuda_or_skip(TEST) else { return };
    let x = Tensor::zeros([2, 3], (Kind::BFloat16, device));
    let text: String = describe.call(args![&x]).unwrap();
    assert_eq!(text, "bfloat16 on 2, sizes 2 3, strides 3 1");
    let empty = function!(TEST, "empty_like");
    let y: Tensor = empty.call(args![&x]).unwrap();
    assert_eq!((y.device(), y.kind(), y.size()), (device, Kind::BFloat16, vec![2, 3]));
}
