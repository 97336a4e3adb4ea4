//! Where a compiler looks for headers, and what a file says and asks for: the second key of the
//! compile cache.

use crate::compile::{Job, Language};
use crate::content::{Asks, digest};
use crate::objects::{CUDA_MACRO, LIBTORCH, Objects, TOOLKIT, lock};
use std::collections::{HashMap, HashSet};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::SystemTime;

/// The text of a file.
pub(crate) struct Text {
    pub digest: String,
    pub asks: Asks,
    pub read: SystemTime,
}

/// Where a compiler looks for headers.
pub(crate) struct Search {
    /// The folders in order, as the compiler writes them, and with links resolved.
    folders: Vec<(PathBuf, PathBuf)>,
    /// Those of them that the command names as the package's own.
    own: Vec<PathBuf>,
    /// Names for folders whose place makes no difference.
    roots: Vec<(&'static str, PathBuf)>,
    /// Whether the macro that says that CUDA is compiled is defined.
    cuda: bool,
    /// Whether objects contain the places of headers.
    has_places: bool,
    known: Mutex<HashMap<String, Option<Arc<Known>>>>,
}

/// What is known of a file that a compiler read.
pub(crate) struct Known {
    pub path: PathBuf,
    /// Other files whose being there counts.
    pub others: Vec<PathBuf>,
    pub key: String,
    pub text: Arc<Text>,
    pub is_system: bool,
}

impl Search {
    /// `report` is what the compiler says of the folders that it searches.
    pub fn new(job: &Job, report: &str) -> Self {
        let folders = searched(report).into_iter().map(|folder| {
            let real = folder.canonicalize().unwrap_or_else(|_| folder.clone());
            (folder, real)
        });
        Search {
            folders: folders.collect(),
            own: own_folders(&job.arguments),
            roots: job.roots.clone(),
            cuda: job.arguments.iter().any(|flag| flag == CUDA_MACRO),
            has_places: job.language == Language::Cuda,
            known: Mutex::default(),
        }
    }

    pub fn is_like(&self, other: &Search) -> bool {
        let of = |search: &Search| {
            let Search { folders, own, roots, cuda, has_places, known: _ } = search;
            (folders.clone(), own.clone(), roots.clone(), *cuda, *has_places)
        };
        of(self) == of(other)
    }

    /// The second key: what the files say, and what the preprocessor would find in place of each.
    ///
    /// It is the same only if the preprocessor's result is. The preprocessor begins with the same
    /// macros and the same text. As long as all was the same, the next directive is the same, too.
    /// The file that it includes was found in a certain folder of the search, or next to the file
    /// with the directive if its name is in quotes. It is found there again, because the key covers
    /// the name by which the search reaches it, whether a folder before has a file of that name, and
    /// whether there is one next to the file. And its text is the same. What `__has_include` finds is
    /// covered, too.
    pub fn key(&self, files: &[String], objects: &Objects) -> Option<String> {
        let mut keys = Vec::with_capacity(files.len());
        let (mut cuda, mut places) = (false, HashSet::new());
        for file in files {
            let known = self.known(file, objects)?;
            cuda |= known.text.asks.cuda;
            keys.push(known);
            let root = self.roots.iter().find(|(name, _)| file.starts_with(name));
            places.extend(root.filter(|(name, _)| self.has_places && *name != TOOLKIT));
        }
        let mut more = vec![if cuda { format!("CUDA {}", self.cuda) } else { String::new() }];
        let mut places: Vec<String> =
            places.into_iter().map(|place| format!("{place:?}")).collect();
        places.sort();
        more.append(&mut places);
        let keys = keys.iter().map(|known| known.key.as_bytes());
        Some(digest(keys.chain(more.iter().map(String::as_bytes))))
    }

    pub fn known(&self, file: &str, objects: &Objects) -> Option<Arc<Known>> {
        if let Some(known) = lock(&self.known).get(file) {
            return known.clone();
        }
        let known = self.learn(file, objects).map(Arc::new);
        lock(&self.known).entry(file.to_string()).or_insert(known).clone()
    }

