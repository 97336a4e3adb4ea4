//! The kernel of `csrc/attention`: attention of the newest token of each row.

use crate::Result;
use crate::ffi::facts::empty_of;
use crate::ffi::kind_code;
use crate::ffi::tensor::{address, bump_version, is_in_memory};
use std::ffi::c_void;
use tch::{Kind, Tensor};

/// Attention of one token of each row to those in a cache, whose number is on the device. Strides
/// count elements; the values of a head are adjacent and begin at multiples of 16 bytes.
#[repr(C)]
struct Decode {
    /// B, the number of rows.
    batch: i64,
    /// The number of heads of keys and values.
    kv_heads: i64,
    /// How many heads of queries share one of them.
    group: i64,
    /// How many of these one thread block has: 1, 2, 4 or 8.
    per_chunk: i64,
    /// group / per_chunk, rounded up.
    chunks: i64,
    /// D, the values of a head.
    head_dim: i64,
    /// The threads that read a head: a power of two, at most 32.
    lanes: i64,
    /// L, the number of tokens for which the cache has memory.
    length: i64,
    /// So many thread blocks share the tokens of a unit.
    splits: i64,
    /// Of a row and of a head.
    query_strides: [i64; 2],
    key_strides: [i64; 2],
    value_strides: [i64; 2],
    /// What products of queries and keys are multiplied with, times log₂ e.
    scale: f32,
    /// Half, BFloat16 or Float.
    kind: i32,
    /// R, the number of values of a head that are rotated. R / 2 values are a multiple of 16 bytes.
    rotated: i64,
    /// `[B, R / 2]`, contiguous: the angles of each row's new token.
    cos: *const f32,
    sin: *const f32,
    /// The number of tokens in the cache before the new one, `[B]`.
    places: *const i64,
    /// `[B, H, D]`.
    query: *const c_void,
    /// `[B, Hkv, D]`: the new token's.
    key: *const c_void,
    value: *const c_void,
    /// `[B, Hkv, L, D]`, contiguous; the new token's are written to its place.
    keys: *mut c_void,
    values: *mut c_void,
    /// `[B, H, D]`, contiguous.
    output: *mut c_void,
    /// `[B, Hkv, chunks, splits, per_chunk, D + 2]` floats; null if there is one split.
    partial: *mut c_void,
    /// `[B, Hkv, chunks]`, zeros before and after.
    counters: *mut i32,
}

#[cfg(tch_extension_cuda)]
unsafe extern "C" {
    fn tch_extension_attention_decode_cuda(
        params: *const Decode,
        stream: crate::cuda::cudaStream_t,
    ) -> crate::cuda::LaunchStatus;
}

