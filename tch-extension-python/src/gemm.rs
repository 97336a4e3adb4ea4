//! `linear` and `matmul_add_relu`.

use tch_extension::ops::definitions::{Linear, MatmulAddRelu};

tch_extension::register! { namespace tch_extension; Linear, MatmulAddRelu }
