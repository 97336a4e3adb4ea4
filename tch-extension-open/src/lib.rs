//! Operators of tch-extension on CUDA as functions of the open ABI TVM FFI, in a library that needs no
//! libtorch: JAX, CuPy and others load it. The page docs/kernels-for-others.md has the functions.
//!
//! The functions, the plans and the parameters of the kernels are files of tch-extension that do not name tch.
//! What they expect of a crate is here: `cuda`, `kernels` and the error. Without CUDA the library is empty, and
//! their unit tests are tch-extension's.
#![cfg(all(tch_extension_cuda, not(test)))]
// The files serve tch-extension, too.
#![allow(dead_code, unused_imports, unused_macros, clippy::useless_conversion)]

mod cuda;
mod error;
#[macro_use]
mod kernels;

#[path = "../../src/ops/add_rms_norm/kernels.rs"]
mod add_rms_norm_kernels;
#[path = "../../src/ops/kinds.rs"]
mod kinds;
#[path = "../../src/ops/layer_norm/kernels.rs"]
mod layer_norm_kernels;
#[path = "../../src/ops/loss/kernels.rs"]
mod loss_kernels;
#[path = "../../src/ops/norm/kernels/mod.rs"]
mod norm_kernels;
#[path = "../../src/ops/norm/plan.rs"]
mod norm_plan;
#[path = "../../src/open/mod.rs"]
mod open;
#[path = "../../src/ops/rms_norm/kernels.rs"]
mod rms_norm_kernels;
#[path = "../../src/ops/rope/kernels.rs"]
mod rope_kernels;
#[path = "../../src/ops/way.rs"]
mod way;

pub(crate) use error::{Error, Result};

/// The modules as tch-extension names them.
mod ops {
    pub(crate) use crate::{kinds, way};

    pub(crate) mod norm {
        pub(crate) use crate::norm_plan::Plan;
        pub(crate) use crate::{norm_kernels as kernels, norm_plan as plan};
    }
    pub(crate) mod rms_norm {
        pub(crate) use crate::rms_norm_kernels::KERNELS;
    }
    pub(crate) mod layer_norm {
        pub(crate) use crate::layer_norm_kernels::KERNELS;
    }
    pub(crate) mod add_rms_norm {
        pub(crate) use crate::add_rms_norm_kernels as kernels;
    }
    pub(crate) mod rope {
        pub(crate) use crate::rope_kernels as kernels;
    }
    pub(crate) mod loss {
        pub(crate) use crate::loss_kernels as kernels;
    }
}

export_open_functions!(crate::open);
