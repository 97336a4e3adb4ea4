//! Weights in files that PyTorch reads and writes: safetensors.
//!
//! [`load`] is torch's `load_state_dict`, and [`save`] writes what it reads. Compared with
//! tch's [`VarStore::load`] and [`VarStore::save`]:
//!
//! - [`load`] first checks names, shapes and kinds of all tensors. If something does not fit, it
//!   names everything that does not, and no variable is changed.
//! - Variables keep their kind: floating-point values are converted, as torch does. tch gives the
//!   variable the file's kind.
//! - Variables keep their memory, so optimizers, CUDA graphs and views of them stay valid.
//! - [`save`] writes a new file and then renames it. If the process is killed, or the disk is full,
//!   the file has its old contents or its new ones.
//! - Names may differ between the model and the file, and matrices may be transposed.
//! - A model may be split into several files, as Hugging Face's large ones are: [`files`] finds them,
//!   and [`save_sharded`] writes them.
//!
//! A file of Hugging Face's GPT-2 has the names of this crate's layers if the model's paths follow
//! it, but keeps some weights transposed (`Conv1D`), and its buffers `attn.bias` are no parameters:
//!
#![cfg_attr(feature = "gemm", doc = "```no_run")]
#![cfg_attr(not(feature = "gemm"), doc = "```ignore")]
//! # use tch::{Device, nn::VarStore};
//! # use tch_extension::nn::{AttentionConfig, attention, state_dict::{StateDictOptions, load}};
//! let vs = VarStore::new(Device::Cpu);
//! let layer = attention(vs.root() / "h" / 0 / "attn", 768, 12, AttentionConfig::gpt2());
//! // …the rest of the model
//! let conv1d = ["c_attn.weight", "c_proj.weight", "c_fc.weight"];
//! let options = StateDictOptions {
//!     strict: false,
//!     transposed: Some(&|name| conv1d.iter().any(|end| name.ends_with(end))),
//!     ..Default::default()
//! };
//! let report = load(&vs, &["model.safetensors"], &options)?;
//! assert!(report.missing.is_empty());
//! assert!(report.unexpected.iter().all(|name| name.ends_with("attn.bias")));
//! # let _ = layer;
//! # Ok::<(), tch_extension::Error>(())
//! ```

pub use crate::state_dict::{
    LoadReport, StateDictOptions, files, load, load_tensors, save, save_sharded, save_tensors,
};

#[cfg(doc)]
use tch::nn::VarStore;
