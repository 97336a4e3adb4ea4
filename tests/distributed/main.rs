//! Tests of `tch_extension::distributed`, with ranks as threads and as processes.

mod collectives;
mod ddp;
mod ddp_cuda;
mod ddp_faults;
mod ddp_python;
mod ddp_support;
mod ddp_train;
mod processes;
