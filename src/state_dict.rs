//! Tensors in safetensors files: those of models ([`crate::nn::state_dict`]) and of optimizers.

use crate::ffi::tensor::with_values;
use crate::{Error, Result, check};
use memmap2::Mmap;
use safetensors::tensor::{
    Dtype, Metadata, SafeTensorError, SafeTensors, TensorView, View, serialize_to_file,
};
use std::borrow::Cow;
use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fs::{File, Permissions};
use std::io::{ErrorKind, Read};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use tch::nn::VarStore;
use tch::{Device, Kind, Tensor};

mod folder;

pub use folder::{files, save_sharded};

const LOAD: &str = "state_dict::load";
const SAVE: &str = "state_dict::save";

/// How the tensors of a file belong to the variables of a model.
#[derive(Clone, Copy)]
pub struct StateDictOptions<'a> {
    /// Whether [`load`] returns an error if a variable is missing in the file, or a tensor of the
    /// file is unexpected. Otherwise it reports them.
    pub strict: bool,
    /// The name in the file, for the name of a variable. Two variables may have one name when they
    /// are loaded, for weights that are tied in the file.
    pub name: Option<&'a dyn Fn(&str) -> String>,
    /// Whether the file has the transpose of a variable with this name. The variable must be a
    /// matrix.
    pub transposed: Option<&'a dyn Fn(&str) -> bool>,
}

impl Default for StateDictOptions<'_> {
    /// Strict, with equal names, nothing transposed.
    fn default() -> Self {
        StateDictOptions { strict: true, name: None, transposed: None }
    }
}

impl std::fmt::Debug for StateDictOptions<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("StateDictOptions")
            .field("strict", &self.strict)
            .field("name", &self.name.is_some())
            .field("transposed", &self.transposed.is_some())
            .finish()
    }
}

/// What [`load`] did not load. Both lists are sorted.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LoadReport {
    /// The names in the file of variables that the file lacks. These variables are unchanged.
    pub missing: Vec<String>,
    /// The names of tensors in the file that belong to no variable.
    pub unexpected: Vec<String>,
}

/// A variable of a model, and what the file calls it.
struct Variable {
    name_in_file: String,
    tensor: Tensor,
    transposed: bool,
}

impl Variable {
    /// The shape in the file.
    fn size_in_file(&self) -> Vec<i64> {
        let mut size = self.tensor.size();
        if self.transposed {
            size.reverse();
        }
        size
    }
}

/// The variables in the order of their names.
fn variables(op: &str, vs: &VarStore, options: &StateDictOptions<'_>) -> Result<Vec<Variable>> {
    let sorted: BTreeMap<String, Tensor> = vs.variables().into_iter().collect();
    let variable = |(name, tensor): (String, Tensor)| {
        let transposed = options.transposed.is_some_and(|transposed| transposed(&name));
        if transposed && tensor.dim() != 2 {
            let got = format!("shape {:?}", tensor.size());
            return Err(Error::argument(op, &name, "a matrix, to be transposed", got, ""));
        }
        let name_in_file = options.name.map_or_else(|| name.clone(), |rename| rename(&name));
        Ok(Variable { name_in_file, tensor, transposed })
    };
    sorted.into_iter().map(variable).collect()
}

