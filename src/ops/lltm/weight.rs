//! The gradient of the weight, a product over all steps: `Σ dG[t]ᵀ [h[t-1], x[t]]`.

use super::super::recurrent::{columns, product};
use super::functions::is_in_tf32;
use super::plan::Sizes;
use crate::Result;
use crate::ffi::facts::empty_of;
use tch::{Kind, Tensor};

pub(super) struct Operands<'a> {
    /// `[T·B, 3H]`
    pub grad_gates: &'a Tensor,
    /// `[B, H]`
    pub h0: &'a Tensor,
    /// h, `[T, B, H]`
    pub output: &'a Tensor,
    /// x, `[T, B, F]`
    pub input: &'a Tensor,
    pub sizes: Sizes,
}

/// Where the product reads h and x.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Layout {
    /// In a copy that has h and x next to each other in each row.
    SideBySide,
    /// In the same copy, but column by column: `Float` on CUDA (`csrc/recurrent/columns.cu`).
    ByColumns,
    /// In their own memory, without a copy, in three products: half kinds on CUDA, with sums in
    /// `Float`.
    InPlace,
}

impl Layout {
    /// The fastest layout for operands on CUDA that are all of one kind (`kind` is `None` for any
    /// others, which have a single layout). `tf32` says whether libtorch may use tf32 in their
    /// products.
    fn new(kind: Option<Kind>, tf32: bool, sizes: Sizes) -> Layout {
        /// Bytes of h and x. Copying this many takes longer than two additional products: on an
        /// H200 the copy is 620 µs of 2820 at (T, B, F, H) = (512, 256, 1024, 1024).
        const LARGE: i64 = 48 << 20;
        let Sizes { steps, batch, features, hidden } = sizes;
        match kind {
            Some(Kind::Float) if tf32 => Layout::ByColumns,
            Some(kind @ (Kind::Half | Kind::BFloat16)) if steps > 1 && features > 0 => {
                let size = kind.elt_size_in_bytes() as i64;
                let rows = steps.saturating_mul(batch);
                let bytes =
                    rows.saturating_mul(hidden.saturating_add(features)).saturating_mul(size);
                if bytes >= LARGE { Layout::InPlace } else { Layout::SideBySide }
            }
            _ => Layout::SideBySide,
        }
    }
}

