//! Tests of sources that are given as text.

use super::*;

#[test]
fn symbols_come_with_their_type() {
    let module = extension("typed")
        .cpp("extern \"C\" { double twice(double x) { return 2 * x; } int limit = 7; }")
        .load()
        .unwrap();
    // SAFETY: the types are those of the definitions in the source text.
    unsafe {
        let twice = module.symbol::<extern "C" fn(f64) -> f64>("twice").unwrap();
        assert_eq!(twice(21.0), 42.0);
        assert_eq!(**module.symbol::<*const i32>("limit").unwrap(), 7);
    }
    assert_says(&message(number(&module, "thrice")), &["typed", "no symbol \"thrice\""]);
    // SAFETY: the symbol is refused because of its size, before it is read.
    let wide = message(unsafe { module.symbol::<[usize; 2]>("twice") });
    assert_says(&wide, &["typed", "twice", "size"]);
    assert_says(&message(module.operator("forward")), &["no operator typed::forward"]);
}

#[test]
fn functions_become_operators() {
    let module = jit_of_two_functions();
    let x = Tensor::from_slice(&[1.0, -2.0]).set_requires_grad(true);
    let y: Tensor = module.operator("cube").unwrap().call(args![&x]).unwrap();
    y.sum(Kind::Double).backward();
    assert_eq!(x.grad(), Tensor::from_slice(&[3.0, 12.0]));
    let total: i64 = module.operator("length").unwrap().call(args![[1_i64, 2, 3]]).unwrap();
    assert_eq!(total, 3);
    assert_eq!(module.operators(), ["two_functions::cube", "two_functions::length"]);
}

#[test]
fn the_readme_s_example() {
    let shift = extension("shift")
        .cpp("torch::Tensor up(torch::Tensor x, double by) { return x + by; }")
        .functions(["up"])
        .load()
        .unwrap();
    let y: Tensor =
        shift.operator("up").unwrap().call(args![&Tensor::from_slice(&[1.0, 2.0]), 0.5]).unwrap();
    assert_eq!(y, Tensor::from_slice(&[1.5, 2.5]));
}

/// Sources are first compiled without the larger part of `torch/extension.h`. What they need of
/// that part must nevertheless be there; here it is a name that is used in a header.
#[test]
fn all_of_libtorch_s_frontend_is_there() {
    let folder = scratch();
    let header = "#include <torch/extension.h>\nusing namespace torch;\n\
                  inline Tensor layer(const Tensor& x) { return nn::functional::relu(x); }\n";
    std::fs::write(folder.path().join("layer.h"), header).unwrap();
    // Precompiled headers would be made for this folder, and then not be enough.
    let module = extension("frontend")
        .use_pch(false)
        .include(folder.path())
        .cpp("#include \"layer.h\"\ntorch::Tensor apply_layer(torch::Tensor x) { return layer(x); }")
        .cpp(
            "torch::Tensor detached(torch::Tensor x) { torch::NoGradGuard guard; return x * 2; }\n\
             struct Twice : torch::autograd::Function<Twice> {\n\
               static torch::Tensor forward(torch::autograd::AutogradContext*, torch::Tensor x) { return x * 2; }\n\
               static torch::autograd::variable_list backward(\n\
                   torch::autograd::AutogradContext*, torch::autograd::variable_list grads) {\n\
                 return {grads[0] * 2};\n\
               }\n\
             };\n\
             torch::Tensor twice(torch::Tensor x) { return Twice::apply(x); }",
        )
        .functions(["apply_layer", "detached", "twice"])
        .load()
        .unwrap();
    let call =
        |name: &str, x: &Tensor| module.operator(name).unwrap().call::<Tensor>(args![x]).unwrap();
    let x = Tensor::from_slice(&[-1.0, 2.0]).set_requires_grad(true);
    assert_eq!(call("apply_layer", &x), x.relu());
    assert!(!call("detached", &x.detach()).requires_grad());
    call("twice", &x).sum(Kind::Double).backward();
    assert_eq!(x.grad(), Tensor::from_slice(&[2.0, 2.0]));
}

fn jit_of_two_functions() -> Module {
    extension("two_functions")
        .cpp("torch::Tensor cube(torch::Tensor x) { return x * x * x; }")
        .cpp("int64_t length(std::vector<int64_t> values) { return values.size(); }")
        .functions(["cube", "length"])
        .load()
        .unwrap()
}

/// A source in the newer style, which has operators in a TORCH_LIBRARY and a module that Python
/// could import.
#[test]
fn a_stub_for_python_s_import_compiles() {
    let module = extension("modern").source(python_source("muladd.cpp")).load().unwrap();
    let (a, b) = (Tensor::from_slice(&[1.0_f32, 2.0]), Tensor::from_slice(&[3.0_f32, 4.0]));
    let y: Tensor =
        module.operator("tch_test_muladd::muladd").unwrap().call(args![&a, &b, 1.0]).unwrap();
    assert_eq!(y, Tensor::from_slice(&[4.0_f32, 9.0]));

    // The namespace in TORCH_LIBRARY is not the extension's name and cannot be registered twice.
    let again = extension("modern").source(python_source("muladd.cpp")).define("OTHER", "1").load();
    assert_says(&message(again), &["modern_v1", "tch_test_muladd"]);
}

/// libtorch has two settings for TF32, an older and a newer one. The newer one must be respected,
/// too.
#[test]
fn a_precision_set_the_newer_way_is_seen() {
    let module = extension("precision")
        .cpp(
            "#include <ATen/Context.h>\n\
             extern \"C\" void allow_tf32(bool allow) {\n\
               at::globalContext().setFloat32Precision(at::Float32Backend::CUDA, at::Float32Op::MATMUL,\n\
                   allow ? at::Float32Precision::TF32 : at::Float32Precision::NONE);\n\
             }",
        )
        .load()
        .unwrap();
    // SAFETY: the type is that of the function in the source text.
    let allow = unsafe { module.symbol::<extern "C" fn(bool)>("allow_tf32") }.unwrap();
    allow(true);
    let allowed = tch_extension::cuda::matmul_allow_tf32();
    allow(false);
    assert!(allowed.unwrap());
    assert!(!tch_extension::cuda::matmul_allow_tf32().unwrap());
}