/// The operands of [`decode`].
pub(crate) struct Operands<'a> {
    /// `[B, H, 1, D]`.
    pub query: &'a Tensor,
    /// `[B, Hkv, 1, D]`.
    pub new: [&'a Tensor; 2],
    /// `[B, Hkv, L, D]`, contiguous.
    pub cache: [&'a Tensor; 2],
    /// `[B]`, contiguous.
    pub places: &'a Tensor,
    /// At least `B · H` zeros of kind `Int`.
    pub counters: &'a Tensor,
    /// Cosines and sines, `[B, 1, R / 2]`, by which the query and the new key are rotated.
    pub rope: Option<[&'a Tensor; 2]>,
    pub scale: f64,
}

/// A block for each multiprocessor of a large GPU: more of them would merge more than they save.
const BLOCKS: i64 = 132;
/// The blocks of a cluster, which merge fast.
const IN_CLUSTER: i64 = 8;
/// For so many tokens of the cache one more block may share a row and a head, beyond a cluster.
const TOKENS: i64 = 1024;
const MOST_SPLITS: i64 = 32;
/// Of a grid's second and third dimension.
const MOST_IN_GRID: i64 = 65535;

/// The output `[B, H, 1, D]`; `None` if the kernel does not do these.
pub(crate) fn decode(of: &Operands<'_>) -> Result<Option<Tensor>> {
    let (kind, device) = (of.query.f_kind()?, of.query.device());
    let (batch, heads, _, head_dim) = of.query.size4()?;
    let (_, kv_heads, length, of_values) = of.cache[1].size4()?;
    let is_known = matches!(kind, Kind::Half | Kind::BFloat16 | Kind::Float);
    let in_16_bytes = 16 / kind.elt_size_in_bytes() as i64;
    let lanes = u64::try_from(head_dim / in_16_bytes).unwrap_or(0).next_power_of_two() as i64;
    let group = heads / kv_heads.max(1);
    // The threads' sums have to fit into shared memory and registers.
    let most = if head_dim > 128 { 4 } else { 8 };
    let per_chunk = [1, 2, 4, 8].into_iter().find(|&size| size >= group.min(most)).unwrap_or(most);
    let chunks = (group + per_chunk - 1) / per_chunk;
    let (units, in_y) = (batch * kv_heads * chunks, kv_heads * chunks);
    let fits = head_dim % in_16_bytes == 0
        && head_dim == of_values
        && (1..=32).contains(&lanes)
        && units > 0
        && length > 0
        && batch.max(in_y) <= MOST_IN_GRID;
    let is_readable = |tensor: &&Tensor| {
        // The stride of a single row or head is never used.
        let are_whole =
            |dim: usize| tensor.size()[dim] <= 1 || tensor.stride()[dim] % in_16_bytes == 0;
        is_in_memory(tensor)
            && tensor.data_ptr().addr().is_multiple_of(16)
            && (tensor.stride()[3] == 1 || head_dim == 1)
            && are_whole(0)
            && are_whole(1)
    };
    let all = [&of.query, &of.new[0], &of.new[1]];
    let half = of.rope.map_or(0, |[cos, _]| cos.size().last().copied().unwrap_or(0));
    let is_rotated_in_vectors = 2 * half <= head_dim
        && half % in_16_bytes == 0
        && of.rope.iter().flatten().all(|table| {
            table.size() == [batch, 1, half]
                && is_in_memory(table)
                && table.is_contiguous()
                && table.kind() == Kind::Float
                && table.data_ptr().addr().is_multiple_of(16)
        });
    let all_are_readable = all.into_iter().all(is_readable) && is_rotated_in_vectors;
    if !device.is_cuda() || !is_known || !fits || !all_are_readable {
        return Ok(None);
    }
    let splits = splits(units, length);
    let table =
        |which: usize| of.rope.map_or(std::ptr::null(), |rope| rope[which].data_ptr().cast());
    let output = empty_of(&[batch, heads, 1, head_dim], (kind, device))?;
    let size = [units, splits, per_chunk, head_dim + 2];
    let partial = (splits > 1).then(|| empty_of(&size, (Kind::Float, device))).transpose()?;
    let strides = |tensor: &Tensor| [tensor.stride()[0], tensor.stride()[1]];
    let params = Decode {
        batch,
        kv_heads,
        group,
        per_chunk,
        chunks,
        head_dim,
        lanes,
        length,
        splits,
        query_strides: strides(of.query),
        key_strides: strides(of.new[0]),
        value_strides: strides(of.new[1]),
        scale: (of.scale * std::f64::consts::LOG2_E) as f32,
        kind: kind_code(kind)?,
        rotated: 2 * half,
        cos: table(0),
        sin: table(1),
        places: of.places.data_ptr().cast(),
        query: of.query.data_ptr(),
        key: of.new[0].data_ptr(),
        value: of.new[1].data_ptr(),
        keys: address(of.cache[0]),
        values: address(of.cache[1]),
        output: output.data_ptr(),
        partial: partial.as_ref().map_or(std::ptr::null_mut(), Tensor::data_ptr),
        counters: address(of.counters).cast(),
    };
    launch(device, &params)?;
    for cache in of.cache {
        bump_version(&mut cache.shallow_clone())?;
    }
    Ok(Some(output))
}

/// How many blocks share the tokens of each of so many rows and heads. The host does not know how many of
/// the cache's tokens are in use.
fn splits(units: i64, length: i64) -> i64 {
    let few = (BLOCKS / units).min(length).clamp(1, IN_CLUSTER);
    few.max((length / TOKENS).min(2 * BLOCKS / units).min(MOST_SPLITS))
}

#[cfg(tch_extension_cuda)]
fn launch(device: tch::Device, params: &Decode) -> Result<()> {
    // SAFETY: `KvCache` has checked shapes, kinds and devices, and `decode` strides and addresses. The
    // kernel writes to the output and the parts, which are new, and to the cache and the counters, which
    // are the cache's own; to the cache only where the place is inside of it.
    crate::cuda::launch(device, |stream| unsafe {
        tch_extension_attention_decode_cuda(params, stream)
    })
}

#[cfg(not(tch_extension_cuda))]
fn launch(device: tch::Device, _: &Decode) -> Result<()> {
    Err(crate::kernels::no_kernel("nn::KvCache", device))
}
