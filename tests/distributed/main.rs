//! Tests of `tch_extension::distributed`, with ranks as threads and as processes.

mod collectives;
mod ddp;
mod ddp_faults;
mod ddp_support;
mod processes;
mod sampler;
