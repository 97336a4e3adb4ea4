//! What attention refuses.

use super::functional::{AttentionOptions, OP};
use super::packed::Packed;
use crate::check::Check;
use crate::{Error, Result, check};
use tch::{Kind, Tensor};

/// The size of the result, `[…, H, L, Ev]`.
pub(super) fn sizes(
    query: &Tensor,
    key: &Tensor,
    value: &Tensor,
    enable_gqa: bool,
) -> Result<Vec<i64>> {
    let arguments = [check!(OP, query), check!(OP, key), check!(OP, value)];
    let (least, names) = if enable_gqa { (3, "[…, H, L, E]") } else { (2, "[…, L, E]") };
    for argument in arguments {
        let size = argument.tensor().size();
        if size.len() < least {
            let expected = format!("{least} dimensions {names} or more");
            return Err(argument.refuse(expected, format!("shape {size:?}"), ""));
        }
    }
    let mut leading = vec![];
    for argument in arguments {
        broadcast(&mut leading, argument, enable_gqa)?;
    }
    // The leading sizes are in the order from the last to the first.
    leading.reverse();

    let last = |tensor: &Tensor| {
        let size = tensor.size();
        [size[size.len() - 2], size[size.len() - 1]]
    };
    let ([queries, features], [keys, of_key]) = (last(query), last(key));
    let [values, of_value] = last(value);
    let (of_keys, of_values) =
        (format!("shape {:?}", key.size()), format!("shape {:?}", value.size()));
    if of_key != features {
        return Err(check!(OP, key).refuse(
            format!("E = {features} features, as query"),
            of_keys,
            "",
        ));
    }
    if values != keys {
        return Err(check!(OP, value).refuse(
            format!("S = {keys} values, as many as keys"),
            of_values,
            "",
        ));
    }
    leading.extend([queries, of_value]);
    Ok(leading)
}

/// Broadcasts the leading sizes of one more argument. `common` has those of the arguments before
/// it, from the last to the first.
fn broadcast(common: &mut Vec<i64>, argument: Check<'_>, enable_gqa: bool) -> Result<()> {
    let size = argument.tensor().size();
    for (place, &here) in size.iter().rev().skip(2).enumerate() {
        let Some(before) = common.get_mut(place) else {
            common.push(here);
            continue;
        };
        if enable_gqa && place == 0 {
            if *before != here && (here == 0 || *before % here != 0) {
                let expected = format!("a number of heads that divides the query's {before}");
                return Err(argument.refuse(expected, format!("{here} in shape {size:?}"), ""));
            }
        } else if *before == 1 {
            *before = here;
        } else if here != 1 && here != *before {
            let expected = format!("a size of 1 or {before} in the place of {here}, as the others");
            let hint = if place == 0 { "grouped heads need enable_gqa" } else { "" };
            return Err(argument.refuse(expected, format!("shape {size:?}"), hint));
        }
    }
    Ok(())
}

/// Checks that the inputs are packed, without another mask.
pub(super) fn check_packed(
    packed: &Packed,
    inputs: [&Tensor; 3],
    options: &AttentionOptions<'_>,
) -> Result<()> {
    if options.attn_mask.is_some() {
        let expected = "no attn_mask next to packed sequences";
        return Err(Error::argument(OP, "attn_mask", expected, "one", "leave one of them out"));
    }
    packed.check(inputs)
}

pub(super) fn check_options(options: &AttentionOptions<'_>) -> Result<()> {
    let AttentionOptions { dropout_p, scale, .. } = *options;
    if !(0.0..=1.0).contains(&dropout_p) {
        let got = dropout_p.to_string();
        return Err(Error::argument(OP, "dropout_p", "a probability", got, ""));
    }
    if let Some(scale) = scale.filter(|scale| !scale.is_finite()) {
        return Err(Error::argument(OP, "scale", "a finite number", scale.to_string(), ""));
    }
    Ok(())
}

/// `size` is that of the result.
pub(super) fn check_mask(
    mask: Check<'_>,
    query: &Check<'_>,
    size: &[i64],
    keys: i64,
) -> Result<()> {
    let kind = query.tensor().f_kind()?;
    let kinds = match kind {
        Kind::Float => vec![Kind::Bool, Kind::Float],
        _ => vec![Kind::Bool, kind, Kind::Float],
    };
    mask.same_device_as(query)?.kind_in(&kinds)?;
    let mut weights = size.to_vec();
    if let Some(last) = weights.last_mut() {
        *last = keys;
    }
    let found = mask.tensor().size();
    // libtorch reads the last two dimensions.
    let fits = (2..=weights.len()).contains(&found.len())
        && found.iter().rev().zip(weights.iter().rev()).all(|(&a, &b)| a == 1 || a == b);
    if !fits {
        let expected = format!("2 dimensions or more that broadcast to […, L, S] = {weights:?}");
        return Err(mask.refuse(expected, format!("shape {found:?}"), ""));
    }
    Ok(())
}
