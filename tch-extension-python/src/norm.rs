//! `layer_norm`, `rms_norm`, `add_layer_norm` and `add_rms_norm`.

use tch_extension::ops::definitions::{AddLayerNorm, AddRmsNorm, LayerNorm, RmsNorm};

tch_extension::register! { namespace tch_extension; LayerNorm, RmsNorm, AddLayerNorm, AddRmsNorm }
