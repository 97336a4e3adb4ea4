//! Kernels from images: cubins and a fatbin by nvcc (`images/add.cu`), and PTX written by hand.

use super::*;
use support::gpu::caching_or_skip;
use tch_extension::cuda::{Grid, Kernel, Param, params};

/// y = x + a, as in `images/add.cu`.
const ADD: &str = "
.version 7.0
.target sm_75
.address_size 64
.visible .entry add(.param .u64 x, .param .u64 y, .param .f32 a, .param .u64 n)
{
    .reg .pred %p; .reg .f32 %f<4>; .reg .b32 %r<4>; .reg .b64 %rd<8>;
    ld.param.u64 %rd1, [x]; ld.param.u64 %rd2, [y]; ld.param.f32 %f1, [a]; ld.param.u64 %rd3, [n];
    mov.u32 %r1, %ctaid.x; mov.u32 %r2, %ntid.x; mov.u32 %r3, %tid.x;
    mul.wide.u32 %rd4, %r1, %r2; cvt.u64.u32 %rd5, %r3; add.s64 %rd4, %rd4, %rd5;
    setp.ge.s64 %p, %rd4, %rd3;
    @%p bra END;
    shl.b64 %rd4, %rd4, 2; add.s64 %rd1, %rd1, %rd4; add.s64 %rd2, %rd2, %rd4;
    ld.global.f32 %f2, [%rd1]; add.f32 %f3, %f2, %f1; st.global.f32 [%rd2], %f3;
END:
    ret;
}
// Waits for `ticks` of the GPU's clock, and then writes 1 to n elements.
.visible .entry late_ones(.param .u64 y, .param .u64 n, .param .u64 ticks)
{
    .reg .pred %p; .reg .f32 %f; .reg .b64 %rd<8>;
    ld.param.u64 %rd1, [y]; ld.param.u64 %rd2, [n]; ld.param.u64 %rd3, [ticks];
    mov.u64 %rd4, %clock64;
WAIT:
    mov.u64 %rd5, %clock64; sub.s64 %rd6, %rd5, %rd4; setp.lt.s64 %p, %rd6, %rd3;
    @%p bra WAIT;
    mov.f32 %f, 0f3F800000;
WRITE:
    setp.le.s64 %p, %rd2, 0;
    @%p bra END;
    st.global.f32 [%rd1], %f; add.s64 %rd1, %rd1, 4; sub.s64 %rd2, %rd2, 1;
    bra WRITE;
END:
    ret;
}
";

/// Writes `value` to the last 4 of `bytes` of shared memory, reads it back and stores it.
const SHARED: &str = "
.version 7.0
.target sm_75
.address_size 64
.extern .shared .align 16 .b8 memory[];
.visible .entry through_shared(.param .u64 y, .param .u32 bytes, .param .f32 value)
{
    .reg .f32 %f<3>; .reg .b32 %r<4>; .reg .b64 %rd;
    ld.param.u64 %rd, [y]; ld.param.u32 %r1, [bytes]; ld.param.f32 %f1, [value];
    mov.u32 %r2, memory; add.u32 %r2, %r2, %r1;
    st.volatile.shared.f32 [%r2+-4], %f1; ld.volatile.shared.f32 %f2, [%r2+-4];
    st.global.f32 [%rd], %f2;
    ret;
}
";

/// Stores how many blocks its cluster has.
const CLUSTER: &str = "
.version 8.0
.target sm_90
.address_size 64
.visible .entry blocks_in_cluster(.param .u64 y)
{
    .reg .b32 %r; .reg .b64 %rd;
    ld.param.u64 %rd, [y];
    mov.u32 %r, %cluster_nctarank;
    st.global.u32 [%rd], %r;
    ret;
}
";

fn image(name: &str) -> Vec<u8> {
    std::fs::read(root().join("tests/cuda/images").join(name)).expect("an image")
}

fn load(text: &str, name: &str) -> Kernel {
    Kernel::load(text.as_bytes(), name).expect("a kernel")
}

/// For `n` elements in blocks of 128 threads.
fn grid(n: i64) -> Grid {
    Grid::new([n.unsigned_abs().div_ceil(128) as u32, 1, 1], [128, 1, 1])
}

