//! Which tokens a step is trained on, and how they come to the device.

use crate::apart::Apart;
use crate::device::PinnedCopies;
use crate::ranks::{Division, Ranks};
use crate::tokens::{Part, Tokens};
use anyhow::{Result, ensure};
use std::rc::Rc;
use tch::{Device, Kind, Tensor};
use tch_extension::cuda::{Event, Stream, StreamGuard};

/// The order in which windows of the text are trained on: each once an epoch, in an order and at an
/// offset that the seed and the epoch decide. So a number of a window says where it is, and a
/// resumed run needs to know nothing else.
#[derive(Clone, Debug)]
pub struct Order {
    /// The windows of an epoch.
    windows: u64,
    context: u64,
    seed: u64,
}

impl Order {
    /// The order of windows of `context` tokens, each with the token after it.
    pub fn new(tokens: usize, context: i64, seed: i64) -> Result<Order> {
        let context = context as u64;
        // The offset takes up to a window less one token.
        let windows = (tokens as u64).saturating_sub(context) / context;
        ensure!(
            windows > 0,
            "the text has {tokens} tokens to train on, and --context {context} needs {}: lower it, or give a \
             longer text",
            2 * context
        );
        Ok(Order { windows, context, seed: seed as u64 })
    }

    /// Where the `index`-th window of the training begins.
    pub fn start(&self, index: u64) -> usize {
        let (epoch, place) = (index / self.windows, index % self.windows);
        let key = mix(self.seed ^ mix(epoch));
        let offset = mix(key) % self.context;
        (self.permuted(place, key) * self.context + offset) as usize
    }

    /// A permutation of the windows: a Feistel network over the next power of four, applied until
    /// the result is a window.
    fn permuted(&self, place: u64, key: u64) -> u64 {
        let half = (64 - (self.windows - 1).leading_zeros()).div_ceil(2).max(1);
        let mask = (1 << half) - 1;
        let mut value = place;
        loop {
            let (mut left, mut right) = (value >> half, value & mask);
            for round in 0..4 {
                (left, right) = (right, left ^ (mix(key ^ mix(right << 3 | round)) & mask));
            }
            value = left << half | right;
            if value < self.windows {
                return value;
            }
        }
    }
}

