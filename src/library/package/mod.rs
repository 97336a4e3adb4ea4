//! Models that torch.export and AOTInductor compiled.

mod archive;
mod expression;
mod generated;
mod inputs;
mod load;

use crate::ffi::package as ffi;
use crate::{Error, Result};
use inputs::Inputs;
use std::collections::BTreeMap;
use std::path::Path;
use tch::{Device, Kind, Tensor};
use tempfile::TempDir;

/// A model that was compiled ahead of time: a `.pt2` file that Python's
/// `torch._inductor.aoti_compile_and_package` wrote. It runs without Python.
///
/// ```python
/// # pack.py
/// import json, torch
///
/// def describe(program):
///     """What Rust checks the inputs against."""
///     def size(value):
///         return value if isinstance(value, int) else str(value)
///     nodes = {node.name: node for node in program.graph.nodes}
///     values = [(name, nodes[name].meta["val"]) for name in program.graph_signature.user_inputs]
///     inputs = [
///         {
///             "name": name,
///             "kind": str(value.dtype).removeprefix("torch."),
///             "device": value.device.type,
///             "sizes": [size(n) for n in value.shape],
///             "strides": [size(n) for n in value.stride()],
///         }
///         for name, value in values
///         if isinstance(value, torch.Tensor)
///     ]
///     ranges = {
///         str(symbol): [int(r.lower), int(r.upper) if r.upper.is_Integer else None]
///         for symbol, r in program.range_constraints.items()
///     }
///     return json.dumps({"inputs": inputs, "ranges": ranges})
///
/// batch = torch.export.Dim("batch")
/// program = torch.export.export(model, (x, y), dynamic_shapes=({0: batch}, {0: batch}))
/// torch._inductor.aoti_compile_and_package(
///     program,
///     package_path="model.pt2",
///     inductor_configs={"aot_inductor.metadata": {"tch_extension.inputs": describe(program)}},
/// )
/// ```
///
/// ```no_run
/// use tch::{Device, Kind, Tensor};
/// use tch_extension::library::Package;
///
/// let model = Package::load("model.pt2")?;
/// let (x, y) = (Tensor::randn([8, 4], (Kind::Float, Device::Cpu)), Tensor::randn([8, 3], (Kind::Float, Device::Cpu)));
/// let outputs: Vec<Tensor> = model.run(&[&x, &y])?;
/// # Ok::<(), tch_extension::Error>(())
/// ```
///
/// # Loading runs code
/// A package contains a shared library. Loading it runs its initialisers, and running the model
/// runs whatever its author compiled. Load only packages that you trust as you trust a program.
///
/// # Inputs
/// The inputs are the tensors among the arguments of the exported model, flattened as
/// [`call_spec`](Package::call_spec) says; numbers were compiled in. Compiled code reads memory
/// without asking, so [`run`](Package::run) first checks number, kind, device, sizes and strides of
/// all inputs. It knows them from the metadata `tch_extension.inputs`, which `describe` in the
/// example above writes.
///
/// Without that metadata they are inferred from the generated C++, which is part of a package. That
/// suffices if all sizes and strides are fixed. With dynamic sizes it suffices if all of them are
/// the same one, such as a batch, in the first dimensions, and if it has a bound: `Dim("batch", min=1)`,
/// say. Otherwise the C++ does not tell which sizes must be equal, and loading is an error, unless
/// you describe the inputs in [`PackageOptions::inputs`].
///
/// Values are not checked. An index that is out of range is an error only in small tensors on the
/// CPU; in large ones, libtorch ends the process, as it does in Python.
///
/// A model that writes to its inputs writes to the tensors that it is given. Inputs that require
/// grad are an error unless grad mode is off, because compiled code has no backward pass. Autocast
/// does not reach into it.
///
/// # Constants
/// The parameters and buffers of the model are compiled in, and can be read and replaced by name. By
/// default AOTInductor computes small ones, and those that depend on others, into the code, and then
/// they are no constants any more; `torch._inductor.config.always_keep_tensor_constants` keeps all.
///
/// # Threads and streams
/// Any thread may run the model. At most [`PackageOptions::runners`] threads run at a time, and the
/// others wait. On a GPU, kernels run on libtorch's current stream of the model's device, and a run
/// does not wait for them. But a runner is taken again only after the GPU has finished with it,
/// unless [`PackageOptions::single_threaded`] is on. A CUDA graph that captured a run reads the
/// constants at each replay and keeps the model, also when the `Package` is dropped.
///
/// # Files
/// The package is unpacked into a temporary folder (`TMPDIR` says where), which is removed when the
/// `Package` is dropped, or when loading fails. A process that is killed leaves it behind. When the
/// `Package` is dropped, libtorch 2.11 also unloads the model's code; libtorch 2.13 keeps it.
pub struct Package {
    // Dropped before the folder is removed.
    model: ffi::Package,
    name: String,
    device: Device,
    inputs: Inputs,
    constants: BTreeMap<String, (Vec<i64>, Option<Kind>)>,
    metadata: BTreeMap<String, String>,
    _folder: TempDir,
}