fn add(kernel: &Kernel, x: &Tensor, y: &Tensor, a: f32) -> Result<()> {
    let n = x.numel() as i64;
    assert!(x.is_contiguous() && y.is_contiguous() && y.numel() as i64 >= n);
    assert_eq!((x.kind(), y.kind(), x.device()), (Kind::Float, Kind::Float, y.device()));
    // SAFETY: these are `add`'s parameters, and the tensors were checked.
    unsafe { kernel.launch(x.device(), grid(n), params![x.data_ptr(), y.data_ptr(), a, n]) }
}

fn says<T>(start: &str, says: &[&str], result: Result<T>) {
    let Err(error) = result else { panic!("{start} did not refuse") };
    let text = error.to_string();
    assert!(text.starts_with(start) && !text.contains('\n'), "{text}");
    for part in says {
        assert!(text.contains(part), "{text} lacks {part:?}");
    }
}

#[test]
fn what_is_no_image_is_refused_without_a_gpu() {
    let cut = image("add_sm_90a.cubin")[..2000].to_vec();
    let start = "Kernel::load: the image is ";
    says(start, &["neither a cubin nor a fatbin nor PTX: 5 bytes"], Kernel::load(*b"hello", "add"));
    says(start, &["0 bytes"], Kernel::load(Vec::new(), "add"));
    says(start, &["no cubin, or it was cut off"], Kernel::load(cut, "add"));
    let cut = image("add.fatbin")[..5000].to_vec();
    says(start, &["a fatbin that was cut off"], Kernel::load(cut, "add"));
    says("Kernel::load: ", &["contains a zero byte"], Kernel::load(ADD.as_bytes(), "a\0dd"));
}

#[test]
fn a_kernel_needs_a_gpu() {
    if device_count() > 0 {
        return;
    }
    for image in [ADD.as_bytes().to_vec(), image("add_sm_90a.cubin"), image("add.fatbin")] {
        refuses("Kernel::load", "there is no CUDA device", Kernel::load(image, "add"));
    }
}

#[test]
fn kernels_may_cross_threads() {
    fn crosses<T: Send + Sync + Clone>() {}
    crosses::<Kernel>();
}

#[test]
fn cuda_ptx_is_compiled_and_launched() {
    let Some(device) = cuda_or_skip("cuda_ptx_is_compiled_and_launched") else { return };
    let _serial = serially();
    let kernel = load(ADD, "add");
    assert_eq!((kernel.name(), format!("{kernel:?}")), ("add", "Kernel(add, PTX)".to_string()));
    for n in [1, 127, 128, 1000, 100_003] {
        let x = Tensor::arange(n, (Kind::Float, Device::Cpu)).to_device(device);
        let y = x.zeros_like();
        add(&kernel, &x, &y, 0.5).expect("launched");
        same_bits(&[y], &[&x + 0.5]);
    }
    // An address that is aligned to its elements only.
    let x = Tensor::arange(1000, (Kind::Float, device)).narrow(0, 1, 999);
    let y = x.zeros_like();
    add(&kernel, &x, &y, 2.0).expect("launched");
    same_bits(&[y], &[&x + 2.0]);
}

#[test]
fn cuda_images_of_nvcc_are_for_their_architectures() {
    let Some(device) = cuda_or_skip("cuda_images_of_nvcc_are_for_their_architectures") else {
        return;
    };
    let _serial = serially();
    let x = Tensor::ones([300], (Kind::Float, device));
    let mut launched = 0;
    for name in ["add_sm_75.cubin", "add_sm_90a.cubin", "add.fatbin"] {
        let y = x.zeros_like();
        match Kernel::load(image(name), "add").and_then(|kernel| add(&kernel, &x, &y, 1.5)) {
            Ok(()) => {
                same_bits(&[y], &[&x + 1.5]);
                launched += 1;
            }
            Err(error) => {
                let text = error.to_string();
                let kind = if name.ends_with("fatbin") { "a fatbin" } else { "a cubin for sm_" };
                let _ = std::io::stderr().write_all(format!("{name}: {text}\n").as_bytes());
                assert!(text.contains(&format!("the image is {kind}")), "{text}");
                assert!(!text.contains('\n'), "{text}");
            }
        }
        // Nothing is left of an error: CUDA works on, and reports it nowhere else.
        same_bits(&[&x + 1.0], &[Tensor::full([300], 2.0, (Kind::Float, device))]);
    }
    assert!(launched < 3, "no GPU runs code for sm_75 and sm_90a");
    // PTX for sm_90a is compiled on GPUs of compute capability 9.0 only.
    if kernel_runs(&CLUSTER.replace("sm_90", "sm_90a"), "blocks_in_cluster", device) {
        assert_eq!(launched, 2, "the cubin for sm_90a and the fatbin");
    }
}

