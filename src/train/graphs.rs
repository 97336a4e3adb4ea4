//! The graphs of a step: for each shape of a batch, the tensors that they read, and one graph for
//! each part of a step.

use super::StepOutput;
use super::work::Part;
use crate::Result;
use crate::cuda::{Graph, Stream};
use crate::ffi::gradients as ffi;
use tch::{Device, Kind, Tensor};

/// What tells batches apart that need graphs of their own: sizes, strides and kinds.
pub(super) type Key = Vec<(Vec<i64>, Vec<i64>, Kind)>;

pub(super) fn key_of(batch: &[Tensor]) -> Result<Key> {
    let key_of = |tensor: &Tensor| {
        let (size, stride) = (tensor.size(), tensor.stride());
        let stride = kept_strides(&size, &stride);
        Ok((size, stride, tensor.f_kind()?))
    };
    batch.iter().map(key_of).collect()
}

/// The strides of the tensor that a graph reads: those of the batch, such as channels_last, if its
/// elements are dense, and otherwise those of a contiguous tensor.
fn kept_strides(size: &[i64], stride: &[i64]) -> Vec<i64> {
    let long = |order: &mut dyn Iterator<Item = usize>| -> Vec<usize> {
        order.filter(|&dim| size[dim] != 1).collect()
    };
    let in_order = long(&mut (0..size.len()).rev());
    let mut by_stride = in_order.clone();
    by_stride.sort_by_key(|&dim| stride[dim]);
    // Strides of a dense tensor with its dimensions in this order, the innermost first.
    let dense = |order: &[usize]| {
        let mut strides = vec![1; size.len()];
        let mut next = 1;
        for &dim in order {
            strides[dim] = next;
            next *= size[dim].max(1);
        }
        strides
    };
    let of_batch = dense(&by_stride);
    let is_dense = by_stride.iter().all(|&dim| of_batch[dim] == stride[dim]);
    if is_dense { of_batch } else { dense(&in_order) }
}

/// A graph and the tensors in its memory.
pub(super) struct Captured {
    pub graph: Graph,
    pub output: StepOutput,
    /// The parameters' gradients after a replay.
    pub gradients: Vec<Tensor>,
}

/// What exists for one part of a step.
#[derive(Default)]
pub(super) struct Way {
    /// The calls that ran without a graph.
    pub warm: usize,
    pub captured: Option<Captured>,
}

/// What exists for one shape of a batch.
pub(super) struct Shape {
    key: Key,
    /// The tensors that the graphs read.
    pub inputs: Vec<Tensor>,
    accumulate: Way,
    step: Way,
}

impl Shape {
    pub fn way(&mut self, part: Part) -> &mut Way {
        match part {
            Part::Accumulate => &mut self.accumulate,
            Part::Step => &mut self.step,
        }
    }

    fn captured(&self) -> impl Iterator<Item = &Captured> {
        [&self.accumulate, &self.step].into_iter().filter_map(|way| way.captured.as_ref())
    }

    /// Copies a batch to where the graphs read it, on the current stream.
    pub fn load(&self, batch: &[Tensor]) -> Result<()> {
        self.inputs.iter().zip(batch).try_for_each(|(input, tensor)| ffi::copy(input, tensor))
    }
}

/// All graphs. They share one memory pool: each leaves nothing in it that another may overwrite
/// except tensors that are alive here, and they run one at a time.
#[derive(Default)]
pub(super) struct Graphs {
    shapes: Vec<Shape>,
    /// The stream on which the last call ran.
    last: Option<Stream>,
}

impl Graphs {
    /// The index of the entry for this key. It makes one unless there are `most` already.
    pub fn find(&mut self, key: Key, device: Device, most: usize) -> Result<Option<usize>> {
        if let Some(index) = self.shapes.iter().position(|shape| shape.key == key) {
            return Ok(Some(index));
        }
        if self.shapes.len() >= most {
            return Ok(None);
        }
        let inputs = key
            .iter()
            .map(|(size, stride, kind)| Ok(Tensor::f_empty_strided(size, stride, (*kind, device))?))
            .collect::<Result<_>>()?;
        self.shapes.push(Shape { key, inputs, accumulate: Way::default(), step: Way::default() });
        Ok(Some(self.shapes.len() - 1))
    }

    /// Forgets a shape with which no call ended well, which otherwise would take another's place.
    pub fn forget_unused(&mut self, index: usize) {
        let Shape { accumulate, step, .. } = &self.shapes[index];
        if accumulate.warm + step.warm == 0 {
            self.shapes.remove(index);
        }
    }

    /// The same for all shapes.
    pub fn forget_all_unused(&mut self) {
        self.shapes.retain(|Shape { accumulate, step, .. }| accumulate.warm + step.warm > 0);
    }

    pub fn shape(&mut self, index: usize) -> &mut Shape {
        &mut self.shapes[index]
    }

    /// A graph whose memory pool the next one uses.
    pub fn any(&self) -> Option<&Graph> {
        self.shapes.iter().flat_map(Shape::captured).map(|captured| &captured.graph).next()
    }

    pub fn len(&self) -> usize {
        self.shapes.iter().flat_map(Shape::captured).count()
    }

    /// Whether a graph uses memory that has been left to it: a tensor has got other memory, or
    /// another has taken its place.
    pub fn are_left(&self) -> bool {
        self.shapes.iter().flat_map(Shape::captured).any(|captured| captured.graph.is_left())
    }

    /// Makes the current stream wait for the last call, if that was on another stream.
    pub fn follow(&mut self, current: &Stream) -> Result<()> {
        if let Some(last) = self.last.replace(*current)
            && last != *current
        {
            current.wait_stream(&last)?;
        }
        Ok(())
    }

    /// Drops all graphs when their work is done.
    pub fn clear(&mut self) {
        if !self.shapes.is_empty()
            && let Some(last) = &self.last
        {
            // If CUDA has failed, the graphs are of no use to anybody, either.
            let _ = last.synchronize();
        }
        self.shapes.clear();
    }
}

/// libtorch frees what its random numbers need with the last graph, without waiting for the work.
impl Drop for Graphs {
    fn drop(&mut self) {
        self.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::kept_strides;

    #[test]
    fn dense_batches_keep_their_strides() {
        assert_eq!(kept_strides(&[2, 3, 4, 5], &[60, 20, 5, 1]), [60, 20, 5, 1]);
        // channels_last, and a transposed matrix.
        assert_eq!(kept_strides(&[2, 3, 4, 5], &[60, 1, 15, 3]), [60, 1, 15, 3]);
        assert_eq!(kept_strides(&[3, 4], &[1, 3]), [1, 3]);
    }

    #[test]
    fn other_batches_become_contiguous() {
        // Columns of a longer matrix, an expanded one, and one that overlaps itself.
        assert_eq!(kept_strides(&[3, 4], &[9, 1]), [4, 1]);
        assert_eq!(kept_strides(&[3, 4], &[0, 1]), [4, 1]);
        assert_eq!(kept_strides(&[3, 4], &[1, 1]), [4, 1]);
        assert_eq!(kept_strides(&[], &[]), Vec::<i64>::new());
        assert_eq!(kept_strides(&[0, 4], &[4, 1]), kept_strides(&[0, 4], &[1, 0]));
    }

    #[test]
    fn strides_of_single_rows_do_not_count() {
        assert_eq!(kept_strides(&[1, 4], &[4, 1]), kept_strides(&[1, 4], &[7, 1]));
        assert_eq!(kept_strides(&[4, 1], &[1, 1]), kept_strides(&[4, 1], &[1, 4]));
    }
}
