//! What a call does on the GPU, seen by capturing it in a CUDA graph.
#![cfg(tch_extension_cuda)]

use std::ffi::c_void;

type Handle = *mut c_void;

unsafe extern "C" {
    fn cudaStreamCreateWithFlags(stream: *mut Handle, flags: u32) -> i32;
    fn cudaStreamSynchronize(stream: Handle) -> i32;
    fn cudaStreamBeginCapture(stream: Handle, mode: i32) -> i32;
    fn cudaStreamEndCapture(stream: Handle, graph: *mut Handle) -> i32;
    fn cudaGraphGetNodes(graph: Handle, nodes: *mut Handle, len: *mut usize) -> i32;
    fn cudaGraphNodeGetType(node: Handle, kind: *mut i32) -> i32;
    fn cudaGraphInstantiate(exec: *mut Handle, graph: Handle, flags: u64) -> i32;
    fn cudaGraphLaunch(exec: Handle, stream: Handle) -> i32;
    fn aoti_torch_create_cuda_stream_guard(stream: Handle, device: i32, guard: *mut Handle) -> i32;
    fn aoti_torch_delete_cuda_stream_guard(guard: Handle) -> i32;
}

const NON_BLOCKING: u32 = 1;
const RELAXED: i32 = 2;
const KERNEL_NODE: i32 = 0;

/// What was recorded on a stream of its own.
pub struct Recording<T> {
    stream: Handle,
    exec: Handle,
    /// Nodes that are kernels, and other nodes: copies and fills.
    pub kernels: usize,
    pub others: usize,
    /// What the call returned: memory that the recorded work writes when it is replayed.
    pub result: T,
}

fn ok(status: i32) {
    assert_eq!(status, 0, "CUDA status");
}

/// Runs `call` a few times on a side stream of device 0, then records it there. Streams and graphs are not freed:
/// their memory belongs to the result.
pub fn record<T>(mut call: impl FnMut() -> T) -> Recording<T> {
    let (mut stream, mut guard, mut graph, mut exec) =
        (Handle::default(), Handle::default(), Handle::default(), Handle::default());
    let (mut kernels, mut others) = (0, 0);
    // SAFETY: CUDA's and libtorch's own functions, with handles they made and places for them to write to; a
    // failure ends the test before the next call.
    unsafe {
        ok(cudaStreamCreateWithFlags(&mut stream, NON_BLOCKING));
        ok(aoti_torch_create_cuda_stream_guard(stream, 0, &mut guard));
        // libtorch's allocator then has memory for this stream, and cuBLAS its workspace.
        for _ in 0..3 {
            drop(call());
        }
        ok(cudaStreamSynchronize(stream));
        ok(cudaStreamBeginCapture(stream, RELAXED));
    }
    let result = call();
    // SAFETY: as above.
    unsafe {
        ok(cudaStreamEndCapture(stream, &mut graph));
        ok(aoti_torch_delete_cuda_stream_guard(guard));
        let mut len = 0;
        ok(cudaGraphGetNodes(graph, std::ptr::null_mut(), &mut len));
        let mut nodes = vec![Handle::default(); len];
        ok(cudaGraphGetNodes(graph, nodes.as_mut_ptr(), &mut len));
        for node in nodes {
            let mut kind = -1;
            ok(cudaGraphNodeGetType(node, &mut kind));
            *(if kind == KERNEL_NODE { &mut kernels } else { &mut others }) += 1;
        }
        ok(cudaGraphInstantiate(&mut exec, graph, 0));
    }
    Recording { stream, exec, kernels, others, result }
}

impl<T> Recording<T> {
    /// Does the recorded work again, and waits for it.
    pub fn replay(&self) {
        // SAFETY: a graph that was instantiated, and the stream it was recorded on.
        unsafe {
            ok(cudaGraphLaunch(self.exec, self.stream));
            ok(cudaStreamSynchronize(self.stream));
        }
    }
}
