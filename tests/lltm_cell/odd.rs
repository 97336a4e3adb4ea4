//! Tests of tensors whose memory does not show their values directly. The checks look at each
//! argument once; if they missed such a tensor, a kernel would read its memory as it is.

use super::*;

type Odd = (&'static str, fn(&Tensor) -> std::result::Result<Tensor, tch::TchError>);

/// Tensors that are made from an ordinary one and have its shape. Kernels must find the right
/// values.
const READABLE: [Odd; 9] = [
    ("negated", |x| x.f_neg()?.f_internal_neg_view()),
    ("the imaginary part of a conjugate", |x| {
        Tensor::f_complex(x, &x.f_neg()?)?.f_conj()?.f_imag()
    }),
    ("zeros without memory", |x| {
        Tensor::f_internal_efficientzerotensor(x.size(), (x.kind(), x.device()))
    }),
    ("a lazy clone", |x| x.f_internal_lazy_clone()),
    ("turned", |x| x.f_transpose(0, -1)?.f_contiguous()?.f_transpose(0, -1)),
    ("every other", |x| Tensor::f_stack(&[x, x], -1)?.f_select(-1, 1)),
    ("behind others", |x| {
        Tensor::f_cat(&[x.f_reshape(-1)?, x.f_reshape(-1)?.f_narrow(0, 0, 1)?], 0)?
            .f_narrow(0, 1, x.numel() as i64)?
            .f_view(&x.size()[..])
    }),
    ("expanded", |x| x.f_narrow(0, 0, 1)?.f_expand(x.size(), false)),
    ("overlapping", |x| Tensor::f_cat(&[x, x], 0)?.f_as_strided(x.size(), vec![1; x.dim()], 1)),
];

/// Tensors that have no values that a kernel could read.
const OTHER: [Odd; 2] = [
    ("quantized", |x| x.f_quantize_per_tensor(0.1, 0, Kind::QInt8)),
    ("one of vmap's", |x| Tensor::f_stack(&[x, x], 0)?.f_internal_add_batch_dim(0, 1)),
];

/// The outputs, and the gradients of the ordinary tensors from which the arguments were made.
fn results(cell: Cell, leaves: &[Tensor], place: usize, odd: Odd) -> Result<Vec<Option<Tensor>>> {
    let mut arguments: Vec<Tensor> = leaves.iter().map(Tensor::shallow_clone).collect();
    arguments[place] = odd.1(&leaves[place])?;
    let outputs = call(cell, &arguments)?;
    let loss = (&outputs[0] * 3.0 + &outputs[1]).f_sum(Kind::Double)?;
    let options = GradOptions { allow_unused: true, ..Default::default() };
    let gradients = grad(&[&loss], &leaves.iter().collect::<Vec<_>>(), &options)?.into_vec();
    Ok(outputs.into_iter().map(|output| Some(output.detach())).chain(gradients).collect())
}

#[test]
fn what_lies_oddly_in_memory_is_read_right() {
    for device in devices() {
        // One size uses vectors and the other does not.
        for size in [[3, 4, 5], [4, 8, 16]] {
            let sample = one(size, Kind::Float, device);
            for odd in READABLE {
                for place in 0..sample.inputs.len() {
                    let leaves = leaves(&sample.inputs);
                    let context =
                        format!("{} for argument {place} of {size:?} on {device:?}", odd.0);
                    let [found, expected] = [f_lltm_cell as Cell, lltm_cell_reference]
                        .map(|cell| results(cell, &leaves, place, odd).expect(&context));
                    for (found, expected) in found.iter().zip(&expected) {
                        let (Some(found), Some(expected)) = (found, expected) else {
                            assert_eq!(found.is_some(), expected.is_some(), "{context}");
                            continue;
                        };
                        assert!(
                            found.allclose(expected, 1e-4, 1e-4, false),
                            "{context}: {found} {expected}"
                        );
                    }
                }
            }
        }
    }
}

#[test]
fn what_has_no_memory_is_an_error_and_ends_nothing() {
    for device in devices() {
        for odd in OTHER {
            for (place, name) in ["input", "weight", "bias", "h", "c"].into_iter().enumerate() {
                let mut arguments = one([3, 4, 5], Kind::Float, device).inputs;
                arguments[place] = odd.1(&arguments[place]).expect(odd.0);
                let error = call(f_lltm_cell, &arguments).expect_err(odd.0).to_string();
                assert!(
                    error.starts_with(&format!("lltm_cell: {name}: expected ")),
                    "{}: {error}",
                    odd.0
                );
            }
        }
    }
}

/// libtorch's engine accepts a sparse gradient, and the composite's own backward has no kernel for
/// it, either.
#[test]
fn a_sparse_gradient_is_an_error_and_ends_nothing() {
    for device in devices() {
        let sample = one([3, 4, 5], Kind::Float, device);
        let leaves = leaves(&sample.inputs);
        let of = |cell: Cell, vector: &Tensor| {
            let outputs = call(cell, &leaves).expect("outputs");
            let options = GradOptions { grad_outputs: &[Some(vector)], ..Default::default() };
            grad(&[&outputs[0]], &leaves.iter().collect::<Vec<_>>(), &options)
        };
        let dense = sample.inputs[3].detach();
        let sparse = dense.to_sparse_sparse_dim(2);
        let error = of(f_lltm_cell, &sparse).expect_err("a sparse gradient").to_string();
        assert!(error.starts_with("lltm_cell: "), "{error}");
        assert!(of(lltm_cell_reference, &sparse).is_err());
        of(f_lltm_cell, &dense).expect("a dense gradient");
    }
}
