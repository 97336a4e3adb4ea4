//! Which samples of a data set a rank reads.

use super::ProcessGroup;
use crate::{Error, Result};

/// How a [`DistributedSampler`] orders and divides samples. The defaults are those of
/// `torch.utils.data.DistributedSampler`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SamplerOptions {
    /// Whether each epoch has an order of its own. Otherwise, samples come in their own order.
    /// Default: true.
    pub shuffle: bool,
    /// What decides the orders, together with the epoch. It must be the same on all ranks. Default: 0.
    pub seed: u64,
    /// When the ranks do not divide the samples: whether the last ones are left out. Otherwise, the
    /// first ones of the epoch's order come again at its end, so that all ranks have equally many.
    /// Default: false.
    pub drop_last: bool,
}

impl Default for SamplerOptions {
    fn default() -> Self {
        SamplerOptions { shuffle: true, seed: 0, drop_last: false }
    }
}

/// Divides the samples of a data set among ranks, in an order that is another one in each epoch.
///
/// With `N` ranks, rank `r` gets the places `r`, `r + N`, `r + 2N`, … of the epoch's order, so the
/// first `B` samples of all ranks are the first `N · B` of the order. That has two uses. A step of
/// `N` ranks with `B` samples each trains on what a step of one rank with `N · B` samples would. And
/// a run can go on with another number of ranks: [`DistributedSampler::skip`] leaves out how many
/// samples were seen, and divides the rest among the ranks that there are now.
///
/// The order is a function of length, seed and epoch: it does not depend on libtorch's random
/// numbers, nor on the machine. It takes no memory, and a sample's place is computed in constant
/// time, so that billions of samples cost no more than a few.
///
/// ```
/// use tch_extension::distributed::{DistributedSampler, SamplerOptions};
///
/// let sampler = |rank| DistributedSampler::new(10, rank, 2, &SamplerOptions::default());
/// let (first, second) = (sampler(0)?, sampler(1)?);
/// for epoch in 0..3 {
///     let mut all: Vec<usize> = first.epoch(epoch).chain(second.epoch(epoch)).collect();
///     all.sort();
///     assert_eq!(all, (0..10).collect::<Vec<_>>());
/// }
/// # Ok::<(), tch_extension::Error>(())
/// ```
///
/// Equivalent to: `torch.utils.data.DistributedSampler`, whose `set_epoch(e)` is the argument of
/// [`DistributedSampler::epoch`]. The orders are other ones than PyTorch's.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DistributedSampler {
    len: usize,
    rank: usize,
    ranks: usize,
    /// How many samples of each epoch are left out at its beginning.
    skipped: usize,
    options: SamplerOptions,
}

impl DistributedSampler {
    /// The samples of a rank, of a data set with `len` samples. An empty one has none.
    ///
    /// # Errors
    /// When there are no ranks, or the rank is not less than their number.
    pub fn new(
        len: usize,
        rank: usize,
        ranks: usize,
        options: &SamplerOptions,
    ) -> Result<DistributedSampler> {
        let op = "DistributedSampler::new";
        if ranks == 0 {
            return Err(Error::argument(op, "ranks", "1 or more", "0", ""));
        }
        if rank >= ranks {
            return Err(Error::argument(
                op,
                "rank",
                "a number less than the number of ranks",
                format!("rank {rank} of {ranks}"),
                "",
            ));
        }
        Ok(DistributedSampler { len, rank, ranks, skipped: 0, options: options.clone() })
    }

    /// The samples of this rank of a group.
    pub fn of_group(group: &ProcessGroup, len: usize, options: &SamplerOptions) -> Self {
        let (rank, ranks) = (group.rank(), group.size());
        DistributedSampler { len, rank, ranks, skipped: 0, options: options.clone() }
    }