fn kernel_runs(text: &str, name: &str, device: Device) -> bool {
    load_result(text, name).and_then(|kernel| kernel.prepare(device)).is_ok()
}

fn load_result(text: &str, name: &str) -> Result<Kernel> {
    Kernel::load(text.as_bytes(), name)
}

#[test]
fn cuda_what_cannot_be_loaded_is_refused() {
    let Some(_device) = cuda_or_skip("cuda_what_cannot_be_loaded_is_refused") else { return };
    let _serial = serially();
    let says_names = ["the image, PTX, has no kernel \"sub\"", "add", "late_ones"];
    says("Kernel::load: ", &says_names, Kernel::load(ADD.as_bytes(), "sub"));
    // The right extent, and nonsense inside.
    let mut wrong = image("add_sm_90a.cubin");
    let end = wrong.len() - 64 * 20;
    wrong[64..end].fill(0x5a);
    let result = Kernel::load(wrong, "add").and_then(|kernel| kernel.prepare(Device::Cuda(0)));
    assert!(result.is_err(), "an image of nonsense");
    let text = ADD.replace("add.f32", "added.f32");
    let result = load_result(&text, "add").and_then(|kernel| kernel.prepare(Device::Cuda(0)));
    says("", &["PTX"], result);
    let text = ADD.replace("sm_75", "sm_999");
    let result = load_result(&text, "add").and_then(|kernel| kernel.prepare(Device::Cuda(0)));
    says("", &["PTX"], result);
}

