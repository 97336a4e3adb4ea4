//! How many blocks and threads run a kernel.

use crate::ffi::cuda_types::{LaunchFacts, LaunchGrid};

/// The size of a launch: blocks, threads in a block, blocks in a cluster, and shared memory.
///
/// ```
/// # use tch_extension::cuda::Grid;
/// let grid = Grid::new([64, 1, 1], [256, 1, 1]);
/// let grid = grid.shared(100 << 10).cluster([2, 1, 1]);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub struct Grid {
    blocks: [u32; 3],
    threads: [u32; 3],
    cluster: Option<[u32; 3]>,
    shared: usize,
}

/// CUDA's limits in x, y and z, which are the same for all GPUs.
const MOST_BLOCKS: [u32; 3] = [i32::MAX as u32, 65535, 65535];
const MOST_THREADS: [u32; 3] = [1024, 1024, 64];
/// The most blocks in a cluster, and the compute capability that has clusters.
const MOST_IN_CLUSTER: u64 = 16;
const HAS_CLUSTERS: i32 = 90;

impl Grid {
    /// This many blocks in x, y and z, of this many threads each. As everywhere in CUDA, there is no
    /// empty grid: do not launch a kernel for an empty tensor.
    pub const fn new(blocks: [u32; 3], threads: [u32; 3]) -> Grid {
        Grid { blocks, threads, cluster: None, shared: 0 }
    }

    /// Gives each block this many bytes of dynamic shared memory. More than 48 KiB need no further
    /// call; the limit is that of the GPU, less the kernel's static shared memory.
    pub const fn shared(mut self, bytes: usize) -> Grid {
        self.shared = bytes;
        self
    }

    /// Groups the blocks into clusters of this many blocks in x, y and z (Hopper and newer). More than
    /// 8 in all do not fit on every GPU. A kernel whose size of clusters is part of its image
    /// (`__cluster_dims__`) needs no call.
    pub const fn cluster(mut self, blocks: [u32; 3]) -> Grid {
        self.cluster = Some(blocks);
        self
    }

    pub(super) fn parts(&self) -> LaunchGrid {
        let Grid { blocks, threads, cluster, shared } = *self;
        LaunchGrid { blocks, threads, cluster: cluster.unwrap_or_default(), shared: shared as u64 }
    }

    pub(super) fn check(&self, facts: &LaunchFacts) -> Result<(), String> {
        let Grid { blocks, threads, cluster, shared } = *self;
        within("blocks", blocks, MOST_BLOCKS)?;
        within("threads", threads, MOST_THREADS)?;
        let in_block = product(threads);
        if in_block > u64::from(facts.max_threads) {
            return Err(format!(
                "expected at most {} threads in a block, which is this kernel's limit here, got {in_block}",
                facts.max_threads
            ));
        }
        if shared as u64 > facts.max_shared {
            return Err(format!(
                "expected at most {} bytes of dynamic shared memory next to {} static ones, got {shared}",
                facts.max_shared, facts.static_shared
            ));
        }
        cluster.map_or(Ok(()), |cluster| check_cluster(cluster, blocks, facts.capability))
    }
}

fn product(sizes: [u32; 3]) -> u64 {
    sizes.into_iter().map(u64::from).fold(1, u64::saturating_mul)
}

fn within(what: &str, sizes: [u32; 3], most: [u32; 3]) -> Result<(), String> {
    match sizes.iter().zip(most).all(|(size, most)| (1..=most).contains(size)) {
        true => Ok(()),
        false => Err(format!("expected {what} from [1, 1, 1] to {most:?}, got {sizes:?}")),
    }
}

fn check_cluster(cluster: [u32; 3], blocks: [u32; 3], capability: i32) -> Result<(), String> {
    if capability < HAS_CLUSTERS {
        let (major, minor) = (capability / 10, capability % 10);
        return Err(format!(
            "clusters need compute capability 9.0 or newer, and this GPU has {major}.{minor}"
        ));
    }
    let divides = |(size, blocks): (&u32, u32)| *size > 0 && blocks.is_multiple_of(*size);
    if product(cluster) > MOST_IN_CLUSTER || !cluster.iter().zip(blocks).all(divides) {
        return Err(format!(
            "expected a cluster of at most {MOST_IN_CLUSTER} blocks that divides {blocks:?}, got {cluster:?}"
        ));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn facts(capability: i32) -> LaunchFacts {
        LaunchFacts {
            capability,
            max_threads: 512,
            static_shared: 1024,
            max_shared: 231_424,
            params: Some(0),
            sizes: Vec::new(),
        }
    }

    fn refused(grid: Grid, capability: i32, says: &str) {
        let text = grid.check(&facts(capability)).expect_err("it was accepted");
        assert!(text.contains(says) && !text.contains('\n'), "{text}");
    }

    #[test]
    fn sizes_within_the_limits_are_accepted() {
        for grid in [
            Grid::new([1; 3], [1; 3]),
            Grid::new([i32::MAX as u32, 65535, 65535], [512, 1, 1]),
            Grid::new([4, 2, 3], [8, 1, 64]).shared(231_424),
            Grid::new([32, 2, 3], [32, 1, 1]).cluster([16, 1, 1]),
            Grid::new([4, 4, 2], [32, 1, 1]).cluster([2, 2, 2]),
        ] {
            assert_eq!(grid.check(&facts(90)), Ok(()), "{grid:?}");
        }
    }

    #[test]
    fn sizes_beyond_the_limits_are_refused() {
        let threads = [32, 1, 1];
        for blocks in [[0, 1, 1], [1, 0, 1], [1, 1, 0], [1, 65536, 1], [1 << 31, 1, 1]] {
            refused(
                Grid::new(blocks, threads),
                90,
                "expected blocks from [1, 1, 1] to [2147483647",
            );
        }
        for threads in [[0, 1, 1], [1025, 1, 1], [1, 1, 65]] {
            refused(Grid::new([1; 3], threads), 90, "expected threads from [1, 1, 1] to [1024");
        }
        refused(Grid::new([1; 3], [513, 1, 1]), 90, "at most 512 threads in a block");
        refused(Grid::new([1; 3], [1024, 1024, 64]), 90, "got 67108864");
        let shared = Grid::new([1; 3], threads).shared(231_425);
        refused(shared, 90, "at most 231424 bytes of dynamic shared memory next to 1024 static");
        let clusters = [[3, 1, 1], [0, 1, 1], [2, 0, 1], [0, 0, 0], [32, 1, 1], [u32::MAX; 3]];
        for cluster in clusters {
            let grid = Grid::new([32, 2, 3], threads).cluster(cluster);
            refused(grid, 90, "at most 16 blocks that divides [32, 2, 3]");
        }
        let grid = Grid::new([32, 2, 3], threads).cluster([2, 1, 1]);
        refused(grid, 86, "need compute capability 9.0 or newer, and this GPU has 8.6");
    }
}