    pub fn learn(&self, file: &str, objects: &Objects) -> Option<Known> {
        let path = self.path(file)?;
        let is_system = !self.is_own(&path);
        let text = objects.text(&path, is_system)?;
        let mut parts = vec![file.to_string(), text.digest.clone()];
        let mut others = Vec::new();
        // g++ prefers a header that is compiled already.
        let precompiled = PathBuf::from(format!("{}.gch", path.display()));
        others.extend(Some(precompiled).filter(|path| path.exists()));
        for (place, name) in self.places(&path) {
            // A list may name another libtorch's header by its whole path. This build's search does
            // not reach that file, so its key must differ.
            parts.push(format!("found as {}", name.display()));
            let before = self.folders[..place].iter().map(|(folder, _)| folder.join(&name));
            others.extend(before.filter(|path| path.is_file()));
        }
        let quoted = text.asks.quoted.iter().map(|name| path.with_file_name(name));
        others.extend(quoted.filter(|path| path.is_file()));
        parts.extend(others.iter().map(|path| self.name(path)));
        for (name, is_quoted) in &text.asks.has {
            let next_to = is_quoted.then(|| path.with_file_name(name));
            let mut places =
                next_to.into_iter().chain(self.folders.iter().map(|(folder, _)| folder.join(name)));
            let found = places.find(|path| path.is_file());
            parts.push(format!("{name} {:?}", found.as_ref().map(|path| self.name(path))));
            others.extend(found);
        }
        let key = digest(parts.iter().map(String::as_bytes));
        Some(Known { path, others, key, text, is_system })
    }

    /// The folders of the search in which a file is, by their numbers, and its name there.
    pub fn places(&self, path: &Path) -> impl Iterator<Item = (usize, PathBuf)> {
        self.folders.iter().enumerate().filter_map(move |(place, (folder, real))| {
            let name = path.strip_prefix(folder).or_else(|_| path.strip_prefix(real)).ok()?;
            Some((place, name.to_path_buf()))
        })
    }

    /// The paths of those files that are the package's own.
    pub fn own(&self, files: &[String], objects: &Objects) -> Vec<String> {
        let known = files.iter().filter_map(|file| self.known(file, objects));
        let own = known.filter(|known| !known.is_system);
        own.map(|known| known.path.display().to_string()).collect()
    }

    /// Whether a file belongs to the package, or to another one that it names, and not to libtorch,
    /// CUDA or the system.
    fn is_own(&self, path: &Path) -> bool {
        if self.folders.is_empty() {
            let is_root = |(name, root): &(&str, PathBuf)| {
                [LIBTORCH, TOOLKIT].contains(name) && path.starts_with(root)
            };
            return !path.starts_with("/usr") && !self.roots.iter().any(is_root);
        }
        let folders = self.folders.iter().map(|(folder, _)| folder);
        let nearest = folders
            .filter(|folder| path.starts_with(folder))
            .max_by_key(|folder| folder.components().count());
        nearest.is_none_or(|folder| self.own.contains(folder))
    }

    /// A path with the name of the root that it is in.
    pub fn name(&self, path: &Path) -> String {
        let inside = self.roots.iter().filter_map(|(name, root)| {
            Some((root.components().count(), *name, path.strip_prefix(root).ok()?))
        });
        match inside.max_by_key(|(depth, ..)| *depth) {
            Some((_, name, rest)) => format!("{name}/{}", rest.display()),
            None => path.display().to_string(),
        }
    }

    /// The path of a name, unless its root is not there.
    fn path(&self, name: &str) -> Option<PathBuf> {
        if !name.starts_with('{') {
            return Some(name.into());
        }
        let (root, rest) = name.split_once('/')?;
        let (_, folder) = self.roots.iter().find(|(name, _)| *name == root)?;
        Some(folder.join(rest))
    }
}

/// The folders that the command names as the package's own.
fn own_folders(arguments: &[String]) -> Vec<PathBuf> {
    let mut own = Vec::new();
    let mut flags = arguments.iter();
    while let Some(flag) = flags.next() {
        match flag.strip_prefix("-I").or_else(|| flag.strip_prefix("-iquote")) {
            Some("") => own.extend(flags.next().map(PathBuf::from)),
            Some(folder) => own.push(folder.into()),
            None => {}
        }
    }
    own
}

/// The folders that a compiler's report lists.
pub(crate) fn searched(report: &str) -> Vec<PathBuf> {
    let lines = report.lines().skip_while(|line| !line.starts_with("#include \"...\""));
    let lines = lines.take_while(|line| !line.starts_with("End of search list"));
    lines.filter_map(|line| line.strip_prefix(' ')).map(PathBuf::from).collect()
}
