//! What ranks tell each other on the host: whether they have the same model, whether all of them
//! succeeded, and whether their optimizers do the same. An error of one rank becomes an error of every
//! rank, so that none waits for another.

use super::{ProcessGroup, ReduceOp, failed};
use crate::{Error, Result};
use std::hash::{DefaultHasher, Hash, Hasher};
use tch::{Device, Kind, Tensor};

/// The text of each rank, on every rank.
pub(super) fn exchange(group: &ProcessGroup, text: &str) -> Result<Vec<String>> {
    if group.size() == 1 {
        return Ok(vec![text.to_string()]);
    }
    let lens = gather(group, &Tensor::f_from_slice(&[text.len() as i64])?)?;
    let lens = Vec::<i64>::try_from(&lens)?;
    let longest = lens.iter().copied().max().unwrap_or(0).max(0) as usize;
    if longest == 0 {
        return Ok(vec![String::new(); group.size()]);
    }
    let mut bytes = text.as_bytes().to_vec();
    bytes.resize(longest, 0);
    let all = Vec::<u8>::try_from(&gather(group, &Tensor::f_from_slice(&bytes)?)?)?;
    let texts = all.chunks(longest).zip(lens).map(|(bytes, len)| {
        let bytes = bytes.get(..len.max(0) as usize).unwrap_or_default();
        String::from_utf8_lossy(bytes).into_owned()
    });
    Ok(texts.collect())
}

/// The tensors of all ranks, one after the other. The tensor has one dimension and is on the CPU.
fn gather(group: &ProcessGroup, tensor: &Tensor) -> Result<Tensor> {
    let len = tensor.numel() as i64 * group.size() as i64;
    let all = Tensor::f_empty([len], (tensor.f_kind()?, Device::Cpu))?;
    group.all_gather_into(&all, tensor)?;
    Ok(all)
}

/// Is an error on every rank if `outcome` is an error on one of them.
pub(super) fn all_succeed<T>(op: &str, group: &ProcessGroup, outcome: Result<T>) -> Result<T> {
    let text = outcome.as_ref().err().map_or(String::new(), |error| format!("{error} "));
    let texts = exchange(group, &text);
    // An own error says more than that the others could not be told.
    let value = outcome?;
    let texts = texts?;
    match texts.iter().position(|text| !text.is_empty()) {
        None => Ok(value),
        Some(rank) => Err(failed(op, format!("rank {rank} failed: {}", texts[rank]))),
    }
}

/// Is an error on every rank if a rank has other lines than rank 0, which names the first. `what` is
/// what they describe, and `hint` what to do.
pub(super) fn all_have(
    op: &str,
    group: &ProcessGroup,
    lines: &[String],
    (what, hint): (&str, &str),
) -> Result<()> {
    let texts = exchange(group, &lines.join("\n"))?;
    match difference(&texts) {
        None => Ok(()),
        Some((rank, expected, got)) => Err(failed(
            op,
            format!(
                "rank {rank} has {what}: expected {expected}, as rank 0 has, got {got}; {hint} on \
                 every rank"
            ),
        )),
    }
}

/// The first rank whose text differs from rank 0's, with the first lines that differ.
fn difference(texts: &[String]) -> Option<(usize, String, String)> {
    let first = texts.first()?;
    let rank = texts.iter().position(|text| text != first)?;
    let (mut expected, mut got) = (first.lines(), texts[rank].lines());
    loop {
        let pair = (expected.next(), got.next());
        if pair.0 == pair.1 && pair.0.is_some() {
            continue;
        }
        let shown = |line: Option<&str>| line.unwrap_or("nothing more").to_string();
        return Some((rank, shown(pair.0), shown(pair.1)));
    }
}

/// Lines with a checksum of the bits of each tensor, which are equal for equal tensors.
pub(super) fn checksums<'a>(
    tensors: impl Iterator<Item = (&'a str, &'a Tensor)>,
) -> Result<Vec<String>> {
    let _no_grad = tch::no_grad_guard();
    // The sums of each device are read together, because each read waits for the device.
    let named: Vec<(&str, &Tensor)> = tensors.collect();
    let sums = named.iter().map(|(_, tensor)| sum_of_bits(tensor)).collect::<Result<Vec<_>>>()?;
    let mut lines = vec![String::new(); named.len()];
    let mut left: Vec<usize> = (0..named.len()).collect();
    while let Some(&first) = left.first() {
        let device = sums[first].device();
        let (here, others): (Vec<usize>, Vec<usize>) =
            left.into_iter().partition(|&place| sums[place].device() == device);
        let together: Vec<&Tensor> = here.iter().map(|&place| &sums[place]).collect();
        let values =
            Vec::<i64>::try_from(Tensor::f_stack(&together, 0)?.f_to_device(Device::Cpu)?)?;
        for (place, value) in here.into_iter().zip(values) {
            let (name, tensor) = named[place];
            // A count says more than its checksum, which it is.
            let word = if tensor.numel() == 1 && tensor.f_kind()? == Kind::Int64 {
                ""
            } else {
                "checksum "
            };
            lines[place] = format!("{name:?} {word}{value}");
        }
        left = others;
    }
    Ok(lines)
}

