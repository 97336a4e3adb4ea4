//! `cross_entropy` and `linear_cross_entropy`.

use tch_extension::ops::definitions::{CrossEntropy, LinearCrossEntropy};

tch_extension::register! { namespace tch_extension; CrossEntropy, LinearCrossEntropy }