/// Loads the variables of a model from a safetensors file, or from all the files of a model that is
/// split into several: torch's `load_state_dict`. See the [module](crate::nn::state_dict) for what is checked and
/// kept.
///
/// Files are mapped into memory, and values go from there to the variables, one tensor after the other.
/// They are converted between floating-point kinds; all other kinds must be those of the variables. No
/// other process may change a file meanwhile: if it became shorter, or its disk failed, the system would
/// end this process.
///
/// ```
/// use tch::{Device, nn::{VarStore, linear}};
/// use tch_extension::nn::state_dict::{load, save};
///
/// let folder = std::env::temp_dir().join(format!("state-dict-{}", std::process::id()));
/// std::fs::create_dir_all(&folder)?;
/// let file = folder.join("model.safetensors");
/// let model = || {
///     let vs = VarStore::new(Device::Cpu);
///     let layer = linear(vs.root() / "out", 4, 3, Default::default());
///     (vs, layer)
/// };
/// let ((vs, trained), (other_vs, other)) = (model(), model());
/// save(&vs, &file, &Default::default())?;
/// let report = load(&other_vs, &[&file], &Default::default())?;
/// assert!(report.missing.is_empty() && other.ws == trained.ws);
/// # std::fs::remove_dir_all(&folder)?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Errors
/// Before any variable is changed: when a file cannot be read or is no complete safetensors file,
/// when two files have the same name, when a shape or kind does not fit, when elements of a variable
/// share memory, and, with `strict`, when names are missing or unexpected. After that, only a failure
/// of the device is left.
pub fn load<P: AsRef<Path>>(
    vs: &VarStore,
    files: &[P],
    options: &StateDictOptions<'_>,
) -> Result<LoadReport> {
    let variables = variables(LOAD, vs, options)?;
    let files: Vec<&Path> = files.iter().map(AsRef::as_ref).collect();
    let bytes = files.iter().map(|file| read(LOAD, file)).collect::<Result<Vec<_>>>()?;
    let parsed = files.iter().zip(&bytes).map(|(file, bytes)| parse(LOAD, file, bytes));
    let parsed = parsed.collect::<Result<Vec<_>>>()?;
    let found = by_name(&files, &parsed)?;

    let report = compare(&variables, &found);
    let refused: Vec<String> = variables
        .iter()
        .filter_map(|variable| mismatch(variable, found.get(&variable.name_in_file)?))
        .collect();
    let mut problems = vec![];
    if options.strict {
        let of = |names: &[String]| names.iter().map(|name| shown(name)).collect::<Vec<_>>();
        problems.extend(listed("no ", &of(&report.missing)));
        problems.extend(listed("the unexpected ", &of(&report.unexpected)));
    }
    problems.extend(listed("", &refused));
    if !problems.is_empty() {
        let names: Vec<_> = files.iter().map(|file| file.display().to_string()).collect();
        return Err(Error::msg(format!(
            "{LOAD}: {}: expected the model's variables, got {}; nothing was loaded",
            names.join(", "),
            problems.join("; ")
        )));
    }
    let _guard = tch::no_grad_guard();
    for variable in &variables {
        let Some(view) = found.get(&variable.name_in_file) else { continue };
        let (size, kind) = (size_of(view), kind_of(view.dtype())?);
        with_values(view.data(), &size, kind, |values| {
            let mut target = variable.tensor.shallow_clone();
            if variable.transposed {
                target = target.f_transpose(0, 1)?;
            }
            // A copy from another device would convert the values there.
            target.f_copy_(&values.f_to_device(target.device())?)?;
            Ok(())
        })?;
    }
    Ok(report)
}

fn read(op: &str, file: &Path) -> Result<Mmap> {
    // A pipe has no end until its writer closes it, so reading one could wait for ever.
    let is_file = std::fs::metadata(file).map_err(|error| failed(op, file, &error))?.is_file();
    if !is_file {
        return Err(failed(op, file, &"expected a regular file, got a folder, pipe or device"));
    }
    let file_in = File::open(file).map_err(|error| failed(op, file, &error))?;
    crate::ffi::map(&file_in).map_err(|error| failed(op, file, &error))
}

fn failed(op: &str, file: &Path, error: &dyn std::fmt::Display) -> Error {
    Error::msg(format!("{op}: {}: {error}", file.display()))
}

fn parse<'a>(op: &str, file: &Path, bytes: &'a [u8]) -> Result<SafeTensors<'a>> {
    check_sizes(op, file, bytes)?;
    SafeTensors::deserialize(bytes).map_err(|error| {
        let is_unknown = matches!(error, SafeTensorError::InvalidHeaderDeserialization);
        if let Some(kind) = unknown_kind(bytes).filter(|_| is_unknown) {
            return Error::msg(format!(
                "{op}: {}: expected tensors of the kinds {}, got one of kind {}",
                file.display(),
                DTYPES.join(", "),
                shown(kind)
            ));
        }
        Error::msg(format!(
            "{op}: {}: expected a complete safetensors file, got one with the error {error:?}; \
             safetensors.torch.save_file of Python makes one of a state_dict",
            file.display()
        ))
    })
}

/// The kinds that this version of safetensors reads.
const DTYPES: [&str; 13] =
    ["BOOL", "U8", "I8", "I16", "U16", "F16", "BF16", "I32", "U32", "F32", "F64", "I64", "U64"];