/// The options of [`Package::load_with`].
#[derive(Clone, Debug)]
pub struct PackageOptions {
    /// The name of the model, if the package has several. The default is `model`, as in Python.
    pub model: String,
    /// The device to run on. It must be of the type that the model was compiled for. Without it,
    /// a model for CUDA runs on libtorch's current device.
    pub device: Option<Device>,
    /// How many threads can run the model at a time. They share the constants. The default is 1.
    pub runners: usize,
    /// On a GPU, a run never waits until an earlier run has finished there. There must be 1 runner;
    /// runs from several threads take turns. A run that is captured in a CUDA graph needs it. It is
    /// off by default, as in Python.
    pub single_threaded: bool,
    /// A description of the inputs that replaces that of the package. It is trusted wherever the
    /// package does not contradict it, so a wrong one makes wild reads possible. JSON:
    ///
    /// ```json
    /// {"inputs": [{"name": "x", "kind": "float32", "sizes": ["batch", 4]},
    ///             {"name": "y", "kind": "float32", "sizes": ["batch", "2*batch"],
    ///              "strides": ["2*batch", 1], "device": "cpu"}],
    ///  "ranges": {"batch": [1, 64]}}
    /// ```
    ///
    /// A kind is named as in torch. A size or stride is a number or an expression in symbols, and
    /// each symbol is the whole size of some dimension. `name`, `strides` (row-major), `device` (the
    /// model's) and `ranges` can be left out.
    pub inputs: Option<String>,
}

impl Default for PackageOptions {
    fn default() -> Self {
        PackageOptions {
            model: "model".to_string(),
            device: None,
            runners: 1,
            single_threaded: false,
            inputs: None,
        }
    }
}

impl Package {
    /// Loads a package.
    ///
    /// ```
    /// use tch_extension::library::Package;
    ///
    /// let error = Package::load("missing.pt2").unwrap_err();
    /// assert!(error.to_string().starts_with("cannot load the package missing.pt2: No such file"));
    /// ```
    ///
    /// # Errors
    /// When the file is missing, incomplete or no package; when its library needs another libtorch,
    /// an operator that is not registered, or instructions that this CPU lacks; when its device is
    /// not there; and when it does not tell what its inputs must be (see
    /// [`Package`](Package#inputs)).
    pub fn load(path: impl AsRef<Path>) -> Result<Package> {
        Package::load_with(path, PackageOptions::default())
    }

    /// Like [`Package::load`], with options.
    ///
    /// ```no_run
    /// use tch_extension::library::{Package, PackageOptions};
    ///
    /// // Four threads run it at a time.
    /// let model = Package::load_with("model.pt2", PackageOptions { runners: 4, ..Default::default() })?;
    /// # Ok::<(), tch_extension::Error>(())
    /// ```
    ///
    /// # Errors
    /// As for [`Package::load`].
    pub fn load_with(path: impl AsRef<Path>, options: PackageOptions) -> Result<Package> {
        let path = path.as_ref();
        load::load(path, &options).map_err(|reason| {
            let text = format!("cannot load the package {}: {}", path.display(), reason.trim_end());
            Error::msg(text.replace('\n', " "))
        })
    }

    /// Runs the model. The outputs are the tensors that the exported model returned, flattened as
    /// [`call_spec`](Package::call_spec) says. They are constants: no gradient flows through.
    ///
    /// # Errors
    /// When an input is not what the model was compiled for; then nothing has run. When an operator
    /// that the model calls fails, also where the compiled code takes no notice of it. When the
    /// compiled code itself fails: libtorch 2.11 then prints the reason to the standard error stream
    /// only.
    pub fn run(&self, inputs: &[&Tensor]) -> Result<Vec<Tensor>> {
        self.inputs.check(&self.name, self.device, inputs)?;
        let outputs = self.model.run(inputs).map_err(|error| self.failed(&error))?;
        let all: Option<Vec<Tensor>> = outputs.into_iter().collect();
        all.ok_or_else(|| Error::msg(format!("{}: an output is missing", self.name)))
    }

    fn failed(&self, error: &Error) -> Error {
        let (text, name) = (error.to_string().replace('\n', " "), &self.name);
        Error::Torch(match text.contains("API call failed") {
            // So libtorch reports every failure of compiled code.
            true => {
                format!("{name}: the compiled model failed, and printed why to stderr ({text})")
            }
            false => format!("{name}: {text}"),
        })
    }

