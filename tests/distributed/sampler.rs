//! The samples of all ranks of an epoch, against the rules of torch.utils.data.DistributedSampler.

use proptest::prelude::*;
use tch_extension::distributed::{DistributedSampler, SamplerOptions, run_ranks};

fn options(shuffle: bool, drop_last: bool) -> SamplerOptions {
    let mut options = SamplerOptions::default();
    (options.shuffle, options.drop_last) = (shuffle, drop_last);
    options
}

fn samplers(len: usize, ranks: usize, options: &SamplerOptions) -> Vec<DistributedSampler> {
    (0..ranks).map(|rank| DistributedSampler::new(len, rank, ranks, options).unwrap()).collect()
}

/// The samples of an epoch in the order in which ranks in step see them.
fn seen(samplers: &[DistributedSampler], epoch: u64) -> Vec<usize> {
    let of_ranks: Vec<Vec<usize>> = samplers.iter().map(|s| s.epoch(epoch).collect()).collect();
    let each = of_ranks[0].len();
    assert!(of_ranks.iter().all(|samples| samples.len() == each), "ranks have unequal numbers");
    (0..each).flat_map(|i| of_ranks.iter().map(move |samples| samples[i])).collect()
}

fn sorted(mut samples: Vec<usize>) -> Vec<usize> {
    samples.sort_unstable();
    samples
}

/// The indices that PyTorch's sampler gives with shuffle=False: its rules for the ends.
#[test]
fn without_a_shuffle_the_samples_are_pytorch_s() {
    let samples = |len, ranks, drop_last| -> Vec<Vec<usize>> {
        let samplers = samplers(len, ranks, &options(false, drop_last));
        samplers.iter().map(|sampler| sampler.epoch(3).collect()).collect()
    };
    assert_eq!(samples(10, 3, false), [[0, 3, 6, 9], [1, 4, 7, 0], [2, 5, 8, 1]]);
    assert_eq!(samples(10, 3, true), [[0, 3, 6], [1, 4, 7], [2, 5, 8]]);
    // With fewer samples than ranks, they are repeated as often as need be.
    assert_eq!(samples(2, 5, false), [[0], [1], [0], [1], [0]]);
    assert_eq!(samples(2, 5, true), [[0_usize; 0]; 5]);
    assert_eq!(samples(0, 2, false), [[0_usize; 0]; 2]);
    assert_eq!(samples(6, 2, false), samples(6, 2, true));
}

proptest! {
    #[test]
    fn every_sample_comes_once_an_epoch(
        len in 0_usize..200, ranks in 1_usize..9, seed: u64, epoch: u64, shuffle: bool, drop_last: bool,
    ) {
        let mut options = options(shuffle, drop_last);
        options.seed = seed;
        let samplers = samplers(len, ranks, &options);
        let all = seen(&samplers, epoch);
        let each = if drop_last { len / ranks } else { len.div_ceil(ranks) };
        prop_assert_eq!(samplers[0].len_per_rank(), each);
        prop_assert_eq!(all.len(), each * ranks);
        let once = sorted(all[..all.len().min(len)].to_vec());
        let mut distinct = once.clone();
        distinct.dedup();
        prop_assert_eq!(&once, &distinct, "a sample came twice before all had come once");
        prop_assert!(once.iter().all(|&sample| sample < len));
        prop_assert!(drop_last || once.len() == len);
        // What comes again are the first ones of the order, in their order.
        for (again, first) in all.iter().skip(len).zip(all.iter().cycle()) {
            prop_assert_eq!(again, first);
        }
    }

    /// The order is the same for each number of ranks, and the rest of an epoch can be divided among
    /// another number.
    #[test]
    fn a_run_goes_on_with_another_number_of_ranks(
        len in 1_usize..200, before in 1_usize..9, after in 1_usize..9, steps in 0_usize..50,
    ) {
        let options = options(true, false);
        let order: Vec<usize> = samplers(len, 1, &options)[0].epoch(1).collect();
        let first = samplers(len, before, &options);
        let steps = steps.min(len / before);
        let all = seen(&first, 1);
        prop_assert_eq!(&all[..steps * before], &order[..steps * before]);
        let rest: Vec<_> = samplers(len, after, &options).iter().map(|s| s.skip(steps * before)).collect();
        let rest = seen(&rest, 1);
        let left = len - steps * before;
        prop_assert_eq!(rest.len(), left.div_ceil(after) * after);
        prop_assert_eq!(&rest[..left], &order[steps * before..]);
    }
}

#[test]
fn seed_and_epoch_decide_the_order() {
    let order = |seed, epoch| -> Vec<usize> {
        let mut options = options(true, false);
        options.seed = seed;
        DistributedSampler::new(100, 0, 1, &options).unwrap().epoch(epoch).collect()
    };
    tch::manual_seed(1);
    let first = order(1, 0);
    tch::manual_seed(2);
    assert_eq!(first, order(1, 0));
    assert_ne!(first, order(1, 1));
    assert_ne!(first, order(2, 0));
    // Neither is the other's: seed 1 in epoch 0 is not seed 0 in epoch 1.
    assert_ne!(first, order(0, 1));
    assert_ne!(first, (0..100).collect::<Vec<_>>());
}

#[test]
fn samples_are_counted_and_can_be_passed_over() {
    let sampler = DistributedSampler::new(10, 1, 3, &options(false, false)).unwrap();
    let mut samples = sampler.epoch(0);
    assert_eq!((samples.len(), samples.nth(1), samples.len()), (4, Some(4), 2));
    assert_eq!((samples.nth(5), samples.next(), samples.len()), (None, None, 0));
    assert_eq!(sampler.skip(99).epoch(0).next(), None);
    assert_eq!((sampler.len(), sampler.is_empty()), (10, false));
}

#[test]
fn a_group_s_ranks_divide_the_samples() {
    let of_ranks = run_ranks(3, |group| {
        let sampler = DistributedSampler::of_group(&group, 9, &SamplerOptions::default());
        Ok(sampler.epoch(0).collect::<Vec<_>>())
    })
    .unwrap();
    assert_eq!(sorted(of_ranks.concat()), (0..9).collect::<Vec<_>>());
}

#[test]
fn a_rank_that_is_not_there_is_refused() {
    let error = DistributedSampler::new(10, 3, 3, &SamplerOptions::default()).unwrap_err();
    let expected = "DistributedSampler::new: rank: expected a number less than the number of ranks, got rank 3 of 3";
    assert_eq!(error.to_string(), expected);
}

#[test]
fn no_ranks_at_all_are_refused() {
    let options = SamplerOptions { seed: 3, ..Default::default() };
    let error = DistributedSampler::new(10, 0, 0, &options).unwrap_err();
    assert_eq!(error.to_string(), "DistributedSampler::new: ranks: expected 1 or more, got 0");
}
