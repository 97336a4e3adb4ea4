//! The kernels. No text has bounds checks, whatever the execution mode is: each kernel makes its own.

use cubecl::prelude::*;

#[cube(launch)]
pub fn silu_forward<F: Float>(x: &[F], y: &mut [F]) {
    if ABSOLUTE_POS < y.len() {
        let v = x[ABSOLUTE_POS];
        y[ABSOLUTE_POS] = v / (F::new(1.0) + F::exp(-v));
    }
}

#[cube(launch)]
pub fn silu_backward<F: Float>(x: &[F], g: &[F], dx: &mut [F]) {
    if ABSOLUTE_POS < dx.len() {
        let v = x[ABSOLUTE_POS];
        let s = F::new(1.0) / (F::new(1.0) + F::exp(-v));
        dx[ABSOLUTE_POS] = g[ABSOLUTE_POS] * s * (F::new(1.0) + v * (F::new(1.0) - s));
    }
}
