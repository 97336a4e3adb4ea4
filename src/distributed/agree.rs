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
    let (expected, got) = lines_that_differ(first, &texts[rank]);
    let shown = |line: Option<&str>| line.unwrap_or("nothing more").to_string();
    Some((rank, shown(expected), shown(got)))
}

/// The first lines in which two texts differ, `None` for the one that has no more.
pub(super) fn lines_that_differ<'a>(
    left: &'a str,
    right: &'a str,
) -> (Option<&'a str>, Option<&'a str>) {
    let (mut left, mut right) = (left.lines(), right.lines());
    loop {
        let pair = (left.next(), right.next());
        if pair.0 != pair.1 || pair.0.is_none() {
            return pair;
        }
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
            let word = if is_count(tensor)? { "" } else { "checksum " };
            lines[place] = format!("{name:?} {word}{value}");
        }
        left = others;
    }
    Ok(lines)
}

/// How many values are converted to integers at once.
const AT_ONCE: i64 = 1 << 22;

/// A factor whose multiples look random in their upper halves: 2⁶⁴ over the golden ratio.
const MIXES: i64 = 0x9e37_79b9_7f4a_7c15_u64 as i64;

/// A count, or the sum of a tensor's bits, each part times a number that its place determines, so that
/// an exchange of values is seen. The numbers are odd, and 64 bits are two parts, or the highest bits
/// would be lost in the product.
fn sum_of_bits(tensor: &Tensor) -> Result<Tensor> {
    if is_count(tensor)? {
        return Ok(tensor.f_detach()?.f_squeeze()?);
    }
    let kind = match tensor.f_kind()?.elt_size_in_bytes() {
        1 => Kind::Int8,
        2 => Kind::Int16,
        4 | 8 => Kind::Int,
        _ => return Err(Error::msg("internal error: a tensor of a kind without a checksum")),
    };
    let bits = tensor.f_detach()?.f_reshape([-1])?.f_view_dtype(kind)?;
    let (len, options) = (bits.numel() as i64, (Kind::Int64, bits.device()));
    let sum = Tensor::f_zeros([], options)?;
    for begin in (0..len).step_by(AT_ONCE as usize) {
        let end = len.min(begin + AT_ONCE);
        let places = Tensor::f_arange_start(begin + 1, end + 1, options)?.f_mul_scalar(MIXES)?;
        let upper = places.f_bitwise_right_shift_tensor_scalar(32)?;
        let numbers = places.f_bitwise_xor_tensor(&upper)?.f_bitwise_or(1)?;
        let part = bits.f_narrow(0, begin, end - begin)?.f_mul(&numbers)?.f_sum(Kind::Int64)?;
        let _ = sum.shallow_clone().f_add_(&part)?;
    }
    Ok(sum)
}

/// Whether this is a number as of steps, which says more than its checksum.
fn is_count(tensor: &Tensor) -> Result<bool> {
    Ok(tensor.numel() == 1 && tensor.f_kind()? == Kind::Int64)
}

/// What the ranks have agreed on about an optimizer.
#[derive(Debug, Default)]
pub(super) struct Agreement {
    /// How often a state had been loaded when the states were compared.
    loads: Option<u64>,
    /// While a batch runs: whether the ranks have agreed on its step.
    of_batch: Option<bool>,
}

impl Agreement {
    /// A batch begins, for whose step the ranks agree once.
    pub fn begin_batch(&mut self) {
        self.of_batch = Some(false);
    }

    pub fn end_batch(&mut self) {
        self.of_batch = None;
    }

    /// Is an error on every rank if the next step of an optimizer would not be the same on all: if
    /// `settings` differ, a state was not loaded by all ranks, or what `tensors` has differs: the
    /// weights, and what belongs to the state. `tensors` is asked for before the first step and after
    /// each load, with whether there was one. All ranks must call it.
    ///
    /// Ranks tell each other a checksum only, as long as it is the same. So it costs one all-reduce of
    /// 16 bytes on the CPU.
    pub fn check(
        &mut self,
        op: &str,
        group: &ProcessGroup,
        (settings, loads): (String, u64),
        tensors: impl FnOnce(bool) -> Result<Vec<String>>,
    ) -> Result<()> {
        if group.size() == 1 || self.of_batch == Some(true) {
            return Ok(());
        }
        let mut lines = vec![settings, format!("states loaded: {loads}")];
        let mut outcome = Ok(());
        if self.loads != Some(loads) {
            lines.push("a first step, or the first one after a load".to_string());
            match tensors(loads != self.loads.unwrap_or(0)) {
                Ok(tensors) => lines.extend(tensors),
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
        self.of_batch = self.of_batch.map(|_| true);
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

    fn sum(tensor: &Tensor) -> Vec<String> {
        checksums(std::iter::once(("w", tensor))).expect("a sum")
    }

    #[test]
    fn checksums_see_every_bit() {
        let like = (Kind::Float, Device::Cpu);
        let w = Tensor::ones([3, 2], like);
        assert_eq!(sum(&w), sum(&w.copy()));
        assert_eq!(sum(&w), sum(&Tensor::ones([2, 3], like).tr()));
        let mut other = w.copy();
        let _ = other.get(1).f_mul_scalar_(1.0 + f64::from(f32::EPSILON)).expect("in place");
        assert_ne!(sum(&w), sum(&other));
        other = Tensor::ones([AT_ONCE / 4 + 1, 5], (Kind::Half, Device::Cpu));
        let expected = (1..=other.numel() as i64).fold(0_i64, |sum, place| {
            let mixed = place.wrapping_mul(MIXES);
            sum.wrapping_add(((mixed ^ (mixed >> 32)) | 1).wrapping_mul(0x3c00))
        });
        assert_eq!(sum(&other), [format!("\"w\" checksum {expected}")]);
        assert_eq!(sum(&Tensor::from(7_i64)), ["\"w\" 7"]);
        assert_eq!(sum(&Tensor::zeros([0, 3], like)), ["\"w\" checksum 0"]);
    }

    #[test]
    fn checksums_see_an_exchange() {
        let kinds = [Kind::Float, Kind::Double, Kind::Half, Kind::BFloat16, Kind::Int64];
        for kind in kinds.into_iter().chain([Kind::Int8, Kind::ComplexFloat]) {
            for pair in [[1.0, -1.0], [1.0, 2.0], [0.0, 1.0], [3.0, 100.0]] {
                let w = Tensor::from_slice(&pair).to_kind(kind);
                assert_ne!(sum(&w), sum(&w.flip([0])), "{kind:?} {pair:?}");
                let rows = Tensor::cat(&[&w, &w.flip([0])], 0).view([2, 2]);
                assert_ne!(sum(&rows), sum(&rows.flip([0])), "{kind:?} {pair:?}");
            }
        }
        // Across the parts that are summed at once, and far apart.
        let w = Tensor::zeros([AT_ONCE + 3], (Kind::Float, Device::Cpu));
        let with_one = |place: i64| {
            let other = w.copy();
            let _ = other.narrow(0, place, 1).fill_(-0.0);
            sum(&other)
        };
        let places = [0, 1, AT_ONCE - 1, AT_ONCE, AT_ONCE + 2];
        let sums: std::collections::HashSet<_> = places.map(with_one).into_iter().collect();
        assert_eq!(sums.len(), places.len());
    }
}