impl Operands<'_> {
    /// The gradient, `[3H, H + F]`, of the gates' kind or of `Float`.
    pub fn product(&self) -> Result<Tensor> {
        let Operands { grad_gates, h0, output, input, sizes } = *self;
        let kind = grad_gates.f_kind()?;
        let same = grad_gates.device().is_cuda()
            && [h0, output, input].iter().all(|part| part.kind() == kind);
        self.product_by(Layout::new(same.then_some(kind), is_in_tf32(grad_gates)?, sizes))
    }

    fn product_by(&self, way: Layout) -> Result<Tensor> {
        match way {
            Layout::SideBySide => self.side_by_side(),
            Layout::ByColumns => self.by_columns(),
            Layout::InPlace => self.in_place(),
        }
    }

    fn side_by_side(&self) -> Result<Tensor> {
        let Sizes { steps, batch, features, hidden } = self.sizes;
        let operands = (self.grad_gates.f_kind()?, self.grad_gates.device());
        let hx = empty_of(&[steps, batch, hidden + features], operands)?;
        let before = hx.f_narrow(2, 0, hidden)?;
        before.f_select(0, 0)?.f_copy_(self.h0)?;
        before.f_narrow(0, 1, steps - 1)?.f_copy_(&self.output.f_narrow(0, 0, steps - 1)?)?;
        hx.f_narrow(2, hidden, features)?.f_copy_(self.input)?;
        let hx = hx.f_view([steps * batch, hidden + features])?;
        product(&self.grad_gates.f_transpose(0, 1)?, &hx, None)
    }

    fn by_columns(&self) -> Result<Tensor> {
        let columns = columns([self.h0, self.output, self.input])?;
        product(&self.grad_gates.f_transpose(0, 1)?, &columns.f_transpose(0, 1)?, None)
    }

    fn in_place(&self) -> Result<Tensor> {
        let Sizes { steps, batch, features, hidden } = self.sizes;
        let rows = steps * batch;
        let grads_of = |first, rows| self.grad_gates.f_narrow(0, first, rows)?.f_transpose(0, 1);
        let before = self.output.f_reshape([rows, hidden])?.f_narrow(0, 0, rows - batch)?;
        let of_h = grads_of(batch, rows - batch)?.f_mm_dtype(&before, Kind::Float)?.f_addmm_dtype(
            &grads_of(0, batch)?,
            self.h0,
            Kind::Float,
        )?;
        let of_x =
            grads_of(0, rows)?.f_mm_dtype(&self.input.f_reshape([rows, features])?, Kind::Float)?;
        Ok(Tensor::f_cat(&[of_h, of_x], 1)?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::cuda_or_skip;
    use tch::Device;

    fn sizes([steps, batch, features, hidden]: [i64; 4]) -> Sizes {
        Sizes { steps, batch, features, hidden }
    }

    #[test]
    fn the_way_suits_kind_and_size() {
        let small = sizes([512, 16, 512, 512]);
        let large = sizes([512, 64, 512, 512]);
        for kind in [Kind::Half, Kind::BFloat16] {
            assert_eq!(Layout::new(Some(kind), true, small), Layout::SideBySide);
            assert_eq!(Layout::new(Some(kind), false, large), Layout::InPlace);
            // With a single step or without features, one of the products would be empty.
            assert_eq!(
                Layout::new(Some(kind), false, sizes([1, 64 * 512, 512, 512])),
                Layout::SideBySide
            );
            assert_eq!(
                Layout::new(Some(kind), false, sizes([512, 64, 0, 1024])),
                Layout::SideBySide
            );
            assert_eq!(Layout::new(Some(kind), false, sizes([i64::MAX; 4])), Layout::InPlace);
        }
        for size in [small, large] {
            assert_eq!(Layout::new(Some(Kind::Float), true, size), Layout::ByColumns);
            assert_eq!(Layout::new(Some(Kind::Float), false, size), Layout::SideBySide);
            assert_eq!(Layout::new(Some(Kind::Double), true, size), Layout::SideBySide);
            assert_eq!(Layout::new(None, true, size), Layout::SideBySide);
        }
    }

    /// Compares with the product in `Double`, whose own error is negligible. The sizes cover rows
    /// and columns of whole and of partial vectors, tiles and blocks; the input is a view.
    fn assert_exact(way: Layout, kind: Kind, device: Device) {
        for size in [[2, 1, 1, 1], [3, 5, 7, 8], [1, 70, 33, 24], [9, 64, 40, 32], [65, 3, 130, 72]]
        {
            let [steps, batch, features, hidden] = size;
            if way == Layout::InPlace && steps == 1 {
                continue;
            }
            let random = |sizes: &[i64]| Tensor::randn(sizes, (Kind::Float, device)).to_kind(kind);
            let (grad_gates, h0) = (random(&[steps * batch, 3 * hidden]), random(&[batch, hidden]));
            let output = random(&[steps, batch, hidden]);
            let input = random(&[batch, steps, features]).transpose(0, 1);
            let sizes = sizes(size);
            let operands = Operands {
                grad_gates: &grad_gates,
                h0: &h0,
                output: &output,
                input: &input,
                sizes,
            };
            let exact = {
                let wide = |tensor: &Tensor| tensor.to_kind(Kind::Double);
                let before = Tensor::cat(&[h0.unsqueeze(0), output.narrow(0, 0, steps - 1)], 0);
                let hx = Tensor::cat(&[wide(&before), wide(&input)], 2);
                wide(&grad_gates)
                    .transpose(0, 1)
                    .matmul(&hx.reshape([steps * batch, hidden + features]))
            };
            let made = operands.product_by(way).unwrap();
            // Sums of a half kind are rounded once, at the end.
            let epsilon = match made.kind() {
                Kind::Float => 2e-5,
                Kind::Half => 1e-3,
                _ => 8e-3,
            };
            let error = (made.to_kind(Kind::Double) - &exact).abs().max().double_value(&[]);
            let most = exact.abs().max().double_value(&[]);
            assert!(error <= epsilon * most, "{way:?}, {kind:?}, {size:?}: {error} of {most}");
        }
    }

    #[test]
    fn side_by_side_is_exact() {
        for kind in [Kind::Float, Kind::Half, Kind::BFloat16] {
            assert_exact(Layout::SideBySide, kind, Device::Cpu);
        }
    }

    #[test]
    fn cuda_each_way_is_exact() {
        let Some(device) = cuda_or_skip("cuda_each_way_is_exact") else { return };
        for kind in [Kind::Half, Kind::BFloat16] {
            assert_exact(Layout::SideBySide, kind, device);
            assert_exact(Layout::InPlace, kind, device);
        }
        assert_exact(Layout::SideBySide, Kind::Float, device);
        assert_exact(Layout::ByColumns, Kind::Float, device);
    }
}