/// The largest header that safetensors reads, in bytes.
const LARGEST_HEADER: u64 = 100_000_000;

/// A file's header, if it is one that safetensors reads.
fn header(bytes: &[u8]) -> Option<&str> {
    let (len, rest) = bytes.split_first_chunk()?;
    let len = u64::from_le_bytes(*len);
    let header = rest.get(..usize::try_from(len).ok()?).filter(|_| len <= LARGEST_HEADER)?;
    std::str::from_utf8(header).ok()
}

/// The first kind in a file's header that is not among [`DTYPES`], such as `F8_E4M3`.
fn unknown_kind(bytes: &[u8]) -> Option<&str> {
    let mut kinds = header(bytes)?.split("\"dtype\"").skip(1).filter_map(string);
    kinds.find(|kind| !DTYPES.contains(kind))
}

/// Refuses the shapes and places of tensors with which safetensors, tch or libtorch would overflow.
/// What else is wrong with a header, safetensors says.
fn check_sizes(op: &str, file: &Path, bytes: &[u8]) -> Result<()> {
    let metadata = header(bytes).and_then(|text| serde_json::from_str::<Metadata>(text).ok());
    for (name, info) in metadata.iter().flat_map(Metadata::tensors) {
        let end = i64::try_from(info.data_offsets.1);
        if byte_count(&info.shape, info.dtype).is_none() || end.is_err() {
            return Err(Error::msg(format!(
                "{op}: {}: expected tensors that fit into the file, got {} of shape {:?} and kind {:?}",
                file.display(),
                shown(&name),
                info.shape,
                info.dtype
            )));
        }
    }
    Ok(())
}

/// The bytes of a tensor; `None` if libtorch cannot count them. It multiplies the sizes of an empty
/// one, too, each of which must therefore count as one at least.
fn byte_count(shape: &[usize], dtype: Dtype) -> Option<usize> {
    let counted = shape.iter().map(|&size| size.max(1)).try_fold(dtype.size(), usize::checked_mul);
    counted.filter(|&bytes| i64::try_from(bytes).is_ok())?;
    Some(shape.iter().product::<usize>() * dtype.size())
}

/// The string after the colon that `text` begins with.
fn string(text: &str) -> Option<&str> {
    let value = text.trim_start().strip_prefix(':')?.trim_start().strip_prefix('"')?;
    value.split('"').next()
}

/// A name from a file, for a message of one line.
pub(crate) fn shown(name: &str) -> String {
    name.escape_debug().to_string()
}

/// The tensors of all files.
fn by_name<'a>(
    files: &[&Path],
    parsed: &'a [SafeTensors<'a>],
) -> Result<BTreeMap<String, TensorView<'a>>> {
    let mut found = BTreeMap::new();
    for (file, tensors) in files.iter().zip(parsed) {
        for (name, view) in tensors.tensors() {
            if found.contains_key(&name) {
                return Err(Error::msg(format!(
                    "{LOAD}: {}: expected names that no other file has, got {}",
                    file.display(),
                    shown(&name)
                )));
            }
            found.insert(name, view);
        }
    }
    Ok(found)
}

fn compare(variables: &[Variable], found: &BTreeMap<String, TensorView<'_>>) -> LoadReport {
    let wanted: BTreeSet<&String> =
        variables.iter().map(|variable| &variable.name_in_file).collect();
    LoadReport {
        missing: wanted
            .iter()
            .filter(|name| !found.contains_key(**name))
            .map(|name| (**name).clone())
            .collect(),
        unexpected: found.keys().filter(|name| !wanted.contains(name)).cloned().collect(),
    }
}

/// What is wrong with a tensor of the file, if anything is.
fn mismatch(variable: &Variable, view: &TensorView<'_>) -> Option<String> {
    let Variable { name_in_file, tensor, .. } = variable;
    let (name, found, expected) = (shown(name_in_file), size_of(view), variable.size_in_file());
    let strides = tensor.stride();
    let is_repeated = tensor.size().iter().zip(&strides).any(|(&size, &by)| size > 1 && by == 0);
    if is_repeated && tensor.numel() > 0 {
        // libtorch would refuse to write to it, after other variables were written.
        return Some(format!("{name} for a variable of strides {strides:?}, which share memory"));
    }
    if found != expected {
        let transposed = if variable.transposed { ", transposed," } else { "" };
        return Some(format!("{name} of shape {found:?} instead of{transposed} {expected:?}"));
    }
    let kind = tensor.f_kind().ok();
    let fits = kind_of(view.dtype()).is_ok_and(|found| {
        Some(found) == kind || is_floating(found) && kind.is_some_and(is_floating)
    });
    let expected = kind.map_or("an unknown one".to_string(), |kind| format!("{kind:?}"));
    (!fits).then(|| format!("{name} of kind {:?} instead of {expected}", view.dtype()))
}