    /// The same sampler without the first `seen` samples of the epoch's order, which all ranks
    /// together have seen. The rest is divided as a whole epoch is.
    ///
    /// ```
    /// use tch_extension::distributed::{DistributedSampler, SamplerOptions};
    ///
    /// let options = SamplerOptions::default();
    /// // Two ranks saw 4 samples each. Three ranks go on in the same epoch.
    /// let before = (0..2).map(|rank| DistributedSampler::new(20, rank, 2, &options));
    /// let after = (0..3).map(|rank| Ok(DistributedSampler::new(20, rank, 3, &options)?.skip(8)));
    /// let mut seen = Vec::new();
    /// for sampler in before {
    ///     seen.extend(sampler?.epoch(5).take(4));
    /// }
    /// for sampler in after {
    ///     let sampler: tch_extension::Result<DistributedSampler> = sampler;
    ///     seen.extend(sampler?.epoch(5));
    /// }
    /// seen.sort();
    /// assert_eq!(seen, (0..20).collect::<Vec<_>>());
    /// # Ok::<(), tch_extension::Error>(())
    /// ```
    pub fn skip(&self, seen: usize) -> DistributedSampler {
        DistributedSampler { skipped: seen.min(self.len), ..self.clone() }
    }

    /// The samples of the data set.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether the data set has no samples.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// How many samples each rank gets in an epoch.
    pub fn len_per_rank(&self) -> usize {
        let left = self.len - self.skipped;
        match self.options.drop_last {
            true => left / self.ranks,
            false => left.div_ceil(self.ranks),
        }
    }

    /// The samples of this rank in an epoch, as their numbers in the data set.
    pub fn epoch(&self, epoch: u64) -> Samples {
        let order =
            self.options.shuffle.then(|| Permutation::new(self.len, self.options.seed, epoch));
        Samples { sampler: self.clone(), order, next: 0, end: self.len_per_rank() }
    }
}

/// The samples of a rank in an epoch, which [`DistributedSampler::epoch`] returns.
#[derive(Clone, Debug)]
pub struct Samples {
    sampler: DistributedSampler,
    order: Option<Permutation>,
    next: usize,
    end: usize,
}

impl Samples {
    fn get(&self, index: usize) -> usize {
        let DistributedSampler { len, rank, ranks, skipped, .. } = self.sampler;
        // Past the end, the samples that are left come again, from their beginning.
        let place = skipped + (index * ranks + rank) % (len - skipped);
        match &self.order {
            Some(order) => order.get(place),
            None => place,
        }
    }
}

impl Iterator for Samples {
    type Item = usize;

    fn next(&mut self) -> Option<usize> {
        self.nth(0)
    }

    fn nth(&mut self, n: usize) -> Option<usize> {
        let index = self.next.saturating_add(n);
        self.next = index.saturating_add(1).min(self.end);
        (index < self.end).then(|| self.get(index))
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        (self.end - self.next, Some(self.end - self.next))
    }
}

impl ExactSizeIterator for Samples {}

/// A permutation of `0..len` whose values are computed one by one: a Feistel network over the next
/// power of four, applied until the result is less than `len`, which it is after less than four times
/// on average.
#[derive(Clone, Copy, Debug)]
struct Permutation {
    len: u64,
    /// The bits of each half.
    half: u32,
    key: u64,
}

/// With four rounds some permutations of six elements are several times as frequent as others; with
/// ten or more, all are equally frequent as far as a test of 288 000 draws can tell.
const ROUNDS: u64 = 12;

impl Permutation {
    fn new(len: usize, seed: u64, epoch: u64) -> Permutation {
        let len = len as u64;
        let bits = u64::BITS - len.saturating_sub(1).leading_zeros();
        Permutation { len, half: bits.div_ceil(2).max(1), key: mix(mix(seed) ^ epoch) }
    }

