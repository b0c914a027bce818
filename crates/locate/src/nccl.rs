//! Finds an installation of NCCL: its library, device bitcode and headers.

use std::fmt;
use std::path::{Path, PathBuf};

use crate::cache::cached_wheels;
use crate::env::Env;
use crate::error::{Attempt, NotFound};
use crate::version::NcclVersion;
use crate::wheel::check_wheel;

/// Library folders, relative to a tree's root: `lib` of wheels and toolkits, Red Hat's `lib64`,
/// Debian's multiarch folders, and the root itself, for a path that names the library's folder.
const LIB_DIRS: [&str; 5] = ["lib", "lib64", "lib/x86_64-linux-gnu", "lib/aarch64-linux-gnu", ""];

const ADVICE: &str = "run `devcomm setup` (in a checkout of devcomm: `cargo xtask setup`), which \
                      downloads NCCL's wheel into the cache, or set DEVCOMM_NCCL_HOME to a folder \
                      that holds NCCL's lib/ and include/";

/// A component of NCCL.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NcclPart {
    /// The host library, `libnccl.so.2`.
    Library,
    /// The device functions as LLVM bitcode, `libnccl_device.bc`.
    Bitcode,
    /// The C headers, `include/nccl.h`.
    Headers,
}

impl fmt::Display for NcclPart {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Library => "NCCL's library (libnccl.so.2)",
            Self::Bitcode => "NCCL's device bitcode (libnccl_device.bc)",
            Self::Headers => "NCCL's header (include/nccl.h)",
        })
    }
}

/// The step of the search that found a tree.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FoundBy {
    /// The caller's path.
    Explicit,
    /// The variable `DEVCOMM_NCCL_HOME`.
    DevcommNcclHome,
    /// The variable `NCCL_HOME`.
    NcclHome,
    /// The wheel in the active Python's site-packages.
    SitePackages,
    /// The cache that `devcomm setup` fills.
    Cache,
    /// The system's library folders.
    System,
}

impl fmt::Display for FoundBy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Explicit => "the given path",
            Self::DevcommNcclHome => "DEVCOMM_NCCL_HOME",
            Self::NcclHome => "NCCL_HOME",
            Self::SitePackages => "Python's site-packages",
            Self::Cache => "devcomm's cache",
            Self::System => "the system",
        })
    }
}

/// An NCCL tree: the folder of an installation, with its library, bitcode and headers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NcclTree {
    /// The folder that holds `lib/` and `include/`.
    pub root: PathBuf,
    /// The step of the search that found it.
    pub found_by: FoundBy,
    /// The host library, if the tree has it.
    pub library: Option<PathBuf>,
    /// The device bitcode, if the tree has it.
    pub bitcode: Option<PathBuf>,
    /// The folder with `nccl.h`, if the tree has it.
    pub include: Option<PathBuf>,
    /// The version that `nccl.h` states; `None` without headers.
    pub version: Option<NcclVersion>,
}

impl NcclTree {
    fn at(root: PathBuf, found_by: FoundBy) -> Self {
        let file = |names: &[&str]| {
            let all = LIB_DIRS.iter().flat_map(|dir| names.iter().map(move |name| (dir, name)));
            all.map(|(dir, name)| root.join(dir).join(name)).find(|path| path.is_file())
        };
        let library = file(&["libnccl.so.2", "libnccl.so"]);
        let bitcode = file(&["libnccl_device.bc"]);
        let include = Some(root.join("include")).filter(|path| path.join("nccl.h").is_file());
        let version = include.as_deref().and_then(NcclVersion::of_headers);
        Self { root, found_by, library, bitcode, include, version }
    }

    /// Returns whether the headers state this version: an `accept` of [`find_nccl`].
    ///
    /// # Errors
    ///
    /// If they state another one, or there are none.
    pub fn has_version(&self, required: NcclVersion) -> Result<(), String> {
        match self.version {
            Some(version) if version == required => Ok(()),
            Some(other) => Err(format!("it is NCCL {other}, required is {required}")),
            None => Err("it has no include/nccl.h with a version".to_owned()),
        }
    }

    fn part(&self, part: NcclPart) -> Option<&Path> {
        match part {
            NcclPart::Library => self.library.as_deref(),
            NcclPart::Bitcode => self.bitcode.as_deref(),
            NcclPart::Headers => self.include.as_deref(),
        }
    }
}

/// Finds the first tree, in the order of the [crate's table](crate), that has `part` and that
/// `accept` accepts.
///
/// `explicit` and the variables name the root of a tree, with `lib/` and `include/` in it, or the
/// library's folder. If `accept` rejects a tree, it returns the reason, and the search continues.
///
/// # Errors
///
/// [`NotFound`], with every place tried and its reason.
pub fn find_nccl(
    explicit: Option<&Path>,
    part: NcclPart,
    accept: impl FnMut(&NcclTree) -> Result<(), String>,
) -> Result<NcclTree, NotFound> {
    find_nccl_in(&Env::real(), explicit, part, accept)
}

