//! The processes that train together. With the feature `distributed`, a launcher such as tch-run may
//! start several, each of which is a rank and trains on a part of the rows. Otherwise there is one.

use crate::options::Options;
use anyhow::{Result, ensure};
use tch::{Device, Tensor};
use tch_extension::optim::FusedOptimizer;

/// A loss that several ranks compute together, each on its rows.
pub type Loss<'a> = &'a mut dyn FnMut() -> tch_extension::Result<Tensor>;

#[cfg(feature = "distributed")]
pub use several::{Ranks, Together, Trained, inner};

#[cfg(not(feature = "distributed"))]
pub use one::{Ranks, Together, Trained, inner};

impl Ranks {
    /// The rows of this rank, as the first and their number.
    pub fn rows(&self, batch: i64) -> Result<(i64, i64)> {
        let (rank, size) = (self.rank() as i64, self.size() as i64);
        ensure!(
            batch % size == 0,
            "--batch {batch} cannot be divided among {size} processes: give a multiple of {size}"
        );
        Ok((rank * (batch / size), batch / size))
    }

    /// Whether this process writes files and prints.
    pub fn is_main(&self) -> bool {
        self.rank() == 0
    }
}

#[cfg(feature = "distributed")]
mod several {
    use super::*;
    use tch::nn::VarStore;
    use tch_extension::distributed::{
        Ddp, DdpOptimizer, DdpOptions, Env, GroupOptions, ProcessGroup, ReduceOp,
    };

    /// With one rank it does what the optimizer does.
    pub type Trained = DdpOptimizer<FusedOptimizer>;

    /// The optimizer itself, which has the learning rate.
    pub fn inner(optimizer: &mut Trained) -> &mut FusedOptimizer {
        optimizer.get_mut()
    }

    pub struct Ranks {
        group: ProcessGroup,
        device: Device,
    }

    impl Ranks {
        /// Joins the processes that the launcher started.
        pub fn join(options: &Options) -> Result<Ranks> {
            let env = Env::from_env()?;
            let device = match options.device.as_str() {
                "auto" if env.world_size > 1 && tch_extension::cuda::is_compiled() => env.device(),
                "cuda" if env.world_size > 1 => options.device_of(env.local_rank)?,
                _ => options.device()?,
            };
            let group = GroupOptions { device: Some(device), ..Default::default() };
            let group = ProcessGroup::init(&env, &group)?;
            Ok(Ranks { group, device })
        }

        pub fn rank(&self) -> usize {
            self.group.rank()
        }

        pub fn size(&self) -> usize {
            self.group.size()
        }

        pub fn device(&self) -> Device {
            self.device
        }

        /// Averages the gradients of these variables, which become those of rank 0.
        pub fn train(
            &self,
            variables: &VarStore,
            optimizer: FusedOptimizer,
        ) -> Result<(Together, Trained)> {
            let ddp = Ddp::new(&self.group, variables, DdpOptions::default())?;
            let optimizer = ddp.guard(optimizer)?;
            Ok((Together(ddp), optimizer))
        }

        /// Replaces numbers by their means over all ranks. They are on the CPU.
        pub fn mean(&self, numbers: &Tensor) -> Result<()> {
            Ok(self.group.all_reduce(numbers, ReduceOp::Avg)?)
        }

        /// Tells the other ranks if `body` fails.
        pub fn run(&self, body: impl FnOnce() -> Result<()>) -> Result<()> {
            self.group.run(body)
        }

        /// Waits for all ranks, at the end.
        pub fn leave(&self) -> Result<()> {
            Ok(self.group.shutdown()?)
        }
    }

    /// Forward passes whose gradients are averaged.
    pub struct Together(Ddp);

    impl Together {
        pub fn forward(&self, loss: Loss<'_>) -> tch_extension::Result<Tensor> {
            self.0.forward(loss)
        }
    }
}

#[cfg(not(feature = "distributed"))]
mod one {
    use super::*;
    use tch::nn::VarStore;

    pub type Trained = FusedOptimizer;

    pub fn inner(optimizer: &mut Trained) -> &mut FusedOptimizer {
        optimizer
    }

    pub struct Ranks {
        device: Device,
    }

    impl Ranks {
        pub fn join(options: &Options) -> Result<Ranks> {
            for name in ["WORLD_SIZE", "SLURM_NTASKS"] {
                let is_one = std::env::var(name).map_or(true, |value| value.trim() == "1");
                ensure!(
                    is_one,
                    "{name} asks for several processes, and this program was built for one: build it with \
                     `--features distributed`"
                );
            }
            Ok(Ranks { device: options.device()? })
        }

        pub fn rank(&self) -> usize {
            0
        }

        pub fn size(&self) -> usize {
            1
        }

        pub fn device(&self) -> Device {
            self.device
        }

        pub fn run(&self, body: impl FnOnce() -> Result<()>) -> Result<()> {
            body()
        }

        pub fn train(
            &self,
            _: &VarStore,
            optimizer: FusedOptimizer,
        ) -> Result<(Together, Trained)> {
            Ok((Together, optimizer))
        }

        pub fn mean(&self, _numbers: &Tensor) -> Result<()> {
            Ok(())
        }

        pub fn leave(&self) -> Result<()> {
            Ok(())
        }
    }

    pub struct Together;

    impl Together {
        pub fn forward(&self, loss: Loss<'_>) -> tch_extension::Result<Tensor> {
            loss()
        }
    }
}
