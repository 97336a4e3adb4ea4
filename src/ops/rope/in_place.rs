//! The rotation of q and k in their own memory. A node that changes a view can have no other output, so
//! it is not the operator's, which has two.

use super::tensors::{Work, is_readable};
use super::{Rope, RopeIn, is_recorded, readable};
use crate::autograd::{Context, Function, Inputs, Saver, Tensors, apply, check_in_place};
use crate::check::Check;
use crate::operator::{Args, Signature};
use crate::overlap::{overlaps, share_memory};
use crate::{Result, check};
use tch::Tensor;

const OP: &str = Rope::NAME;

/// Changes q and k themselves. If a graph is recorded, each has a node of its own.
pub(super) fn rotated(rope: Rope, of: &Args<'_, Rope>) -> Result<(Tensor, Tensor)> {
    let RopeIn { q, k, cos, sin } = *of;
    let [q, k] = [check!(OP, q).defined()?, check!(OP, k).defined()?];
    let tables = [check!(OP, cos).defined()?, check!(OP, sin).defined()?];
    rope.check(of)?;
    for table in tables {
        if is_recorded(table.tensor()) {
            let hint = "its gradient needs the old values: call detach(), or leave in_place off";
            let expected = "a table without gradient, because of in_place";
            return Err(table.refuse(expected, "one that requires grad", hint));
        }
        check_apart(table, [q, k])?;
    }
    for each in [q, k] {
        let (size, stride) = (each.tensor().size(), each.tensor().stride());
        if overlaps(&size, &stride) {
            let got = format!("strides {stride:?} for shape {size:?}");
            let expected = "elements that do not share memory, because of in_place";
            return Err(each.refuse(expected, got, "call contiguous()"));
        }
    }
    check_apart(k, [q])?;
    let [q, k] = [q.tensor(), k.tensor()];
    for (name, tensor) in [("q", q), ("k", k)] {
        if is_recorded(tensor) {
            check_in_place(OP, &format!("{name}: in_place"), tensor)?;
        }
    }
    let run = |tensors: &[&Tensor]| {
        let inputs: Vec<Option<&Tensor>> =
            tensors.iter().copied().chain([cos, sin]).map(Some).collect();
        apply(InPlace(rope.clone()), &inputs)
    };
    if !is_recorded(q) && !is_recorded(k) {
        let [q, k] = run(&[q, k])?.exactly()?;
        return Ok((q, k));
    }
    Ok((run(&[q])?.single()?, run(&[k])?.single()?))
}

/// Refuses a tensor that has memory in common with another one, which is changed in place.
fn check_apart<const N: usize>(tensor: Check<'_>, others: [Check<'_>; N]) -> Result<()> {
    for other in others {
        if share_memory(tensor.tensor(), other.tensor())? {
            let expected = "memory of its own, because of in_place";
            return Err(tensor.refuse(expected, "elements that others have, too", "copy it"));
        }
    }
    Ok(())
}

/// The rotation of one tensor or, without a graph, of two, which the tables follow.
struct InPlace(Rope);

impl Function for InPlace {
    const NAME: &'static str = OP;
    const DOUBLE_BACKWARD: bool = true;
    const WITHOUT_AUTOCAST: bool = true;

    fn forward(&mut self, saver: &mut Saver<'_>, inputs: Inputs<'_>) -> Result<Tensors> {
        let changed = inputs.len() - 2;
        let tables = [inputs.get(changed)?, inputs.get(changed + 1)?];
        tables.into_iter().for_each(|table| saver.save(table));
        saver.set_materialize_grads(false);
        let changed =
            (0..changed).map(|place| saver.in_place(place)).collect::<Result<Vec<_>>>()?;
        // One that a kernel cannot read is copied, and copied back.
        let mut own = changed.iter().map(readable).collect::<Result<Vec<_>>>()?;
        let mut work = own.iter_mut().map(Work::InPlace);
        self.0.rotate([work.next(), work.next()], tables)?;
        drop(work);
        for (tensor, own) in changed.iter().zip(&own).filter(|(tensor, _)| !is_readable(tensor)) {
            tensor.f_detach()?.f_copy_(own)?;
        }
        Ok(changed.into())
    }

    fn backward(&self, ctx: &Context<'_>, grads: &Tensors) -> Result<Tensors> {
        let grad = grads.optional(0).map(Tensor::shallow_clone);
        let tables = [ctx.saved(0)?, ctx.saved(1)?];
        let [gradient, _] = self.0.gradients([grad, None], tables.each_ref())?;
        Ok([gradient, None, None].into())
    }
}