/// The first names of a list, and how many more there are.
pub(crate) fn listed(what: &str, names: &[String]) -> Option<String> {
    const MOST: usize = 8;
    let first = names.iter().take(MOST).map(String::as_str).collect::<Vec<_>>().join(", ");
    match names.len() {
        0 => None,
        len if len <= MOST => Some(format!("{what}{first}")),
        len => Some(format!("{what}{first} and {} more", len - MOST)),
    }
}

/// The shape in the file, whose sizes [`check_sizes`] accepted.
fn size_of(view: &TensorView<'_>) -> Vec<i64> {
    view.shape().iter().map(|&size| size as i64).collect()
}

pub(crate) fn is_floating(kind: Kind) -> bool {
    matches!(kind, Kind::Half | Kind::BFloat16 | Kind::Float | Kind::Double)
}

fn kind_of(dtype: Dtype) -> Result<Kind> {
    Kind::try_from(dtype).map_err(Error::from)
}

/// Writes the variables of a model to a safetensors file, which Python reads with
/// `safetensors.torch.load_file` or Hugging Face's `from_pretrained`. Non-contiguous and CUDA
/// tensors are copied, one at a time. Weights that are tied under two names are written twice.
///
/// The file is first written completely under another name in the same folder, `.<name>.<random>`,
/// which may remain if the process is killed. The new file has the permissions of the one that it
/// replaces. A symbolic link stays, and the file that it leads to is replaced, or made. See [`load`]
/// for an example.
///
/// # Errors
/// When two variables get one name, when a variable has a kind that the format lacks, when names and
/// shapes together are longer than the 100 MB that readers accept, when CUDA fails, when the path
/// leads to a folder, a device, a pipe or a socket, or when the file cannot be written. The old
/// file, if there was one, is then unchanged, unless the error says that the new one is written:
/// then the disk failed to keep its name, and after a power cut the old one may be back.
pub fn save<P: AsRef<Path>>(vs: &VarStore, file: P, options: &StateDictOptions<'_>) -> Result<()> {
    save_at_end_of_links(SAVE, &variables(SAVE, vs, options)?, file.as_ref())
}

fn twice(op: &str, name: &str) -> Error {
    let expected = "a name for each variable, and none called __metadata__";
    Error::argument(op, "name", expected, format!("{name} twice"), "")
}

fn save_at_end_of_links(op: &str, variables: &[Variable], file: &Path) -> Result<()> {
    let end = end_of_links(file).map_err(|error| failed(op, file, &error))?;
    save_variables(op, variables, &end).map_err(|error| match end == file {
        true => error,
        false => Error::msg(format!("{error}, where {} leads to", file.display())),
    })
}

fn save_variables(op: &str, variables: &[Variable], file: &Path) -> Result<()> {
    let failure = RefCell::new(None);
    let mut names = BTreeSet::from(["__metadata__"]);
    let (mut tensors, mut bytes) = (vec![], 0_usize);
    for variable in variables {
        if !names.insert(&variable.name_in_file) {
            return Err(twice(op, &variable.name_in_file));
        }
        let stored = Stored::new(op, variable, &failure)?;
        bytes = bytes.saturating_add(stored.len);
        tensors.push((variable.name_in_file.as_str(), stored));
    }
    if i64::try_from(bytes).is_err() {
        return Err(failed(op, file, &"expected tensors that fit into a file, got larger ones"));
    }
    write(file, tensors, &failure).map_err(|error| failed(op, file, &error))
}

