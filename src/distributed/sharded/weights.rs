//! The flat buffers of parameters: each parameter becomes a view of one, and each rank updates its
//! part of them.

use super::gradients::{failure, view_of};
use super::layout::Layout;
use crate::distributed::{ProcessGroup, Work};
use crate::{Error, Result, optim};
use tch::{Device, Tensor};

/// The parameters of the model and their buffers.
pub(super) struct Weights {
    buckets: Vec<Bucket>,
    pub parameters: Vec<Parameter>,
}

struct Bucket {
    whole: Tensor,
    /// The part of this rank.
    own: Tensor,
}

pub(super) struct Parameter {
    pub name: String,
    pub tensor: Tensor,
    /// Its view, before it is the parameter's data.
    view: Option<Tensor>,
    address: usize,
}

impl Weights {
    /// Copies all parameters to flat buffers. The parameters are not changed yet.
    pub fn new(
        group: &ProcessGroup,
        layout: &Layout,
        named: &[(String, Tensor)],
        device: Device,
    ) -> Result<Weights> {
        let _no_grad = tch::no_grad_guard();
        let (rank, ranks) = (group.rank() as i64, group.size() as i64);
        let bucket = |bucket: &super::layout::Bucket| {
            let whole = Tensor::f_zeros([ranks * bucket.part], (bucket.kind, device))?;
            let own = whole.f_narrow(0, rank * bucket.part, bucket.part)?;
            Ok(Bucket { whole, own })
        };
        let buckets = layout.buckets.iter().map(bucket).collect::<Result<Vec<_>>>()?;
        let parameter = |(index, (name, tensor)): (usize, &(String, Tensor))| {
            let whole = &buckets[layout.places[index].0].whole;
            let mut view = view_of(whole, layout.slot(index).range.start, tensor)?;
            view.f_copy_(tensor)?;
            let address = view.data_ptr().addr();
            let (name, tensor) = (name.clone(), tensor.shallow_clone());
            Ok(Parameter { name, tensor, view: Some(view), address })
        };
        let parameters = named.iter().enumerate().map(parameter).collect::<Result<Vec<_>>>()?;
        Ok(Weights { buckets, parameters })
    }

    /// Gives every rank the values of rank 0.
    pub fn broadcast(&self, group: &ProcessGroup) -> Result<()> {
        if group.size() == 1 {
            return Ok(());
        }
        self.buckets.iter().try_for_each(|bucket| group.broadcast(&bucket.whole, 0))
    }

    /// Lets the parameters be views of the buffers.
    pub fn adopt(&mut self) -> Result<()> {
        for Parameter { tensor, view, .. } in &mut self.parameters {
            if let Some(view) = view.take() {
                tensor.f_set_data(&view)?;
            }
        }
        Ok(())
    }

    /// Tells autograd that the values of all parameters have changed.
    pub fn bump_versions(&self) -> Result<()> {
        optim::shard::bump_versions(self.parameters.iter().map(|parameter| &parameter.tensor))
    }

    /// The part of a bucket that belongs to this rank.
    pub fn own(&self, bucket: usize) -> &Tensor {
        &self.buckets[bucket].own
    }

    /// Begins to send this rank's part of a bucket to all ranks, and to get theirs.
    pub fn gather(&self, group: &ProcessGroup, bucket: usize) -> Result<Option<Work>> {
        if group.size() == 1 {
            return Ok(None);
        }
        let Bucket { whole, own } = &self.buckets[bucket];
        group.all_gather_into_async(whole, own).map(Some)
    }

    /// An error if a parameter is no longer a view of its buffer.
    pub fn check(&self, op: &str) -> Result<()> {
        let is_elsewhere = |parameter: &&Parameter| {
            let Parameter { tensor, address, .. } = parameter;
            tensor.numel() > 0 && tensor.data_ptr().addr() != *address
        };
        match self.parameters.iter().find(is_elsewhere) {
            None => Ok(()),
            Some(Parameter { name, .. }) => {
                let hint = "make the sharded optimizer after parameters are converted or moved";
                let expected = "the memory that the sharded optimizer gave it";
                Err(Error::argument(op, name, expected, "other memory", hint))
            }
        }
    }
}

/// The device of all parameters.
pub(super) fn device_of(op: &str, named: &[(String, Tensor)]) -> Result<Device> {
    let Some((_, first)) = named.first() else {
        let reason = "expected a parameter that requires grad, got none; make the optimizer after \
                      the model";
        return Err(failure(op, reason.to_string()));
    };
    let device = first.device();
    match named.iter().find(|(_, tensor)| tensor.device() != device) {
        None => Ok(device),
        Some((name, other)) => {
            let expected = format!("device {device:?}, as the first parameter");
            let got = format!("{:?}", other.device());
            Err(Error::argument(op, name, expected, got, "a rank has one device"))
        }
    }
}
