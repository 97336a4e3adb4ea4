//! Where a model runs, in which kind, and how fast that device could be.

use anyhow::{Result, bail, ensure};
use tch::{Cuda, Device, Kind, Tensor};
use tch_extension::library::Operator;
use tch_extension::{args, cuda};

/// The device that `--device` names.
pub fn parse(name: &str) -> Result<Device> {
    match name {
        "auto" if cuda::is_compiled() => Ok(Device::cuda_if_available()),
        "auto" | "cpu" => Ok(Device::Cpu),
        "cuda" => parse_cuda(0),
        _ => match name.strip_prefix("cuda:").map(str::parse) {
            Some(Ok(index)) => parse_cuda(index),
            _ => bail!(
                "--device {name:?} is unknown: give auto, cpu, cuda or cuda:N, such as cuda:0"
            ),
        },
    }
}

fn parse_cuda(index: i64) -> Result<Device> {
    ensure!(
        Cuda::is_available(),
        "--device cuda: libtorch sees no CUDA device (no GPU or driver, or a libtorch built for CPU only); \
         give --device cpu, or let `cargo xtask doctor` say what is missing"
    );
    let count = Cuda::device_count();
    ensure!(
        (0..count).contains(&index),
        "--device cuda:{index} does not exist: this machine has {count}, cuda:0 to cuda:{}",
        count - 1
    );
    ensure!(
        cuda::is_compiled(),
        "--device cuda: this program was built without CUDA; give --device cpu, or set TCH_EXTENSION_CUDA=1, \
         which compiles the kernels or says what is missing"
    );
    Ok(Device::Cuda(index as usize))
}

/// The kinds in which a model is computed and trained.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum, serde::Serialize, serde::Deserialize,
)]
#[serde(rename_all = "kebab-case")]
pub enum Precision {
    /// Float
    F32,
    /// BFloat16, with master weights and the optimizer's state in Float
    Bf16,
    /// Products in BFloat16, under autocast; weights, gradients and the sums between layers in Float
    Bf16Mixed,
    /// BFloat16, without master weights, and with AdamW's state in BFloat16
    Bf16True,
}

impl Precision {
    /// The usual one for a device.
    pub fn of(device: Device) -> Precision {
        if device.is_cuda() { Precision::Bf16 } else { Precision::F32 }
    }

    /// The kind of the products, if not `Float`.
    pub fn half(self) -> Option<Kind> {
        (self != Precision::F32).then_some(Kind::BFloat16)
    }
}

/// Refuses what cannot fit in main memory. Linux grants memory that it does not have and later kills
/// the process that touches it, so a failed allocation would end the program without a message. (A
/// GPU's allocator does fail with a message.)
pub fn check_memory(device: Device, needed: u64) -> Result<()> {
    let available = if device == Device::Cpu { available_bytes() } else { None };
    ensure!(
        available.is_none_or(|available| needed <= available),
        "these sizes need about {} MiB of memory and {} MiB are free: lower --batch, --context or --size",
        needed >> 20,
        available.unwrap_or_default() >> 20
    );
    Ok(())
}

fn available_bytes() -> Option<u64> {
    let table = std::fs::read_to_string("/proc/meminfo").ok()?;
    let line = table.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    let kibibytes: u64 = line.split_whitespace().next()?.parse().ok()?;
    Some(kibibytes << 10)
}

/// Copies between a GPU and pinned memory for which the host does not wait.
pub struct PinnedCopies {
    pin: Operator,
    /// `copy_`, of which tch has only the form that waits.
    copy: Operator,
}

impl PinnedCopies {
    pub fn new() -> Result<PinnedCopies> {
        // tch's form passes a device, about which libtorch prints a warning.
        let pin = Operator::find("aten::pin_memory")?;
        Ok(PinnedCopies { pin, copy: Operator::find("aten::copy_")?.no_grad() })
    }

    /// Pinned memory of so many numbers, of kind Int64.
    pub fn memory(&self, size: &[i64]) -> Result<Tensor> {
        let pageable = Tensor::f_zeros(size, (Kind::Int64, Device::Cpu))?;
        Ok(self.pin.call(args![&pageable])?)
    }

    /// Begins a copy on the current stream.
    pub fn begin(&self, to: &Tensor, from: &Tensor) -> Result<()> {
        let _: Tensor = self.copy.call(args![to, from, non_blocking = true])?;
        Ok(())
    }
}

/// The name of a device.
pub fn describe(device: Device) -> Result<String> {
    match device {
        Device::Cuda(index) => {
            Ok(format!("cuda:{index}, {}", cuda::device_properties(device)?.name))
        }
        _ => Ok(format!("cpu, {} threads", tch::get_num_threads())),
    }
}

/// A GPU's peak rate of BFloat16 products with sums in Float, without sparsity, in TFLOP/s, from
/// NVIDIA's data sheets.
const PEAKS: [(&str, f64); 12] = [
    ("B200", 2250.0),
    ("GH200", 989.4),
    ("H200", 989.4),
    ("H100 PCIe", 756.0),
    ("H100 NVL", 835.0),
    ("H100", 989.4),
    ("A100", 311.9),
    ("L40S", 362.0),
    ("L40", 181.0),
    ("A40", 149.7),
    ("RTX 4090", 165.2),
    ("A10", 125.0),
];

/// The peak rate of a device in BFloat16, in TFLOP/s, if its name is known.
pub fn peak_tflops(device: Device) -> Option<f64> {
    peak_of(&cuda::device_properties(device).ok()?.name)
}

fn peak_of(name: &str) -> Option<f64> {
    PEAKS.iter().find(|(known, _)| name.contains(known)).map(|(_, peak)| *peak)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn peaks_go_by_the_name() {
        assert_eq!(peak_of("NVIDIA H100 80GB HBM3"), Some(989.4));
        assert_eq!(peak_of("NVIDIA H100 PCIe"), Some(756.0));
        assert_eq!(peak_of("NVIDIA A100-SXM4-80GB"), Some(311.9));
        assert_eq!(peak_of("NVIDIA L40S"), Some(362.0));
        assert_eq!(peak_of("Quadro 600"), None);
    }

    #[test]
    fn unknown_devices_are_refused() {
        assert_eq!(parse("cpu").unwrap(), Device::Cpu);
        for name in ["gpu", "cuda:", "cuda:x", ""] {
            assert!(parse(name).unwrap_err().to_string().contains("--device"), "{name}");
        }
    }
}
