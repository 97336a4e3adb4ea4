//! Spans of what is updated: of parameters, of their matrices and of gradients.

use super::{Fact, Facts, KINDS, Owned, Span};
use crate::ffi::kind_code;
use crate::ffi::tensor::address;
use crate::{Error, Result};
use std::ffi::c_void;
use std::ops::Range;
use std::ptr::null_mut;
use tch::{Device, Kind, Tensor};

/// What a step updates of one parameter. All tensors are on the parameter's device.
#[derive(Clone, Copy)]
pub(in crate::optim) struct Update<'a> {
    pub facts: Facts,
    /// The address of `[len]`, `Float`: for a parameter of a half kind.
    pub master: Option<*mut c_void>,
    /// The kind of the moments.
    pub moments: Kind,
    /// `[len]`, of the kind of the moments.
    pub first: Option<&'a Owned>,
    pub second: Option<&'a Owned>,
    pub largest: Option<&'a Owned>,
    /// `[1]`, `Int64`
    pub step: &'a Owned,
    /// `[HYPERS]`, `Double`
    pub hyper: &'a Owned,
}

impl Update<'_> {
    fn span(&self) -> Result<Span> {
        let Facts { parameter, gradient } = self.facts;
        let data = |owned: Option<&Owned>| owned.map_or(null_mut(), Owned::address);
        let (weight, kind, rounded, rounded_kind) = match self.master {
            Some(master) => (master, kind_code(Kind::Float)?, parameter.data, parameter.kind),
            None => (parameter.data, parameter.kind, null_mut(), -1),
        };
        Ok(Span {
            weight,
            rounded,
            gradient: gradient.data,
            first: data(self.first),
            second: data(self.second),
            largest: data(self.largest),
            step: self.step.address().cast(),
            hyper: self.hyper.address().cast_const().cast(),
            len: parameter.len,
            begin: 0,
            kind: short(kind)?,
            rounded_kind: short(rounded_kind)?,
            gradient_kind: short(gradient.kind)?,
            moment_kind: short(kind_code(self.moments)?)?,
        })
    }

    /// Of the momentum of values that lie together. Their direction is added to `direction`, which
    /// has as many values: of kind `Double` for a parameter of that kind, or else `BFloat16`.
    pub fn momentum_of(&self, values: &Range<i64>, direction: &Tensor) -> Result<Span> {
        let whole = self.span()?;
        let Facts { gradient, .. } = self.facts;
        Ok(Span {
            weight: address(direction),
            rounded: null_mut(),
            gradient: at(gradient.data, i32::from(whole.gradient_kind), values.start),
            first: at(whole.first, i32::from(whole.moment_kind), values.start),
            len: values.end - values.start,
            kind: short(kind_code(direction.f_kind()?)?)?,
            rounded_kind: -1,
            ..whole
        })
    }

    /// Of the weights of values that lie together. They go against `direction`, which has as many
    /// values of the kind of the moments, or on CUDA of kind `Half`.
    pub fn weights_of(&self, values: &Range<i64>, direction: &Tensor) -> Result<Span> {
        let whole = self.span()?;
        Ok(Span {
            weight: at(whole.weight, i32::from(whole.kind), values.start),
            rounded: at(whole.rounded, i32::from(whole.rounded_kind), values.start),
            gradient: address(direction),
            first: null_mut(),
            len: values.end - values.start,
            gradient_kind: short(kind_code(direction.f_kind()?)?)?,
            ..whole
        })
    }
}

/// The address of a value of an array, unless there is none. Nothing is read.
fn at(array: *mut c_void, kind: i32, index: i64) -> *mut c_void {
    let is_it = |known: &Kind| kind_code(*known).is_ok_and(|code| code == kind);
    let size = KINDS.into_iter().find(is_it).map_or(0, Kind::elt_size_in_bytes);
    match array.is_null() {
        true => array,
        false => array.wrapping_byte_add(size * usize::try_from(index).unwrap_or(0)),
    }
}

/// libtorch's number of a kind, as spans have it.
fn short(kind: i32) -> Result<i16> {
    i16::try_from(kind).map_err(|_| Error::msg(format!("internal error: no kind: {kind}")))
}

/// The spans of one device, cut into chunks.
pub(in crate::optim) struct Spans {
    pub(super) spans: Vec<Span>,
    pub(super) chunk: i64,
    pub(super) chunks: i64,
}

impl Spans {
    /// Of a step.
    pub fn of_updates(updates: &[Update<'_>], device: Device) -> Result<Spans> {
        let spans = updates.iter().map(Update::span).collect::<Result<Vec<_>>>()?;
        Ok(Spans::cut(spans, device))
    }

    /// Of gradients alone.
    pub fn of_gradients(gradients: &[Fact], device: Device) -> Result<Spans> {
        let span = |gradient: &Fact| {
            let kind = short(gradient.kind)?;
            Ok(Span {
                weight: null_mut(),
                rounded: null_mut(),
                gradient: gradient.data,
                first: null_mut(),
                second: null_mut(),
                largest: null_mut(),
                step: null_mut(),
                hyper: null_mut(),
                len: gradient.len,
                begin: 0,
                kind,
                rounded_kind: -1,
                gradient_kind: kind,
                moment_kind: -1,
            })
        };
        Ok(Spans::cut(gradients.iter().map(span).collect::<Result<_>>()?, device))
    }

    /// Of parts of a step, too.
    pub fn cut(mut spans: Vec<Span>, device: Device) -> Spans {
        let chunk = crate::optim::plan::chunk(spans.iter().map(|span| span.len).sum(), device);
        let mut chunks = 0;
        for span in &mut spans {
            span.begin = chunks;
            chunks += (span.len + chunk - 1) / chunk;
        }
        Spans { spans, chunk, chunks }
    }

    pub(super) fn len(&self) -> i64 {
        self.spans.len() as i64
    }

    /// Some of the spans, of which `self` has as many, cut as before.
    pub(super) fn some(&self, range: Range<usize>) -> Result<Spans> {
        let end = self.spans.get(range.end).map_or(self.chunks, |span| span.begin);
        let spans = self.spans.get(range);
        let spans = spans.ok_or_else(|| Error::msg("internal error: there are fewer spans"))?;
        let begin = spans.first().map_or(end, |span| span.begin);
        let moved = |span: &Span| Span { begin: span.begin - begin, ..*span };
        let spans = spans.iter().map(moved).collect();
        Ok(Spans { spans, chunk: self.chunk, chunks: end - begin })
    }
}