    fn get(&self, place: usize) -> usize {
        let mask = (1 << self.half) - 1;
        let mut value = place as u64;
        loop {
            let (mut left, mut right) = (value >> self.half, value & mask);
            for round in 0..ROUNDS {
                let key = self.key.wrapping_add(mix(round));
                (left, right) = (right, left ^ (mix(key ^ mix(right)) & mask));
            }
            value = left << self.half | right;
            // A Feistel network is an even permutation, so half of the keys exchange two values.
            if value < 2 && self.key >> 63 == 1 {
                value ^= 1;
            }
            if value < self.len {
                return value as usize;
            }
        }
    }
}

/// Mixes the bits of a number: the finaliser of SplitMix64 (Steele, Lea, Flood, 2014).
fn mix(value: u64) -> u64 {
    let value = value.wrapping_add(0x9E37_79B9_7F4A_7C15);
    let value = (value ^ (value >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let value = (value ^ (value >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    value ^ (value >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeMap;

    fn permutation(len: usize, seed: u64) -> Vec<usize> {
        let order = Permutation::new(len, seed, 0);
        (0..len).map(|place| order.get(place)).collect()
    }

    /// Of few elements, each permutation is as frequent as any other: the sum of squared deviations
    /// is what chance gives.
    #[test]
    fn all_permutations_of_a_few_are_equally_frequent() {
        for (len, all) in [(2, 2), (3, 6), (4, 24), (5, 120), (6, 720)] {
            let draws = 400 * all;
            let mut counts: BTreeMap<Vec<usize>, f64> = BTreeMap::new();
            for seed in 0..draws {
                *counts.entry(permutation(len, seed)).or_default() += 1.0;
            }
            assert_eq!(counts.len() as u64, all, "of {len}");
            let expected = draws as f64 / all as f64;
            let chi: f64 = counts.values().map(|n| (n - expected).powi(2) / expected).sum();
            let freedom = (all - 1) as f64;
            assert!(chi < freedom + 5.0 * (2.0 * freedom).sqrt(), "of {len}: {chi} for {freedom}");
        }
    }

    /// The same for the value at each place, and for the value that follows the one before.
    #[test]
    fn every_value_is_equally_frequent_at_every_place() {
        for len in [7, 16, 33, 64] {
            let draws = 200 * len as u64;
            let (mut places, mut steps) = (vec![vec![0.0; len]; len], vec![0.0; len]);
            for seed in 0..draws {
                let values = permutation(len, seed);
                values.iter().enumerate().for_each(|(place, value)| places[place][*value] += 1.0);
                values.windows(2).for_each(|pair| steps[(pair[1] + len - pair[0]) % len] += 1.0);
            }
            let chi = |counts: &[f64], expected: f64| -> f64 {
                counts.iter().map(|n| (n - expected).powi(2) / expected).sum()
            };
            let freedom = (len * (len - 1)) as f64;
            let all: f64 = places.iter().map(|counts| chi(counts, draws as f64 / len as f64)).sum();
            assert!(all < freedom + 5.0 * (2.0 * freedom).sqrt(), "of {len}: {all} for {freedom}");
            let expected = (draws as usize * (len - 1)) as f64 / (len - 1) as f64;
            let freedom = (len - 2) as f64;
            let chi = chi(&steps[1..], expected);
            assert!(chi < freedom + 6.0 * (2.0 * freedom).sqrt(), "of {len}: {chi} for {freedom}");
        }
    }

    /// If this fails, runs that resume with this version see other samples than before.
    #[test]
    fn orders_stay_as_they_are() {
        assert_eq!(permutation(10, 7), [5, 8, 0, 2, 3, 6, 1, 7, 4, 9]);
    }

    #[test]
    fn the_largest_sets_take_no_memory() {
        let options = SamplerOptions::default();
        let sampler = DistributedSampler::new(usize::MAX / 4, 3, 8, &options).unwrap();
        assert_eq!(sampler.epoch(0).take(3).count(), 3);
        assert!(sampler.epoch(1).nth(1 << 40).is_some_and(|sample| sample < usize::MAX / 4));
    }
}
