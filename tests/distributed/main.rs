//! Tests of `tch_extension::distributed`, with ranks as threads and as processes.

mod collectives;
mod sharded;
