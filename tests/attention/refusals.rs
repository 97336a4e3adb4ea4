//! What is refused, and how.

use super::unchanged;
use std::panic::AssertUnwindSafe;
use support::refusal::assert_refused;
use tch::{Device, Kind, Tensor};
use tch_extension::nn::{
    AttentionOptions, Causal, f_scaled_dot_product_attention, f_sdpa_backend,
    scaled_dot_product_attention,
};

const OP: &str = "scaled_dot_product_attention";

fn make(size: &[i64]) -> Tensor {
    Tensor::zeros(size, (Kind::Float, Device::Cpu))
}

fn refused(
    argument: &str,
    texts: &[&str],
    [q, k, v]: [&Tensor; 3],
    options: &AttentionOptions<'_>,
) {
    let place = format!("{OP}: {argument}");
    let panicking = AssertUnwindSafe(|| scaled_dot_product_attention(q, k, v, options));
    assert_refused(&place, texts, f_scaled_dot_product_attention(q, k, v, options), panicking);
    assert!(f_sdpa_backend(q, k, v, options).is_err(), "the choice is refused, too");
}

#[test]
fn arguments_that_do_not_fit_are_named() {
    let _unchanged = unchanged();
    let x = make(&[2, 4, 5, 8]);
    let plain = AttentionOptions::default();
    let gqa = AttentionOptions { enable_gqa: true, ..plain };
    let double = x.to_kind(Kind::Double);
    let heads = |h| make(&[2, h, 5, 8]);
    refused("query", &["a tensor", "undefined"], [&Tensor::new(), &x, &x], &plain);
    refused("query", &["2 dimensions […, L, E] or more", "[8]"], [&make(&[8]); 3], &plain);
    refused("query", &["3 dimensions", "[5, 8]"], [&make(&[5, 8]); 3], &gqa);
    refused("query", &["kind Float or", "Int64"], [&x.to_kind(Kind::Int64); 3], &plain);
    refused("key", &["kind Float, as query", "Double"], [&x, &double, &x], &plain);
    refused("value", &["kind Float, as query", "Double"], [&x, &x, &double], &plain);
    refused("key", &["2 dimensions", "[8]"], [&x, &make(&[8]), &x], &plain);
    refused("key", &["E = 8 features", "[2, 4, 5, 7]"], [&x, &make(&[2, 4, 5, 7]), &x], &plain);
    refused(
        "key",
        &["a size of 1 or 4 in the place of 2", "enable_gqa"],
        [&x, &heads(2), &heads(2)],
        &plain,
    );
    refused("key", &["divides the query's 4", "3 in"], [&x, &heads(3), &heads(3)], &gqa);
    refused("value", &["divides the query's 4", "0 in"], [&x, &heads(2), &heads(0)], &gqa);
    refused("value", &["a size of 1 or 2", "[3, 4, 5, 8]"], [&x, &x, &make(&[3, 4, 5, 8])], &plain);
    // libtorch would read beyond the end of the values.
    refused("value", &["S = 5 values", "[2, 4, 3, 8]"], [&x, &x, &make(&[2, 4, 3, 8])], &plain);
}

#[test]
fn options_that_do_not_fit_are_named() {
    let _unchanged = unchanged();
    let x = make(&[2, 4, 5, 8]);
    let plain = AttentionOptions::default();
    for dropout_p in [-0.1, 1.1, f64::NAN] {
        refused("dropout_p", &["a probability"], [&x; 3], &AttentionOptions { dropout_p, ..plain });
    }
    for scale in [f64::NAN, f64::INFINITY] {
        let options = AttentionOptions { scale: Some(scale), ..plain };
        refused("scale", &["a finite number"], [&x; 3], &options);
    }
    let mask = |mask: Tensor, texts: &[&str]| {
        refused("attn_mask", texts, [&x; 3], &AttentionOptions { attn_mask: Some(&mask), ..plain });
    };
    mask(make(&[5, 4]), &["[2, 4, 5, 5]", "[5, 4]"]);
    mask(make(&[5]), &["2 dimensions or more", "[5]"]);
    mask(make(&[1, 1, 1, 1, 1]), &["2 dimensions or more", "[1, 1, 1, 1, 1]"]);
    mask(make(&[3, 1, 1, 1]), &["[2, 4, 5, 5]"]);
    mask(make(&[5, 5]).to_kind(Kind::Int64), &["Bool or Float", "Int64"]);
    mask(make(&[5, 5]).to_kind(Kind::Double), &["Bool or Float", "Double"]);
    mask(Tensor::new(), &["a tensor", "undefined"]);
    // A causal mask does not make another one fit.
    let short = make(&[5]);
    for causal in [Causal::UpperLeft, Causal::LowerRight] {
        let options = AttentionOptions {
            attn_mask: Some(&short),
            causal: Some(causal),
            ..Default::default()
        };
        refused("attn_mask", &["2 dimensions or more", "[5]"], [&x; 3], &options);
    }
}
