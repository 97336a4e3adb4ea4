//! Suggests names that are similar to a name that does not exist.

use super::operator::split;

/// A text such as `did you mean torchvision::nms?`, with up to three operators that are equally
/// similar. `None` if none is similar.
pub(super) fn did_you_mean(wanted: &str, names: &[String]) -> Option<String> {
    let near = near(wanted, names);
    (!near.is_empty()).then(|| format!("did you mean {}?", near.join(" or ")))
}

/// The most similar names, without overloads.
fn near<'a>(wanted: &str, names: &'a [String]) -> Vec<&'a str> {
    const MOST: usize = 3;
    // A dot separates an overload only if there is a namespace.
    let wanted = if wanted.contains("::") { split(wanted).0 } else { wanted };
    let mut bases: Vec<&str> = names.iter().map(|name| split(name).0).collect();
    bases.dedup();
    let rank = |base: &&'a str| Some((rank(wanted, base)?, *base));
    let mut ranked: Vec<_> = bases.iter().filter_map(rank).collect();
    ranked.sort_unstable();
    let best = ranked.first().map(|(rank, _)| *rank);
    ranked
        .iter()
        .take_while(|(rank, _)| Some(*rank) == best)
        .take(MOST)
        .map(|(_, base)| *base)
        .collect()
}

/// How far a name is from the wanted name, or `None` if it is not similar. The same name in another
/// namespace ranks first.
fn rank(wanted: &str, name: &str) -> Option<(bool, usize)> {
    let own = |text: &str| {
        text.split_once("::").map_or_else(|| text.to_string(), |(_, own)| own.to_string())
    };
    let (wanted, name) = (wanted.to_lowercase(), name.to_lowercase());
    let differs = own(&wanted) != own(&name);
    // Up to a third of the letters may be wrong. Two swapped letters count as one error.
    let most = (own(&wanted).chars().count() / 3).max(1);
    if differs && wanted.len().abs_diff(name.len()) > most {
        return None;
    }
    let distance = strsim::osa_distance(&wanted, &name);
    (!differs || distance <= most).then_some((differs, distance))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn said(wanted: &str) -> Option<String> {
        let names = [
            "aten::add.Scalar",
            "aten::add.Tensor",
            "aten::adds",
            "quantized::add",
            "torchvision::nms",
        ];
        did_you_mean(wanted, &names.map(String::from))
    }

    #[test]
    fn a_name_of_another_namespace_is_nearest_and_overloads_are_one() {
        assert_eq!(said("torchvison::nms").as_deref(), Some("did you mean torchvision::nms?"));
        assert_eq!(said("nms").as_deref(), Some("did you mean torchvision::nms?"));
        assert_eq!(said("atem::add.Tensor").as_deref(), Some("did you mean aten::add?"));
        assert_eq!(said("aten::addd").as_deref(), Some("did you mean aten::add or aten::adds?"));
    }

    #[test]
    fn what_is_far_is_not_meant() {
        for wanted in ["aten::xyz", "torchvision::roi_align", "", "::", "é"] {
            assert_eq!(said(wanted), None, "{wanted}");
        }
    }
}
