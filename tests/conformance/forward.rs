//! Tests of forwards that break a rule: they write where they must not, share memory, or ignore
//! something.

use super::*;

#[test]
fn a_write_to_an_input() {
    let negate = |x: &Tensor, w: &Tensor| {
        // The values stay the same, so only the version counter shows the write. With expanded
        // memory this copy is an error.
        let _ = x.detach().f_copy_(&x.detach());
        Ok(x * w)
    };
    assert_breaks(
        product(negate, gradient),
        &["inputs unchanged"],
        "input 0 as [4, 6] with strides",
    );
    let zero_grad = |_: &Context<'_>, [x, w]: [&Tensor; 2], grad: &Tensor| {
        let results = [grad * w, grad * x];
        let _ = grad.detach().f_zero_()?;
        Ok(results.into())
    };
    assert_breaks(
        product(value, zero_grad),
        &["inputs unchanged"],
        "the backward wrote to incoming gradient 0",
    );
}

#[test]
fn a_write_beside_an_input() {
    let beside = |x: &Tensor, w: &Tensor| {
        // The tensor has 24 elements; this writes beyond them.
        let _ = x.as_strided([32], [1], None).narrow(0, 30, 1).f_fill_(0.0)?;
        Ok(x * w)
    };
    for device in devices() {
        let x = leaf(&[4, 6], device);
        // Only the suite's copies, which have margins, have that much memory.
        let error =
            conformance(product(beside, gradient), &[&x, &x], &defaults()).expect_err("a write");
        assert!(error.to_string().contains("or to memory around it"), "{error}");
    }
}

#[test]
fn outputs_that_share_memory() {
    assert_breaks(
        |inputs| Ok([inputs[0].transpose(0, 1), inputs[1].exp()]),
        &["no aliasing"],
        "output 0 shares memory with input 0",
    );
    let twice = |inputs: &[Tensor]| {
        let output = &inputs[0] * &inputs[1];
        Ok([output.narrow(0, 0, 3), output.narrow(0, 2, 2)])
    };
    assert_breaks(twice, &["no aliasing"], "outputs 0 and 1 share memory");
    let declared = ConformanceOptions { aliases: &[(0, 0)], ..defaults() };
    let (names, report) = broken(|inputs| Ok(inputs[0].transpose(0, 1)), Device::Cpu, &declared);
    assert!(names.is_empty(), "{report}");
    let other = ConformanceOptions { aliases: &[(0, 1), (1, 0)], ..defaults() };
    assert_eq!(
        broken(|inputs| Ok(inputs[0].transpose(0, 1)), Device::Cpu, &other).0,
        ["no aliasing"]
    );
}

#[test]
fn other_bits_each_time() {
    static CALLS: AtomicU32 = AtomicU32::new(0);
    let drifting = |inputs: &[Tensor]| {
        let drift = 1.0 + 1e-13 * f64::from(CALLS.fetch_add(1, Ordering::Relaxed) % 7);
        Ok(&inputs[0] * &inputs[1] * drift)
    };
    assert_breaks(drifting, &["determinism"], "output 0 has other bits");
    let allowed = ConformanceOptions { deterministic: false, ..defaults() };
    assert!(broken(drifting, Device::Cpu, &allowed).0.is_empty());

    static BACKWARDS: AtomicU32 = AtomicU32::new(0);
    let drifting = |_: &Context<'_>, [x, w]: [&Tensor; 2], grad: &Tensor| {
        let drift = 1.0 + 1e-13 * f64::from(BACKWARDS.fetch_add(1, Ordering::Relaxed) % 7);
        Ok([grad * w, grad * x * drift].into())
    };
    assert_breaks(
        product(value, drifting),
        &["determinism"],
        "the gradient of input 1 has other bits",
    );
}