/// Writes tensors that belong to no [`VarStore`], such as a checkpoint, as [`save`] writes variables.
///
/// ```
/// use std::collections::BTreeMap;
/// use tch::Tensor;
/// use tch_extension::nn::state_dict::{load_tensors, save_tensors};
///
/// let file = std::env::temp_dir().join(format!("tensors-{}.safetensors", std::process::id()));
/// let tensors = BTreeMap::from([("position".to_string(), Tensor::from_slice(&[7_i64]))]);
/// save_tensors(&tensors, &file)?;
/// assert_eq!(load_tensors(&file)?, tensors);
/// # std::fs::remove_file(&file)?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Errors
/// As for [`save`].
pub fn save_tensors<P: AsRef<Path>>(tensors: &BTreeMap<String, Tensor>, file: P) -> Result<()> {
    write_tensors("state_dict::save_tensors", tensors, file.as_ref())
}

/// [`save_tensors`], for another function whose name errors have.
pub(crate) fn write_tensors(
    op: &str,
    tensors: &BTreeMap<String, Tensor>,
    file: &Path,
) -> Result<()> {
    let variable = |(name, tensor): (&String, &Tensor)| Variable {
        name_in_file: name.clone(),
        tensor: tensor.shallow_clone(),
        transposed: false,
    };
    save_at_end_of_links(op, &tensors.iter().map(variable).collect::<Vec<_>>(), file)
}

/// Reads all tensors of a safetensors file, on the CPU. See [`save_tensors`] for an example. No other
/// process may change the file meanwhile, as for [`load`].
///
/// # Errors
/// When the file cannot be read or is no complete safetensors file.
pub fn load_tensors<P: AsRef<Path>>(file: P) -> Result<BTreeMap<String, Tensor>> {
    read_tensors("state_dict::load_tensors", file.as_ref())
}

/// [`load_tensors`], for another function whose name errors have.
pub(crate) fn read_tensors(op: &str, file: &Path) -> Result<BTreeMap<String, Tensor>> {
    let bytes = read(op, file)?;
    let tensor = |(name, view): (String, TensorView<'_>)| {
        let kind = kind_of(view.dtype())?;
        Ok((name, Tensor::f_from_data_size(view.data(), &size_of(&view), kind)?))
    };
    parse(op, file, &bytes)?.tensors().into_iter().map(tensor).collect()
}

fn write(
    file: &Path,
    tensors: Vec<(&str, Stored<'_>)>,
    failure: &RefCell<Option<Error>>,
) -> Result<()> {
    // Hugging Face's transformers refuse a file without this entry. Next to no tensors at all, this
    // version of safetensors would write it outside of the header.
    let metadata =
        (!tensors.is_empty()).then(|| HashMap::from([("format".to_string(), "pt".to_string())]));
    write_whole(file, |partial| {
        serialize_to_file(tensors, &metadata, partial)
            .map_err(|error| Error::msg(error.to_string()))?;
        if let Some(error) = failure.take() {
            return Err(error);
        }
        check_header(partial)
    })
}

/// Writes a new file, which gets its name when it is complete.
fn write_whole(file: &Path, contents: impl FnOnce(&Path) -> Result<()>) -> Result<()> {
    let io = |error: std::io::Error| Error::msg(error.to_string());
    let name = file.file_name().ok_or_else(|| Error::msg("expected a file name"))?;
    let replaced = permissions_of_file(file)?;
    let folder = file.parent().filter(|folder| !folder.as_os_str().is_empty());
    let folder = folder.unwrap_or(Path::new("."));
    // Opened before anything is written, so that this cannot fail after the renaming.
    let folder_to_sync = File::open(folder).map_err(io)?;
    // For a new file as for any new file; the process' umask takes bits away.
    let at_first = if replaced.is_some() { 0o600 } else { 0o666 };
    let partial = tempfile::Builder::new()
        .prefix(&format!(".{}.", name.to_string_lossy()))
        .permissions(Permissions::from_mode(at_first))
        .tempfile_in(folder)
        .map_err(io)?;
    contents(partial.path())?;
    if let Some(permissions) = replaced {
        partial.as_file().set_permissions(permissions).map_err(io)?;
    }
    // The contents are on the disk before the name is, and then the name is.
    partial.as_file().sync_all().map_err(io)?;
    partial.persist(file).map_err(|error| io(error.error))?;
    sync_folder(&folder_to_sync)
        .map_err(|error| Error::msg(format!("the new file is written, but not its name: {error}")))
}

/// Refuses a file whose header no reader would accept.
fn check_header(file: &Path) -> Result<()> {
    let mut len = [0; 8];
    let read = File::open(file).and_then(|mut file| file.read_exact(&mut len));
    read.map_err(|error| Error::msg(error.to_string()))?;
    match u64::from_le_bytes(len) {
        len if len <= LARGEST_HEADER => Ok(()),
        len => Err(Error::msg(format!(
            "expected names and shapes of at most {LARGEST_HEADER} bytes, got {len}: give shorter names, or write \
             several files"
        ))),
    }
}

/// Where a path leads to through symbolic links. There need not be a file.
fn end_of_links(file: &Path) -> std::io::Result<PathBuf> {
    let mut file = file.to_path_buf();
    // Linux follows as many.
    for _ in 0..=40 {
        let Ok(next) = std::fs::read_link(&file) else { return Ok(file) };
        file = file.parent().unwrap_or(Path::new("")).join(next);
    }
    Err(std::io::Error::other("expected a file, got too many symbolic links"))
}

/// The permissions of a file, or `None` if there is nothing.
fn permissions_of_file(file: &Path) -> Result<Option<Permissions>> {
    let got = match std::fs::metadata(file) {
        Ok(found) if found.is_file() => return Ok(Some(found.permissions())),
        Ok(found) if found.is_dir() => "a folder",
        Ok(_) => "a device, a pipe or a socket",
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(Error::msg(error.to_string())),
    };
    Err(Error::msg(format!("expected a regular file or a new one, got {got}")))
}

/// Waits until the names in a folder are on the disk. Where a file system cannot do that for
/// folders, there is nothing to wait for.
fn sync_folder(folder: &File) -> std::io::Result<()> {
    match folder.sync_all() {
        Err(error) if matches!(error.kind(), ErrorKind::InvalidInput | ErrorKind::Unsupported) => {
            Ok(())
        }
        synced => synced,
    }
}

/// A variable in the form of the file.
struct Stored<'a> {
    tensor: Tensor,
    shape: Vec<usize>,
    dtype: Dtype,
    len: usize,
    /// The first error of a copy, which the trait cannot return.
    failure: &'a RefCell<Option<Error>>,
}

