//! What ranks tell each other on the host: whether they have the same model, and whether all of them
//! succeeded. An error of one rank becomes an error of every rank, so that none waits for another.

use crate::Result;
use crate::distributed::{ProcessGroup, failed};
use tch::{Device, Tensor};

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

/// Is an error on every rank if a rank has other lines than rank 0, which names the first.
pub(super) fn all_have(op: &str, group: &ProcessGroup, lines: &[String]) -> Result<()> {
    let texts = exchange(group, &lines.join("\n"))?;
    match difference(&texts) {
        None => Ok(()),
        Some((rank, expected, got)) => Err(failed(
            op,
            format!(
                "rank {rank} has another model or other settings: expected {expected}, as rank 0 \
                 has, got {got}; build the same on every rank"
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
}