#[test]
fn other_numbers_without_a_graph() {
    let shortcut = |inputs: &[Tensor]| {
        let output = &inputs[0] * &inputs[1];
        Ok(if output.requires_grad() { output } else { output * 1.001 })
    };
    assert_breaks(shortcut, &["no_grad"], "with grad mode off, output 0: element");
    let other_kind = |inputs: &[Tensor]| {
        let output = &inputs[0] * &inputs[1];
        Ok(if output.requires_grad() { output } else { output.to_kind(Kind::Float) })
    };
    assert_breaks(other_kind, &["no_grad"], "with grad mode off, output 0");
    let anyway = |inputs: &[Tensor]| Ok((&inputs[0] * &inputs[1]).detach().set_requires_grad(true));
    assert_eq!(broken(anyway, Device::Cpu, &defaults()).0[0], "no_grad");
}

#[test]
fn strides_ignored() {
    let forward = |x: &Tensor, w: &Tensor| Ok(taken_for_contiguous(x) * w);
    assert_breaks(
        product(forward, gradient),
        &["layouts"],
        "with inputs Transposed, output 0: element",
    );
    let backward = |_: &Context<'_>, [x, w]: [&Tensor; 2], grad: &Tensor| {
        Ok([grad * w, grad * taken_for_contiguous(x)].into())
    };
    assert_breaks(product(value, backward), &["layouts"], "the gradient of input 1: element");
}

#[test]
fn an_alignment_taken_for_granted() {
    let forward = |x: &Tensor, w: &Tensor| {
        let misaligned = !(x.data_ptr() as usize).is_multiple_of(16);
        Ok(if misaligned { x * w + 1.0 } else { x * w })
    };
    assert_breaks(
        product(forward, gradient),
        &["layouts"],
        "with inputs Strided, output 0: element",
    );
}

#[test]
fn a_write_without_a_graph() {
    let careless = |inputs: &[Tensor]| {
        let output = &inputs[0] * &inputs[1];
        if !output.requires_grad() {
            // This imitates a kernel that uses an input as scratch memory.
            let _ = inputs[0].detach().f_fill_(0.0);
        }
        Ok(output)
    };
    assert_breaks(
        careless,
        &["inputs unchanged"],
        "the forward with grad mode off wrote to input 0",
    );
}

#[test]
fn one_buffer_for_all_calls() {
    static BUFFER: Mutex<Option<Tensor>> = Mutex::new(None);
    let reusing = |x: &Tensor, w: &Tensor| {
        let mut buffer = BUFFER.lock().expect("unpoisoned");
        let buffer = buffer.get_or_insert_with(|| (x * w).detach());
        buffer.f_copy_(&(x * w))?;
        Ok(buffer.detach())
    };
    for only_with_graph in [true, false] {
        let operator = |inputs: &[Tensor]| {
            let graph = (&inputs[0] * &inputs[1]).requires_grad();
            product(if graph == only_with_graph { reusing } else { value }, gradient)(inputs)
        };
        let (names, report) = broken(operator, Device::Cpu, &defaults());
        assert!(names.contains(&"no aliasing".to_string()), "{only_with_graph}: {report}");
        assert!(report.contains("output 0 shares memory with that of another call"), "{report}");
    }
}

#[test]
fn aliasing_only_with_a_graph() {
    let view = |inputs: &[Tensor]| {
        let product = &inputs[0] * &inputs[1];
        let graph = product.requires_grad();
        Ok([
            if graph { inputs[0].transpose(0, 1) } else { inputs[0].transpose(0, 1).copy() },
            product,
        ])
    };
    assert_breaks(view, &["no aliasing"], "output 0 shares memory with input 0");
}