impl<'a> Stored<'a> {
    fn new(op: &str, variable: &Variable, failure: &'a RefCell<Option<Error>>) -> Result<Self> {
        let name = &variable.name_in_file;
        let mut tensor = variable.tensor.f_detach()?;
        check!(op, name, tensor).defined()?;
        if variable.transposed {
            tensor = tensor.f_transpose(0, 1)?;
        }
        let kind = tensor.f_kind()?;
        let dtype = Dtype::try_from(kind).map_err(|_| {
            let expected = "a floating-point, integer or Bool kind";
            Error::argument(op, name, expected, format!("{kind:?}"), "")
        })?;
        let shape: Vec<usize> = tensor.size().iter().map(|&size| size as usize).collect();
        let len = byte_count(&shape, dtype).ok_or_else(|| {
            let expected = "a tensor whose bytes can be counted";
            Error::argument(op, name, expected, format!("shape {shape:?}"), "")
        })?;
        Ok(Stored { tensor, shape, dtype, len, failure })
    }

    fn bytes(&self) -> Result<Vec<u8>> {
        // Before there is memory for the bytes: an expanded tensor may be larger than all memory.
        let tensor = self.tensor.f_to_device(Device::Cpu)?.f_contiguous()?;
        let mut bytes = vec![0; self.len];
        tensor.f_copy_data_u8(&mut bytes, tensor.numel())?;
        Ok(bytes)
    }
}

impl View for Stored<'_> {
    fn dtype(&self) -> Dtype {
        self.dtype
    }

    fn shape(&self) -> &[usize] {
        &self.shape
    }

    fn data(&self) -> Cow<'_, [u8]> {
        let bytes = self.bytes().unwrap_or_else(|error| {
            self.failure.borrow_mut().get_or_insert(error);
            vec![]
        });
        bytes.into()
    }

    fn data_len(&self) -> usize {
        self.len
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_folder_that_cannot_be_synchronised_is_no_error() {
        let folder = File::open("/proc").expect("a folder");
        let error = folder.sync_all().expect_err("Linux cannot synchronise /proc");
        assert_eq!(error.kind(), ErrorKind::InvalidInput);
        sync_folder(&folder).expect("nothing to wait for");
        // ENOTSUP of Linux
        assert_eq!(std::io::Error::from_raw_os_error(95).kind(), ErrorKind::Unsupported);
    }
}