#[test]
fn cuda_a_launch_that_cannot_be_is_refused() {
    let Some(device) = cuda_or_skip("cuda_a_launch_that_cannot_be_is_refused") else { return };
    let _serial = serially();
    let kernel = load(ADD, "add");
    let missing = Device::Cuda(device_count() + 6);
    for (place, part) in
        [(Device::Cpu, "expected a CUDA device, got Cpu"), (missing, "there is no CUDA device")]
    {
        says("Kernel::prepare: ", &[part], kernel.prepare(place));
        // SAFETY: nothing is launched.
        says("Kernel::launch: ", &[part], unsafe { kernel.launch(place, grid(1), params![]) });
    }
    let x = Tensor::ones([128], (Kind::Float, device));
    let y = x.zeros_like();
    let launch = |grid: Grid| {
        // SAFETY: these are `add`'s parameters; no grid makes it access more than 128 elements.
        unsafe { kernel.launch(device, grid, params![x.data_ptr(), y.data_ptr(), 1.0f32, 128i64]) }
    };
    let start = "CUDA kernel add: expected ";
    says(start, &["blocks from [1, 1, 1]", "got [0, 1, 1]"], launch(Grid::new([0, 1, 1], [1; 3])));
    says(start, &["threads from [1, 1, 1]", "[1, 2000, 1]"], {
        launch(Grid::new([1; 3], [1, 2000, 1]))
    });
    says(start, &["at most 1024 threads", "got 2048"], launch(Grid::new([1; 3], [1024, 2, 1])));
    says(start, &["bytes of dynamic shared memory", "got 1048576"], {
        launch(Grid::new([1; 3], [1; 3]).shared(1 << 20))
    });
    let cluster = Grid::new([4, 1, 1], [32, 1, 1]).cluster([3, 1, 1]);
    says("CUDA kernel add: ", &["cluster"], launch(cluster));

    // SAFETY: nothing is launched, because the parameters are refused.
    let with = |params: &[Param<'_>]| unsafe { kernel.launch(device, grid(1), params) };
    says(start, &["4 parameters, got 3"], with(params![x.data_ptr(), y.data_ptr(), 1.0f32]));
    says(start, &["4 parameters, got 5"], {
        with(params![x.data_ptr(), y.data_ptr(), 1.0f32, 128i64, 0u8])
    });
    says("CUDA kernel add: parameter 2 ", &["expected 4 bytes, got 8"], {
        with(params![x.data_ptr(), y.data_ptr(), 1.0f64, 128i64])
    });
    synchronize(device).expect("nothing failed");
    same_bits(&[y], &[x.zeros_like()]);
}

#[test]
fn cuda_a_block_may_have_all_shared_memory() {
    let Some(device) = cuda_or_skip("cuda_a_block_may_have_all_shared_memory") else { return };
    let _serial = serially();
    let kernel = load(SHARED, "through_shared");
    let y = Tensor::zeros([1], (Kind::Float, device));
    let launch = |bytes: usize, value: f32| {
        let grid = Grid::new([1; 3], [1; 3]).shared(bytes);
        // SAFETY: these are its parameters; it uses `bytes` of shared memory and one element.
        unsafe { kernel.launch(device, grid, params![y.data_ptr(), bytes as u32, value]) }
    };
    // Every GPU since Turing has 64 KiB for a block.
    for (bytes, value) in [(1 << 10, 1.5), (48 << 10, 2.5), (64 << 10, 3.5)] {
        launch(bytes, value).expect("launched");
        assert_eq!(f32::try_from(&y).expect("a value"), value, "{bytes} bytes");
    }
    says("CUDA kernel through_shared: expected at most ", &["got 1048576"], launch(1 << 20, 0.0));
}

#[test]
fn cuda_blocks_form_clusters() {
    let test = "cuda_blocks_form_clusters";
    let Some(device) = cuda_or_skip(test) else { return };
    let _serial = serially();
    if !kernel_runs(CLUSTER, "blocks_in_cluster", device) {
        return skip(test, "no clusters before compute capability 9.0");
    }
    let kernel = load(CLUSTER, "blocks_in_cluster");
    for (cluster, blocks) in [([1, 1, 1], 1), ([2, 2, 1], 4), ([8, 1, 1], 8), ([16, 1, 1], 16)] {
        let y = Tensor::zeros([1], (Kind::Int, device));
        let grid = Grid::new([16, 2, 1], [32, 1, 1]).cluster(cluster);
        // SAFETY: this is its parameter, and it writes one element, always the same value.
        unsafe { kernel.launch(device, grid, params![y.data_ptr()]) }.expect("launched");
        assert_eq!(i64::try_from(&y).expect("a value"), blocks, "{cluster:?}");
    }
    // A size that is part of the image, as with `__cluster_dims__`. 16 is more than CUDA allows unasked.
    for blocks in [2, 16] {
        let text = CLUSTER
            .replace("\n{", &format!("\n.explicitcluster\n.reqnctapercluster {blocks}, 1, 1\n{{"));
        let kernel = load(&text, "blocks_in_cluster");
        let y = Tensor::zeros([1], (Kind::Int, device));
        let grid = Grid::new([16, 2, 1], [32, 1, 1]);
        // SAFETY: this is its parameter, and it writes one element, always the same value.
        unsafe { kernel.launch(device, grid, params![y.data_ptr()]) }.expect("launched");
        assert_eq!(i64::try_from(&y).expect("a value"), blocks, "{blocks}");
    }
}

/// A kernel on another stream than the current one would read the zeros that are there before the
/// long kernel ends.
#[test]
fn cuda_a_kernel_waits_for_work_on_the_current_stream() {
    let test = "cuda_a_kernel_waits_for_work_on_the_current_stream";
    let Some(device) = cuda_or_skip(test) else { return };
    let _serial = serially();
    let (late_ones, kernel) = (load(ADD, "late_ones"), load(ADD, "add"));
    for kernel in [&late_ones, &kernel] {
        kernel.prepare(device).expect("loaded");
    }
    let n = 64;
    let (x, y) =
        (Tensor::zeros([n], (Kind::Float, device)), Tensor::zeros([n], (Kind::Float, device)));
    synchronize(device).expect("zeros");
    let side = Stream::new(device).expect("a stream");
    let guard = StreamGuard::new(&side).expect("a guard");
    let ticks = 150_000_000i64; // about a tenth of a second
    let once = Grid::new([1; 3], [1; 3]);
    // SAFETY: these are its parameters, and it writes n elements.
    unsafe { late_ones.launch(device, once, params![x.data_ptr(), n, ticks]) }.expect("launched");
    add(&kernel, &x, &y, 1.0).expect("launched");
    assert!(!side.is_idle().expect("is_idle"), "the launch waited, or the kernel was not long");
    drop(guard);
    // What is not on the side stream overtakes it.
    let early = x.copy();
    Stream::current(device).expect("current").synchronize().expect("synchronize");
    assert!(!side.is_idle().expect("is_idle"), "the copy waited for the side stream");
    same_bits(&[early], &[x.zeros_like()]);
    side.synchronize().expect("synchronize");
    same_bits(&[y], &[Tensor::full([n], 2.0, (Kind::Float, device))]);
}

#[test]
fn cuda_a_launch_is_captured_and_replayed() {
    let Some(device) = cuda_or_skip("cuda_a_launch_is_captured_and_replayed") else { return };
    let _serial = serially();
    let mut x = Tensor::ones([1000], (Kind::Float, device));
    for (step, prepared) in [(1.0, true), (2.0, false)] {
        // Other bytes, so that the second is loaded for the first time, in the capture.
        let text = format!("{ADD}// prepared: {prepared}\n");
        let kernel = load(&text, "add");
        if prepared {
            kernel.prepare(device).expect("loaded");
        }
        let y = x.zeros_like();
        let captured = Graph::capture(device, || {
            add(&kernel, &x, &y, step)?;
            add(&kernel, &y, &y, step)
        });
        let (graph, ()) = captured.unwrap_or_else(|error| panic!("prepared {prepared}: {error}"));
        assert_eq!(graph.kernels(), 2);
        same_bits(&[y.copy()], &[x.zeros_like()]);
        drop(kernel); // the graph needs only the image, which is never unloaded
        for value in [3.0, -4.0] {
            let _ = x.fill_(value);
            graph.replay().expect("replayed");
            let expected =
                Tensor::full([1000], value + 2.0 * f64::from(step), (Kind::Float, device));
            same_bits(&[y.copy()], &[expected]);
        }
    }
}

#[test]
fn cuda_threads_share_a_kernel() {
    let Some(device) = cuda_or_skip("cuda_threads_share_a_kernel") else { return };
    let _serial = serially();
    // Other bytes, so that the threads load it.
    let kernel = load(&format!("{ADD}// threads\n"), "add");
    std::thread::scope(|scope| {
        for thread in 0..8 {
            let kernel = kernel.clone();
            scope.spawn(move || {
                let x = Tensor::full([5000], f64::from(thread), (Kind::Float, device));
                let y = x.zeros_like();
                for _ in 0..50 {
                    add(&kernel, &x, &y, 1.0).expect("launched");
                }
                same_bits(&[y], &[&x + 1.0]);
            });
        }
    });
}

#[test]
fn cuda_a_kernel_runs_on_the_second_gpu() {
    let test = "cuda_a_kernel_runs_on_the_second_gpu";
    if cuda_or_skip(test).is_none() {
        return;
    }
    if device_count() < 2 {
        return skip(test, "one CUDA device");
    }
    let _serial = serially();
    let kernel = load(ADD, "add");
    for device in [Device::Cuda(1), Device::Cuda(0), Device::Cuda(1)] {
        let before = current_device();
        let x = Tensor::ones([1000], (Kind::Float, device));
        let y = x.zeros_like();
        add(&kernel, &x, &y, 1.0).expect("launched");
        assert_eq!(current_device(), before, "the current device is as it was");
        same_bits(&[y], &[&x + 1.0]);
    }
}

#[test]
fn cuda_many_launches_need_no_memory() {
    let Some(device) = caching_or_skip("cuda_many_launches_need_no_memory") else { return };
    let _serial = serially();
    let x = Tensor::ones([100_000], (Kind::Float, device));
    let y = x.zeros_like();
    let run = |times: usize| {
        for _ in 0..times {
            let kernel = load(ADD, "add"); // equal bytes: loaded once
            add(&kernel, &x, &y, 1.0).expect("launched");
        }
        synchronize(device).expect("done");
        let allocated = memory_stats(device).expect("statistics").peak_allocated;
        (allocated, free_memory())
    };
    // Another process on this GPU changes the free memory, too, but hardly in each of five rounds.
    let rounds: Vec<_> = (0..5).map(|_| [run(10), run(10_000)]).collect();
    let (peak, _) = rounds[0][0];
    assert!(rounds.iter().flatten().all(|&(of_round, _)| of_round == peak), "{rounds:?}");
    let is_free = |[(_, before), (_, after)]: &[(u64, usize); 2]| after >= before;
    assert!(rounds.iter().any(is_free), "the GPU's free memory, before and after: {rounds:?}");
}

/// The GPU's free memory, as CUDA sees it. Another process may change it.
fn free_memory() -> usize {
    type Get = unsafe extern "C" fn(*mut usize, *mut usize) -> i32;
    let (mut free, mut total) = (0, 0);
    // SAFETY: this is the function's type, and both pointers are valid for the call.
    let status = unsafe { of_cuda::<Get>("cudaMemGetInfo")(&mut free, &mut total) };
    assert_eq!(status, 0, "CUDA status");
    free
}
