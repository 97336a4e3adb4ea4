//! `gelu_mlp` and `swiglu_mlp`.

use tch_extension::ops::definitions::{GeluMlp, SwigluMlp};

tch_extension::register! { namespace tch_extension; GeluMlp, SwigluMlp }
