//! The arrays of one call: on one device, apart from each other where they are written, with scratch.

use super::abi::{DlDevice, Refusal, stream_of};
use super::arguments::{Argument, KINDS, Result, device_name, device_of};
use super::arrays::{Array, Of};
use crate::ops::kinds::{Device, Kind};
use std::ffi::c_void;

/// The arrays of a call, on one device.
pub struct Call<'a> {
    op: &'static str,
    on: DlDevice,
    /// The name of the array that says the device.
    first: &'static str,
    pub device: Device,
    all: Vec<(Array<'a>, bool)>,
}

impl<'a> Call<'a> {
    /// A call on the device of this array, which is read, and has one of four kinds.
    pub fn of(argument: Argument<'a>) -> Result<(Self, Of<'a>)> {
        let (mut call, array) = Call::of_strided(argument)?;
        call.all.push((array.array.contiguous()?, false));
        Ok((call, array))
    }

    /// The same for an array with any strides, which is not yet among those of the call.
    pub fn of_strided(argument: Argument<'a>) -> Result<(Self, Of<'a>)> {
        let array = argument.array()?;
        let device = argument.with_kernels(array.device)?;
        let (op, on, first) = (argument.op, array.device, argument.name);
        let call = Call { op, on, first, device, all: Vec::with_capacity(10) };
        Ok((call, array.one_of(&KINDS)?))
    }

    fn take(&mut self, argument: Argument<'a>, is_written: bool) -> Result<Array<'a>> {
        let array = argument.array()?;
        if device_of(array.device) != self.device {
            let expected = format!("{}, as {}", device_name(self.on), self.first);
            return Err(array.refuse(expected, device_name(array.device), "move it there"));
        }
        self.all.push((array, is_written));
        Ok(array)
    }

    /// An array that is read, of any type and in any strides.
    pub fn strided(&mut self, argument: Argument<'a>) -> Result<Array<'a>> {
        self.take(argument, false)
    }

    pub fn read(
        &mut self,
        argument: Argument<'a>,
        shape: &[i64],
        kinds: &[Kind],
    ) -> Result<Of<'a>> {
        self.take(argument, false)?.contiguous()?.of_shape(shape)?.one_of(kinds)
    }

    pub fn written(
        &mut self,
        argument: Argument<'a>,
        shape: &[i64],
        kinds: &[Kind],
    ) -> Result<Of<'a>> {
        self.take(argument, true)?.contiguous()?.of_shape(shape)?.one_of(kinds)
    }

    /// `None` for None.
    pub fn may_read(
        &mut self,
        argument: Argument<'a>,
        shape: &[i64],
        kinds: &[Kind],
    ) -> Result<Option<Of<'a>>> {
        (!argument.is_none()).then(|| self.read(argument, shape, kinds)).transpose()
    }

    /// `None` for None.
    pub fn may_be_written(
        &mut self,
        argument: Argument<'a>,
        shape: &[i64],
        kinds: &[Kind],
    ) -> Result<Option<Of<'a>>> {
        (!argument.is_none()).then(|| self.written(argument, shape, kinds)).transpose()
    }

    /// A number for each row, or one number: `[]` or `[1]`.
    pub fn number(
        &mut self,
        argument: Argument<'a>,
        is_written: bool,
        kinds: &[Kind],
    ) -> Result<Of<'a>> {
        let array = self.take(argument, is_written)?;
        if !matches!(array.shape, [] | [1]) {
            return Err(array.refuse("shape [] or [1]", format!("{:?}", array.shape), ""));
        }
        array.one_of(kinds)
    }

    /// Scratch, if it is there, for [`Workspace::take`].
    pub fn workspace(&mut self, argument: Argument<'a>) -> Result<Workspace<'a>> {
        let array = match argument.is_none() {
            true => None,
            false => Some(self.take(argument, true)?.contiguous()?),
        };
        Ok(Workspace { argument, array, used: 0 })
    }

    /// Refuses arrays that are written and share memory with others.
    pub fn check_overlaps(&self) -> Result<()> {
        for (at, (array, is_written)) in self.all.iter().enumerate() {
            for (other, other_is_written) in &self.all[..at] {
                let is_apart = array.bytes == 0
                    || other.bytes == 0
                    || array.address.addr() + array.bytes <= other.address.addr()
                    || other.address.addr() + other.bytes <= array.address.addr();
                if is_apart || !is_written && !other_is_written {
                    continue;
                }
                let (one, other) = match is_written {
                    true => (array, other),
                    false => (other, array),
                };
                let expected = "memory of its own, because it is written";
                let got = format!("some of {}'s", other.argument.name);
                return Err(one.refuse(expected, got, "pass an array that was made for it"));
            }
        }
        Ok(())
    }

    /// Calls kernels, on a GPU with the stream that the caller has set.
    pub fn run(&self, kernels: impl FnOnce() -> crate::Result<()>) -> Result<()> {
        Ok(match self.device {
            Device::Cpu => kernels(),
            device => crate::cuda::on_stream(self.op, device.into(), stream_of(self.on)?, kernels),
        }?)
    }
}

/// Scratch that kernels share out.
pub struct Workspace<'a> {
    argument: Argument<'a>,
    array: Option<Array<'a>>,
    used: usize,
}

/// Each piece of scratch begins at a multiple of this many bytes.
const PIECE: usize = 256;

/// How large a workspace has to be for pieces of so many bytes each.
pub fn workspace_bytes(op: &'static str, pieces: &[Option<i64>]) -> Result<i64> {
    let mut all = Some(PIECE - 1);
    for piece in pieces {
        let bytes = piece.and_then(|bytes| usize::try_from(bytes).ok());
        let whole = bytes.and_then(|bytes| bytes.checked_next_multiple_of(PIECE));
        all = all.zip(whole).and_then(|(all, piece)| all.checked_add(piece));
    }
    let all = all.and_then(|bytes| i64::try_from(bytes).ok());
    let text = format!("{op}: expected sizes of arrays that fit into memory, got larger ones");
    all.ok_or(Refusal { kind: "ValueError", text })
}

impl Workspace<'_> {
    /// A piece of so many bytes.
    pub fn take(&mut self, bytes: Option<i64>, gives_size: &str) -> Result<*mut c_void> {
        let start = self.array.map_or(0, |array| array.address.addr()) + self.used;
        let end = start
            .checked_next_multiple_of(PIECE)
            .zip(bytes.and_then(|it| usize::try_from(it).ok()));
        let end = end.and_then(|(first, bytes)| first.checked_add(bytes));
        let (Some(array), Some(end)) = (self.array, end) else {
            return Err(self.too_small(gives_size));
        };
        let used = end - array.address.addr();
        if used > array.bytes {
            return Err(self.too_small(gives_size));
        }
        self.used = used;
        Ok(array.address.wrapping_byte_add(used - bytes.unwrap_or(0) as usize))
    }

    fn too_small(&self, gives_size: &str) -> Refusal {
        let got =
            self.array.map_or_else(|| "None".to_string(), |array| format!("{} bytes", array.bytes));
        let way_out = format!("{gives_size} says how many bytes it needs");
        self.argument.refuse("ValueError", "a larger array of scratch", got, &way_out)
    }
}