/// Mixes the bits of a number: the finaliser of SplitMix64.
pub fn mix(value: u64) -> u64 {
    let value = value.wrapping_add(0x9E37_79B9_7F4A_7C15);
    let value = (value ^ (value >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let value = (value ^ (value >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    value ^ (value >> 31)
}

/// The inputs and the targets of a step, `[B, T]` each, and where documents begin, if they are apart, which
/// are the last of the numbers of [`windows`]. They are of kind Int64.
fn batch(numbers: &Tensor, context: i64, borders: i64) -> Result<Vec<Tensor>> {
    let count = numbers.size1()?;
    let tokens = (count - borders) / 2;
    let part =
        |at| -> Result<Tensor> { Ok(numbers.f_narrow(0, at, tokens)?.f_view([-1, context])?) };
    let mut batch = vec![part(0)?, part(tokens)?];
    if borders > 0 {
        batch.push(numbers.f_narrow(0, 2 * tokens, borders)?);
    }
    Ok(batch)
}

/// How many numbers say where documents begin in so many rows. It depends on nothing else, so that a
/// captured step fits every batch.
fn borders(apart: Option<Apart>, rows: usize) -> usize {
    apart.map_or(0, |apart| (rows * apart.borders).max(1))
}

/// The target of a token that is not learned.
pub const IGNORED: i64 = -100;

/// The inputs, the targets, `[B, T]` each, and the [`borders`] of windows that begin at `starts`, one after
/// the other.
pub fn windows(
    tokens: &Tokens,
    part: Part,
    starts: &[usize],
    context: usize,
    apart: Option<Apart>,
) -> Result<Tensor> {
    let rows = starts.len();
    let (mut inputs, mut targets) = (vec![0; rows * context], vec![0; rows * context]);
    let mut window = vec![0; context + 1];
    let mut begins = Vec::new();
    for (row, start) in starts.iter().enumerate() {
        tokens.read(part, *start, &mut window);
        for (place, pair) in (row * context..).zip(window.windows(2)) {
            // Tokens that are not learned are inverted.
            inputs[place] = pair[0].max(!pair[0]);
            targets[place] = if pair[1] < 0 { IGNORED } else { pair[1] };
            if apart.is_some_and(|apart| apart.end == inputs[place]) {
                // The next token is another document's.
                targets[place] = IGNORED;
                begins.push(place as i64 + 1);
            }
        }
    }
    // Rows begin documents in any case.
    begins.retain(|place| place % context as i64 != 0);
    let most = borders(apart, rows);
    ensure!(
        begins.len() <= most,
        "{} documents begin in a batch, and the text had {most} at most when the run began: it was changed",
        begins.len()
    );
    begins.resize(most, (rows * context) as i64);
    inputs.append(&mut targets);
    inputs.append(&mut begins);
    Ok(Tensor::f_from_slice(&inputs)?)
}

/// The numbers of the `index`-th batch, as those of [`windows`], on the CPU.
type Source = Box<dyn Fn(u64) -> Result<Tensor>>;

/// Brings batches to the device. On a GPU, the next batch is copied from pinned memory, on a stream
/// of its own, while the current one is trained on. The host is at most two steps ahead of the GPU: it
/// waits for the copy that used the pinned memory last.
pub struct Loader {
    source: Source,
    context: i64,
    borders: i64,
    ahead: Option<Ahead>,
}

impl Loader {
    /// Loads this rank's part of the text's windows in an order. Other parts of the token file are
    /// not read.
    pub fn new(
        tokens: Rc<Tokens>,
        order: Order,
        division: Division,
        context: i64,
        apart: Option<Apart>,
        device: Device,
    ) -> Result<Loader> {
        let source = move |index: u64| {
            let first = division.first_row(index);
            let starts: Vec<usize> =
                (first..first + division.rows as u64).map(|window| order.start(window)).collect();
            windows(&tokens, Part::Train, &starts, context as usize, apart)
        };
        let borders = borders(apart, division.rows as usize) as i64;
        Loader::from(Box::new(source), [division.rows, context, borders], device)
    }

    /// Loads the batches of a source, of so many rows, tokens of each and borders.
    pub fn from(
        source: Source,
        [rows, context, borders]: [i64; 3],
        device: Device,
    ) -> Result<Loader> {
        let ahead = match device {
            Device::Cuda(_) => Some(Ahead::new(2 * rows * context + borders, device)?),
            _ => None,
        };
        Ok(Loader { source, context, borders, ahead })
    }

    /// The `index`-th batch of the training. On a GPU its tensors hold it until the next but one is
    /// asked for, and work on the current stream may use it at once.
    pub fn batch(&mut self, index: u64) -> Result<Vec<Tensor>> {
        let Some(ahead) = &mut self.ahead else {
            return batch(&(self.source)(index)?, self.context, self.borders);
        };
        if !ahead.has(index) {
            ahead.fill(index, &(self.source)(index)?)?;
        }
        let current = ahead.wait_for(index)?;
        ahead.fill(index + 1, &(self.source)(index + 1)?)?;
        batch(&current, self.context, self.borders)
    }
}

/// Two batches on the device: one in use, and one that is being copied.
struct Ahead {
    stream: Stream,
    copies: PinnedCopies,
    slots: [Slot; 2],
}

struct Slot {
    pinned: Tensor,
    on_device: Tensor,
    copied: Event,
    holds: Option<u64>,
}

impl Ahead {
    fn new(numbers: i64, device: Device) -> Result<Ahead> {
        let copies = PinnedCopies::new()?;
        let slot = || -> Result<Slot> {
            Ok(Slot {
                pinned: copies.memory(&[numbers])?,
                on_device: Tensor::f_zeros([numbers], (Kind::Int64, device))?,
                copied: Event::without_timing(device)?,
                holds: None,
            })
        };
        let slots = [slot()?, slot()?];
        Ok(Ahead { stream: Stream::new(device)?, copies, slots })
    }

    fn has(&self, index: u64) -> bool {
        self.slots[(index % 2) as usize].holds == Some(index)
    }

    /// Begins to copy a batch, after the work that uses what was in its place.
    fn fill(&mut self, index: u64, batch: &Tensor) -> Result<()> {
        let slot = &mut self.slots[(index % 2) as usize];
        // The last copy from this pinned memory, of the batch before the last one, must have ended.
        if slot.holds.take().is_some() {
            slot.copied.synchronize()?;
        }
        slot.pinned.f_copy_(batch)?;
        self.stream.wait_stream(&Stream::current(slot.on_device.device())?)?;
        let _guard = StreamGuard::new(&self.stream)?;
        self.copies.begin(&slot.on_device, &slot.pinned)?;
        slot.copied.record()?;
        slot.holds = Some(index);
        Ok(())
    }

    /// Makes later work on the current stream wait for the copy.
    fn wait_for(&self, index: u64) -> Result<Tensor> {
        let slot = &self.slots[(index % 2) as usize];
        Stream::current(slot.on_device.device())?.wait(&slot.copied)?;
        Ok(slot.on_device.shallow_clone())
    }
}

impl Drop for Ahead {
    /// Waits for the last copies, whose memory goes away.
    fn drop(&mut self) {
        for slot in self.slots.iter().filter(|slot| slot.holds.is_some()) {
            // If the device failed, there is nothing to wait for.
            let _ = slot.copied.synchronize();
        }
    }
}

/// The held-out text in batches, always the same: `count` windows that are spread evenly, or all.
pub struct HeldOut {
    tokens: Rc<Tokens>,
    starts: Vec<usize>,
    rows: usize,
    context: usize,
    pub apart: Option<Apart>,
}

impl HeldOut {
    pub fn new(
        tokens: Rc<Tokens>,
        rows: i64,
        context: i64,
        count: i64,
        apart: Option<Apart>,
    ) -> Result<HeldOut> {
        let (all, context) = (tokens.len(Part::HeldOut), context as usize);
        let windows = all.saturating_sub(1) / context;
        ensure!(
            windows > 0,
            "the text has {all} tokens that are held out, and --context {context} needs {}: lower it, raise \
             --held-out, or give a longer text",
            context + 1
        );
        let count = (count as usize).min(windows);
        let starts = (0..count).map(|index| index * windows / count * context).collect();
        let held_out = HeldOut { tokens, starts, rows: rows as usize, context, apart };
        ensure!(
            held_out.learns()?,
            "no token that is held out is learned in the {count} windows of --eval-windows, so that they have no loss: \
             raise it; or for a new run, raise --held-out or give documents with longer completions"
        );
        Ok(held_out)
    }

    /// Whether a token is learned in some window.
    fn learns(&self) -> Result<bool> {
        for starts in self.starts.chunks(self.rows) {
            let targets = &self.batch(starts, Device::Cpu)?[1];
            if targets.f_ne(IGNORED)?.f_any()?.f_int64_value(&[])? != 0 {
                return Ok(true);
            }
        }
        Ok(false)
    }

    fn batch(&self, starts: &[usize], device: Device) -> Result<Vec<Tensor>> {
        let HeldOut { tokens, context, apart, .. } = self;
        let borders = borders(*apart, starts.len()) as i64;
        let on_host = windows(tokens, Part::HeldOut, starts, *context, *apart)?;
        batch(&on_host.f_to_device(device)?, *context as i64, borders)
    }

    /// This rank's part of the batches. The last one of all may have fewer rows.
    pub fn batches(
        &self,
        device: Device,
        ranks: &Ranks,
    ) -> impl Iterator<Item = Result<Vec<Tensor>>> + '_ {
        let all = self.starts.chunks(self.rows);
        let own = all.skip(ranks.rank()).step_by(ranks.size());
        own.map(move |starts| self.batch(starts, device))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn every_window_comes_once_an_epoch_and_lies_inside_the_text() {
        for tokens in [20, 64, 1000, 12_345] {
            let order = Order::new(tokens, 10, 3).unwrap();
            for epoch in 0..3 {
                let first = epoch * order.windows;
                let starts: BTreeSet<usize> =
                    (first..first + order.windows).map(|index| order.start(index)).collect();
                assert_eq!(starts.len() as u64, order.windows, "{tokens} tokens");
                assert!(starts.last().unwrap() + 10 < tokens);
                let offsets: BTreeSet<usize> = starts.iter().map(|start| start % 10).collect();
                assert_eq!(offsets.len(), 1);
            }
        }
        assert!(Order::new(19, 10, 3).is_err());
    }

    #[test]
    fn the_seed_and_the_epoch_decide_the_order() {
        let starts = |seed, from: u64| -> Vec<usize> {
            let order = Order::new(10_000, 10, seed).unwrap();
            (from..from + 50).map(|index| order.start(index)).collect()
        };
        assert_eq!(starts(1, 0), starts(1, 0));
        assert_ne!(starts(1, 0), starts(2, 0));
        assert_ne!(starts(1, 0), starts(1, Order::new(10_000, 10, 1).unwrap().windows));
        let sorted = starts(1, 0).is_sorted();
        assert!(!sorted, "the windows are in the order of the text");
    }

    fn tokens() -> (tempfile::TempDir, Rc<Tokens>) {
        let folder = tempfile::tempdir().unwrap();
        let all: Vec<u32> = (0..200).collect();
        crate::tokens::write(folder.path(), ([0; 32], 256), 0.2, false, |writer| {
            writer.write(&all)
        })
        .and_then(crate::files::Whole::put)
        .unwrap();
        let tokens = Rc::new(Tokens::open(folder.path()).unwrap());
        (folder, tokens)
    }

    #[test]
    fn targets_follow_their_inputs() {
        let (_folder, tokens) = tokens();
        let order = Order::new(tokens.len(Part::Train), 8, 1).unwrap();
        let alone = Division::new(3, 1, 0, 1).unwrap();
        let mut loader = Loader::new(tokens.clone(), order, alone, 8, None, Device::Cpu).unwrap();
        let batch = loader.batch(5).unwrap();
        let [x, y] = &batch[..] else { panic!("{batch:?}") };
        assert_eq!((x.size(), x.kind()), (vec![3, 8], Kind::Int64));
        assert_eq!(x + 1, *y);
        assert_eq!(*x, loader.batch(5).unwrap()[0]);
        assert_ne!(*x, loader.batch(6).unwrap()[0]);

        let held_out = HeldOut::new(tokens, 3, 8, 100, None).unwrap();
        let (ranks, device) = Ranks::join("cpu", 10).unwrap();
        let batches: Vec<_> = held_out.batches(device, &ranks).collect::<Result<_>>().unwrap();
        let rows: Vec<i64> = batches.iter().map(|batch| batch[0].size()[0]).collect();
        assert_eq!(rows, [3, 1]);
        assert_eq!(&batches[0][0] + 1, batches[0][1]);
        assert_eq!(batches[0][0].int64_value(&[0, 0]), 160);
    }

    #[test]
    fn ranks_read_parts_of_the_batches_of_one() {
        let (_folder, tokens) = tokens();
        let order = Order::new(tokens.len(Part::Train), 8, 1).unwrap();
        let loader = |rank, size| {
            let division = Division::new(4, 1, rank, size).unwrap();
            Loader::new(tokens.clone(), order.clone(), division, 8, None, Device::Cpu).unwrap()
        };
        for index in [0, 5] {
            let whole = loader(0, 1).batch(index).unwrap();
            let [a, b] = [0, 1].map(|rank| loader(rank, 2).batch(index).unwrap());
            assert_eq!(Tensor::cat(&[&a[0], &b[0]], 0), whole[0]);
        }
    }

    #[test]
    fn cuda_batches_are_those_of_the_cpu() {
        let test = "cuda_batches_are_those_of_the_cpu";
        let Some(device) = tch_extension::testing::cuda_or_skip(test) else { return };
        let (_folder, tokens) = tokens();
        let order = Order::new(tokens.len(Part::Train), 8, 1).unwrap();
        let alone = Division::new(3, 1, 0, 1).unwrap();
        let apart = Some(Apart::scan(&tokens, 77, 8));
        let loader =
            |device| Loader::new(tokens.clone(), order.clone(), alone, 8, apart, device).unwrap();
        let (mut here, mut there) = (loader(Device::Cpu), loader(device));
        for index in [0, 1, 2, 3, 7, 8, 8, 2, 3, 4, 5, 6] {
            let (batch, of_gpu) = (here.batch(index).unwrap(), there.batch(index).unwrap());
            assert_eq!((batch.len(), of_gpu.len()), (3, 3));
            for (found, there) in batch.iter().zip(&of_gpu) {
                assert_eq!(there.device(), device);
                assert_eq!(*found, there.to_device(Device::Cpu));
            }
        }
    }
}