/// How many values are converted to integers at once.
const AT_ONCE: i64 = 1 << 22;

fn sum_of_bits(tensor: &Tensor) -> Result<Tensor> {
    let kind = match tensor.f_kind()?.elt_size_in_bytes() {
        1 => Kind::Int8,
        2 => Kind::Int16,
        4 => Kind::Int,
        8 => Kind::Int64,
        _ => return Err(Error::msg("internal error: a tensor of a kind without a checksum")),
    };
    let bits = tensor.f_detach()?.f_view_dtype(kind)?;
    let Some(rows) = bits.size().first().copied().filter(|_| bits.numel() as i64 > AT_ONCE) else {
        return Ok(bits.f_sum(Kind::Int64)?);
    };
    let each = (AT_ONCE / (bits.numel() as i64 / rows)).max(1);
    let sums = bits.f_split(each, 0)?.into_iter().map(|part| Ok(part.f_sum(Kind::Int64)?));
    Ok(Tensor::f_stack(&sums.collect::<Result<Vec<_>>>()?, 0)?.f_sum(Kind::Int64)?)
}

/// What the ranks have agreed on about an optimizer.
#[derive(Debug, Default)]
pub(super) struct Agreement {
    /// How often a state had been loaded when the states were compared.
    loads: Option<u64>,
}

impl Agreement {
    /// Is an error on every rank if the next step of an optimizer would not be the same on all: if
    /// `settings` differ, a state was not loaded by all ranks, or what `state` has differs. `state` is
    /// asked for before the first step and after each load, with whether there was one. All ranks must
    /// call it.
    ///
    /// Ranks tell each other a checksum only, as long as it is the same. So it costs one all-reduce of
    /// 16 bytes on the CPU.
    pub fn check(
        &mut self,
        op: &str,
        group: &ProcessGroup,
        (settings, loads): (String, u64),
        state: impl FnOnce(bool) -> Result<Vec<String>>,
    ) -> Result<()> {
        let is_due = self.loads != Some(loads);
        if group.size() == 1 {
            return Ok(());
        }
        let mut lines = vec![settings, format!("states loaded: {loads}")];
        let mut outcome = Ok(());
        if is_due {
            lines.push("a first step, or the first one after a load".to_string());
            match state(loads > 0) {
                Ok(state) => lines.extend(state),
                Err(error) => {
                    lines.push(error.to_string());
                    outcome = Err(error);
                }
            }
        } else {
            lines.push("a later step".to_string());
        }
        let mut hasher = DefaultHasher::new();
        (&lines, outcome.is_err()).hash(&mut hasher);
        let hash = hasher.finish() as i64;
        // The largest, and the complement of the smallest.
        let extremes = Tensor::f_from_slice(&[hash, !hash])?;
        group.all_reduce(&extremes, ReduceOp::Max)?;
        let extremes = Vec::<i64>::try_from(&extremes)?;
        if extremes.first() != extremes.last().map(|smallest| !smallest).as_ref() {
            let how = ("another optimizer, state or model", "set, load and build the same");
            all_have(op, group, &lines, how)?;
        }
        outcome?;
        self.loads = Some(loads);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_line_that_differs_is_named() {
        let texts = |texts: &[&str]| texts.iter().map(|text| text.to_string()).collect::<Vec<_>>();
        assert_eq!(difference(&texts(&["a\nb", "a\nb"])), None);
        let found =
            |rank, expected: &str, got: &str| Some((rank, expected.to_string(), got.to_string()));
        assert_eq!(difference(&texts(&["a\nb", "a\nb", "a\nc"])), found(2, "b", "c"));
        assert_eq!(difference(&texts(&["a\nb", "a"])), found(1, "b", "nothing more"));
        assert_eq!(difference(&texts(&["a", "a\nb"])), found(1, "nothing more", "b"));
    }

    #[test]
    fn checksums_see_every_bit() {
        let sum = |tensor: &Tensor| checksums(std::iter::once(("w", tensor))).expect("a sum");
        let like = (Kind::Float, Device::Cpu);
        let w = Tensor::ones([3, 2], like);
        assert_eq!(sum(&w), sum(&w.copy()));
        assert_eq!(sum(&w), sum(&Tensor::ones([2, 3], like).tr()));
        let mut other = w.copy();
        let _ = other.get(1).f_mul_scalar_(1.0 + f64::from(f32::EPSILON)).expect("in place");
        assert_ne!(sum(&w), sum(&other));
        other = Tensor::ones([AT_ONCE / 4 + 1, 5], (Kind::Half, Device::Cpu));
        assert_eq!(sum(&other), [format!("\"w\" checksum {}", 0x3c00 * (AT_ONCE / 4 + 1) * 5)]);
        assert_eq!(sum(&Tensor::from(7_i64)), ["\"w\" 7"]);
        assert_eq!(sum(&Tensor::zeros([0, 3], like)), ["\"w\" checksum 0"]);
    }
}