    /// The device that the model runs on.
    pub fn device(&self) -> Device {
        self.device
    }

    /// What was stored with the model when it was compiled (`aot_inductor.metadata`), and what
    /// torch added: the device `AOTI_DEVICE_KEY`, the CPU's instructions `AOTI_CPU_ISA`, ….
    pub fn metadata(&self) -> &BTreeMap<String, String> {
        &self.metadata
    }

    /// How the exported model's arguments and results were flattened: two of torch's
    /// `TreeSpec`s, as JSON.
    ///
    /// # Errors
    /// An error of libtorch.
    pub fn call_spec(&self) -> Result<(String, String)> {
        self.model.call_spec().map_err(|error| self.failed(&error))
    }

    /// The names of the constants that can be read and replaced, sorted. They are those of the
    /// exported model's parameters and buffers.
    pub fn constants(&self) -> impl Iterator<Item = &str> {
        self.constants.keys().map(String::as_str)
    }

    /// A copy of a constant.
    ///
    /// # Errors
    /// When there is no such constant.
    pub fn constant(&self, name: &str) -> Result<Tensor> {
        self.find(name)?;
        self.model.constant(name).map_err(|error| self.failed(&error))
    }

    /// Replaces the values of some constants, by copies. The others stay. A run that another thread
    /// has begun finishes with the old values, and runs that begin later have all new ones.
    ///
    /// ```no_run
    /// # use tch::{Device, Kind, Tensor};
    /// # use tch_extension::library::Package;
    /// let model = Package::load("model.pt2")?;
    /// let weight = Tensor::zeros([3, 4], (Kind::Float, Device::Cpu));
    /// model.update_constants(&[("linear.weight", &weight)])?;
    /// # Ok::<(), tch_extension::Error>(())
    /// ```
    ///
    /// # Errors
    /// When there is no such constant, or a value has another shape or kind, and when a CUDA graph
    /// that captured a run reads constants which the model computes from others; then nothing has
    /// changed.
    pub fn update_constants(&self, values: &[(&str, &Tensor)]) -> Result<()> {
        for (index, (name, value)) in values.iter().enumerate() {
            let (size, kind) = self.find(name)?;
            let refuse = |expected: String, got: String| {
                Err(Error::argument(&self.name, &format!("constant {name}"), expected, got, ""))
            };
            if !value.defined() {
                return refuse("a tensor".to_string(), "none".to_string());
            }
            if value.size() != *size {
                return refuse(format!("the shape {size:?}"), format!("{:?}", value.size()));
            }
            let got = value.f_kind().ok();
            if got.is_none() || got != *kind {
                let text = |kind: Option<Kind>| {
                    kind.map_or("an unknown kind".to_string(), |kind| format!("{kind:?}"))
                };
                return refuse(format!("kind {}", text(*kind)), text(got));
            }
            if !crate::ffi::tensor::is_strided(value) {
                return refuse("a dense tensor".to_string(), "another layout".to_string());
            }
            if values[..index].iter().any(|(other, _)| other == name) {
                return refuse("one value".to_string(), "two".to_string());
            }
        }
        self.model.update(values).map_err(|error| self.failed(&error))
    }

    /// Replaces the values of all constants: [`update_constants`](Package::update_constants) that
    /// refuses to leave an old value.
    ///
    /// # Errors
    /// As for [`update_constants`](Package::update_constants), and when a constant is missing.
    pub fn load_constants(&self, values: &[(&str, &Tensor)]) -> Result<()> {
        let is_given = |name: &&String| values.iter().any(|(given, _)| given == name);
        let missing: Vec<&str> =
            self.constants.keys().filter(|name| !is_given(name)).map(String::as_str).collect();
        if missing.is_empty() {
            return self.update_constants(values);
        }
        let (missing, expected) = (missing.join(", "), "values of all constants");
        let hint = "update_constants leaves the others as they are";
        Err(Error::argument(&self.name, "constants", expected, format!("none of {missing}"), hint))
    }

    fn find(&self, name: &str) -> Result<&(Vec<i64>, Option<Kind>)> {
        self.constants.get(name).ok_or_else(|| {
            let known: Vec<&str> = self.constants().collect();
            let known = match known[..] {
                [] => "none: all were computed into the code".to_string(),
                _ => known.join(", "),
            };
            Error::argument(
                &self.name,
                &format!("constant {name}"),
                format!("one of the constants ({known})"),
                "another name",
                "torch._inductor.config.always_keep_tensor_constants keeps all constants when a model is compiled",
            )
        })
    }
}

impl std::fmt::Debug for Package {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Package")
            .field("name", &self.name)
            .field("device", &self.device)
            .field("inputs", &format_args!("{}", self.inputs))
            .field("constants", &self.constants.keys())
            .finish()
    }
}