#[test]
fn what_depends_on_who_requires_grad() {
    // This operator is wrong only when grad mode is on and no input requires grad.
    let idle = |inputs: &[Tensor]| {
        let output = &inputs[0] * &inputs[1];
        let grad_mode = (Tensor::from(1.0).set_requires_grad(true) * 1.0).requires_grad();
        Ok(if grad_mode && !output.requires_grad() { output * 2.0 } else { output })
    };
    assert_breaks(idle, &["no_grad"], "without inputs that require grad, output 0: element");
    let fewer = |absent: fn(Tensor) -> Vec<Option<Tensor>>| {
        move |inputs: &[Tensor]| {
            let output = &inputs[0] * &inputs[1];
            let graph = output.requires_grad();
            let more =
                if graph { vec![Some(output.detach().copy())] } else { absent(output.copy()) };
            Ok(std::iter::once(Some(output)).chain(more).collect::<Vec<_>>())
        }
    };
    assert_breaks(fewer(|_| Vec::new()), &["no_grad"], "with grad mode off: 1 outputs, expected 2");
    assert_breaks(fewer(|_| vec![None]), &["no_grad"], "output 1 is there in one run only");
    let second = |ctx: &Context<'_>, [x, w]: [&Tensor; 2], grad: &Tensor| {
        let wrong = if ctx.needs_input_grad(0) { 1.0 } else { 2.0 };
        Ok([grad * w, grad * x * wrong].into())
    };
    let says = "with gradients for inputs [1] only, the gradient of input 1: element";
    assert_breaks(product(value, second), &["needs_input_grad"], says);
    let cut = |inputs: &[Tensor]| {
        let alone = !inputs[1].requires_grad();
        Ok(if alone { inputs[0].detach() } else { inputs[0].shallow_clone() } * &inputs[1])
    };
    let says = "with gradients for inputs [0] only, the gradient of input 0: element";
    assert_breaks(cut, &["needs_input_grad"], says);
    let seven: Vec<Tensor> = (0..7).map(|_| leaf(&[2], Device::Cpu)).collect();
    let six = |inputs: &[Tensor]| {
        let count = inputs.iter().filter(|input| input.requires_grad()).count();
        Ok(inputs.iter().map(Tensor::exp).sum::<Tensor>() * if count == 6 { 2.0 } else { 1.0 })
    };
    let error = conformance(six, &seven.iter().collect::<Vec<_>>(), &defaults()).expect_err("six");
    assert!(
        error.to_string().contains("with gradients for inputs [1, 2, 3, 4, 5, 6] only"),
        "{error}"
    );
}

/// Writes one element after a tensor.
fn beyond(tensor: Tensor) -> Tensor {
    // SAFETY: this imitates a kernel that is wrong. The bytes belong to nobody: conformance has put
    // canaries there.
    unsafe { tensor.data_ptr().cast::<f64>().add(tensor.numel()).write(0.5) };
    tensor
}

/// The smallest blocks of glibc have no room for another element, so that an overrun which the suite
/// did not watch would break the heap.
#[test]
fn a_write_beside_an_output_or_a_gradient() {
    let forward = |x: &Tensor, w: &Tensor| Ok(beyond(x * w));
    let backward = |_: &Context<'_>, [x, w]: [&Tensor; 2], grad: &Tensor| {
        Ok([beyond(grad * w), grad * x].into())
    };
    for size in [[1, 1], [1, 2], [1, 3], [4, 1], [5, 1], [3, 7], [4, 6], [64, 64]] {
        let inputs = [leaf(&size, Device::Cpu), leaf(&size, Device::Cpu)];
        let report = |operator: &(dyn Fn(&[Tensor]) -> Result<Tensors> + Sync)| {
            let result = conformance(operator, &[&inputs[0], &inputs[1]], &defaults());
            result.expect_err("an overrun").to_string()
        };
        for (report, what) in [
            (report(&product(forward, gradient)), "the forward"),
            (report(&product(value, backward)), "the backward"),
        ] {
            let expected = format!(
                "conformance: memory: {what} wrote outside of the memory that was allocated, in 1 \
                 places; nothing more was checked"
            );
            assert_eq!(report, expected, "{size:?}");
        }
    }
}

/// What runs in a later call only, or in another thread.
#[test]
fn a_late_write_ends_the_check() {
    let without_graph = |inputs: &[Tensor]| {
        let product = &inputs[0] * &inputs[1];
        Ok(if product.requires_grad() { product } else { beyond(product) })
    };
    let (names, report) = broken(without_graph, Device::Cpu, &defaults());
    assert_eq!(names, ["memory"], "{report}");
    assert!(report.contains("the forward without a graph wrote outside"), "{report}");
    let home = std::thread::current().id();
    let elsewhere = move |inputs: &[Tensor]| {
        let product = &inputs[0] * &inputs[1];
        Ok(if std::thread::current().id() == home { product } else { beyond(product) })
    };
    let (names, report) = broken(elsewhere, Device::Cpu, &defaults());
    assert_eq!(names, ["memory"], "{report}");
}
