//! Tests of machines with and without a GPU.

use super::*;

#[test]
fn on_every_device() {
    for device in devices() {
        let on_device = |size: &[i64]| random(size).to_device(device).set_requires_grad(true);
        check(square(|x, grad| grad * x * 2.0), &[&on_device(&[7])]).unwrap();
        let view =
            random(&[5, 6]).to_device(device).slice(1, 1, 6, 2).detach().set_requires_grad(true);
        check(|inputs| Ok(inputs[0].matmul(&inputs[1])), &[&view, &on_device(&[3, 2])]).unwrap();
        let text = refusal(check(square(|x, grad| grad * x * 3.0), &[&on_device(&[7])]));
        assert_says(&text, &["the gradient is wrong", "7 of 49 entries are wrong"]);
    }
}

/// The variable that [`run_alone`] sets for its processes. Its value says what to do there.
const CHILD: &str = "GRADCHECK_TEST_CHILD";

/// Runs a test of this file again in a separate process in which no GPU is visible.
fn run_alone(test: &str, task: &str, require_cuda: &str) -> std::process::Output {
    Command::new(std::env::current_exe().unwrap())
        .args(["--exact", &format!("devices::{test}")])
        .env(CHILD, task)
        .env("CUDA_VISIBLE_DEVICES", "")
        .env("TCH_EXTENSION_REQUIRE_CUDA", require_cuda)
        .output()
        .unwrap()
}

/// Runs the task in such a process; returns `false` in the test itself.
fn is_child() -> bool {
    match std::env::var(CHILD).as_deref() {
        Ok("cuda_or_skip") => assert!(cuda_or_skip("a_test").is_none()),
        Ok("devices") => assert_eq!(devices(), [Device::Cpu]),
        _ => return false,
    }
    true
}

#[test]
fn a_missing_gpu_is_a_visible_skip() {
    if is_child() {
        return;
    }
    let test = "a_missing_gpu_is_a_visible_skip";
    let output = run_alone(test, "cuda_or_skip", "0");
    assert!(output.status.success());
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(stderr.lines().any(|line| line == "SKIPPED a_test: no CUDA device"), "{stderr}");
    assert!(run_alone(test, "devices", "0").status.success());
}

#[test]
fn a_missing_gpu_is_a_failure_where_one_is_required() {
    if is_child() {
        return;
    }
    for task in ["cuda_or_skip", "devices"] {
        let output = run_alone("a_missing_gpu_is_a_failure_where_one_is_required", task, "1");
        assert!(!output.status.success());
        let text = String::from_utf8_lossy(&output.stdout);
        assert!(text.contains("TCH_EXTENSION_REQUIRE_CUDA=1, but "), "{text}");
    }
}