fn find_nccl_in(
    env: &Env,
    explicit: Option<&Path>,
    part: NcclPart,
    mut accept: impl FnMut(&NcclTree) -> Result<(), String>,
) -> Result<NcclTree, NotFound> {
    let mut tried = Vec::new();
    let mut seen: Vec<PathBuf> = Vec::new();
    for (found_by, list) in steps(env, explicit) {
        let (place, roots) = list();
        if roots.is_empty() {
            tried.push(place);
        }
        for root in roots {
            // Two steps may find the same folder: it is tried once.
            if seen.contains(&root) {
                continue;
            }
            seen.push(root.clone());
            match check(NcclTree::at(root.clone(), found_by), part, &mut accept) {
                Ok(tree) => return Ok(tree),
                Err(reason) => {
                    tried.push(Attempt {
                        place: format!("{} ({found_by})", root.display()),
                        reason,
                    });
                }
            }
        }
    }
    Err(NotFound::new(&part.to_string(), tried, ADVICE))
}

fn check(
    tree: NcclTree,
    part: NcclPart,
    accept: &mut impl FnMut(&NcclTree) -> Result<(), String>,
) -> Result<NcclTree, String> {
    if !tree.root.is_dir() {
        return Err("there is no such folder".to_owned());
    }
    if tree.part(part).is_none() {
        return Err(match part {
            NcclPart::Library => "it has no lib/libnccl.so.2",
            NcclPart::Bitcode => "it has no lib/libnccl_device.bc (NCCL ships it from 2.28 on)",
            NcclPart::Headers => "it has no include/nccl.h",
        }
        .to_owned());
    }
    // The root is <wheel>/nvidia/nccl.
    if let (FoundBy::Cache, Some(wheel)) = (tree.found_by, tree.root.ancestors().nth(2)) {
        check_wheel(wheel)?;
    }
    accept(&tree).map(|()| tree)
}

/// A step of the search: its candidate roots, and what is reported if it has none.
type Step<'a> = Box<dyn FnOnce() -> (Attempt, Vec<PathBuf>) + 'a>;

fn steps<'a>(env: &'a Env, explicit: Option<&'a Path>) -> Vec<(FoundBy, Step<'a>)> {
    let attempt =
        |place: &str, reason: &str| Attempt { place: place.to_owned(), reason: reason.to_owned() };
    let variable = move |name: &'static str| -> Step<'a> {
        Box::new(move || (attempt(name, "not set"), env.path_var(name).into_iter().collect()))
    };
    let mut steps: Vec<(FoundBy, Step<'a>)> = Vec::new();
    if let Some(path) = explicit {
        // There is a root, so the attempt is not reported.
        let given = move || (attempt("the given path", "empty"), vec![path.to_owned()]);
        steps.push((FoundBy::Explicit, Box::new(given)));
    }
    steps.push((FoundBy::DevcommNcclHome, variable("DEVCOMM_NCCL_HOME")));
    steps.push((FoundBy::NcclHome, variable("NCCL_HOME")));
    let site_packages = move || {
        let wheels = env.site_packages().into_iter().map(|site| site.join("nvidia/nccl"));
        let missing = "not installed, or there is no python3";
        (
            attempt("nvidia/nccl in Python's site-packages", missing),
            wheels.filter(|path| path.is_dir()).collect(),
        )
    };
    steps.push((FoundBy::SitePackages, Box::new(site_packages)));
    let cache = move || {
        let (folder, wheels) = match cached_wheels(env, "nvidia-nccl-cu") {
            Ok(found) => found,
            Err(error) => return (attempt("devcomm's cache", &error.to_string()), Vec::new()),
        };
        let place = format!("{} (devcomm's cache)", folder.display());
        let roots = wheels.into_iter().map(|wheel| wheel.join("nvidia/nccl")).collect();
        (attempt(&place, "it holds no nvidia-nccl wheel"), roots)
    };
    steps.push((FoundBy::Cache, Box::new(cache)));
    let system = move || (attempt("the system", "it has no library folders"), system_roots(env));
    steps.push((FoundBy::System, Box::new(system)));
    steps
}

/// Returns the system's prefixes, and the prefixes of folders where the dynamic linker finds
/// `libnccl.so`.
fn system_roots(env: &Env) -> Vec<PathBuf> {
    let holds_nccl = |folder: &Path| {
        folder.join("libnccl.so.2").is_file() || folder.join("libnccl.so").is_file()
    };
    let library_path =
        env.path_list("LD_LIBRARY_PATH").into_iter().filter(|folder| holds_nccl(folder));
    let listing = (env.ldconfig)();
    let listed = listing.lines().filter_map(|line| {
        let (name, path) = line.split_once("=>")?;
        name.trim_start().starts_with("libnccl.so").then(|| Path::new(path.trim()).parent())?
    });
    let mut roots: Vec<PathBuf> = library_path.map(|folder| prefix_of(&folder)).collect();
    roots.extend(env.prefixes.iter().cloned());
    roots.extend(listed.map(prefix_of));
    roots
}

/// Returns the prefix of a library folder (`/usr` of `/usr/lib/x86_64-linux-gnu`), else the folder
/// itself.
fn prefix_of(folder: &Path) -> PathBuf {
    LIB_DIRS
        .iter()
        .filter(|dir| !dir.is_empty() && folder.ends_with(dir))
        .max_by_key(|dir| dir.len())
        .and_then(|dir| folder.ancestors().nth(Path::new(dir).components().count()))
        .unwrap_or(folder)
        .to_owned()
}

#[cfg(test)]
#[path = "nccl_tests.rs"]
mod tests;
