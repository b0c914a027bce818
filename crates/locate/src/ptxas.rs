//! Finds NVIDIA's PTX assembler.

use std::path::{Path, PathBuf};

use crate::cache::cached_wheels;
use crate::env::Env;
use crate::error::{Attempt, NotFound};
use crate::wheel::check_wheel;

/// The oldest `ptxas` that [`find_ptxas`] accepts, as CUDA's major and minor version: the first
/// with `sm_100` and `sm_120`; it also reads PTX ISA 8.6, which devcomm emits.
pub const PTXAS_MIN: (u32, u32) = (12, 8);

/// The path of `ptxas` in a Python wheel: of CUDA 13, then of CUDA 12.
const IN_WHEEL: [&str; 2] = ["nvidia/cu13/bin/ptxas", "nvidia/cuda_nvcc/bin/ptxas"];

/// The step of the search whose candidates are in wheels with a RECORD, by which they are checked.
const CACHE: &str = "devcomm's cache";

const ADVICE: &str = "run `devcomm setup` (in a checkout of devcomm: `cargo xtask setup`), which \
                      downloads its wheel into the cache, or set DEVCOMM_PTXAS to a ptxas of CUDA \
                      12.8 or newer (for sm_103, 12.9)";

/// Finds the first `ptxas`, in the order of the [crate's table](crate), that runs and is at least
/// [`PTXAS_MIN`].
///
/// # Errors
///
/// [`NotFound`], with every place tried and its reason.
pub fn find_ptxas() -> Result<PathBuf, NotFound> {
    find_ptxas_since(PTXAS_MIN)
}

/// Does the same as [`find_ptxas`] with another oldest version, for a GPU that [`PTXAS_MIN`] does
/// not know.
///
/// # Errors
///
/// [`NotFound`], with every place tried and its reason.
pub fn find_ptxas_since(oldest: (u32, u32)) -> Result<PathBuf, NotFound> {
    find_ptxas_in(&Env::real(), oldest)
}

fn find_ptxas_in(env: &Env, oldest: (u32, u32)) -> Result<PathBuf, NotFound> {
    let mut tried = Vec::new();
    for Step { place, if_empty, list } in steps(env) {
        let (candidates, reason) = match list() {
            Ok(candidates) => (candidates, if_empty.to_owned()),
            Err(reason) => (Vec::new(), reason),
        };
        if candidates.is_empty() {
            tried.push(Attempt { place: place.to_owned(), reason });
        }
        for path in candidates {
            // Both paths of `IN_WHEEL` have four components, so the wheel is the fourth ancestor.
            let complete = match (place, path.ancestors().nth(4)) {
                (CACHE, Some(wheel)) => check_wheel(wheel),
                _ => Ok(()),
            };
            match complete.and_then(|()| check(env, &path, oldest)) {
                Ok(()) => return Ok(path),
                Err(reason) => {
                    tried.push(Attempt { place: format!("{} ({place})", path.display()), reason });
                }
            }
        }
    }
    Err(NotFound::new("ptxas", tried, ADVICE))
}

/// A step of the search.
struct Step<'a> {
    place: &'static str,
    /// The reason if the step has no candidate.
    if_empty: &'static str,
    list: Box<dyn FnOnce() -> Result<Vec<PathBuf>, String> + 'a>,
}

fn steps(env: &Env) -> [Step<'_>; 6] {
    let variable = |name: &'static str, below: &'static str| Step {
        place: name,
        if_empty: "not set",
        list: Box::new(move || {
            Ok(env.path_var(name).map(|path| path.join(below)).into_iter().collect())
        }),
    };
    let named = Step {
        list: Box::new(|| Ok(env.path_var("DEVCOMM_PTXAS").into_iter().collect())),
        ..variable("DEVCOMM_PTXAS", "")
    };
    let path = Step {
        place: "PATH",
        if_empty: "no folder in it has a ptxas",
        list: Box::new(|| Ok(existing(&env.path_list("PATH"), &["ptxas"]))),
    };
    let site_packages = Step {
        place: "Python's site-packages",
        if_empty: "no CUDA wheel with ptxas is installed, or there is no python3",
        list: Box::new(|| Ok(existing(&env.site_packages(), &IN_WHEEL))),
    };
    let cache = Step {
        place: CACHE,
        if_empty: "it holds no nvidia-cuda-nvcc wheel",
        list: Box::new(|| {
            let wheels = cached_wheels(env, "nvidia-cuda-nvcc");
            wheels.map(|found| existing(&found.1, &IN_WHEEL)).map_err(|error| error.to_string())
        }),
    };
    let system = Step {
        place: "the system",
        if_empty: "there is no /usr/local/cuda/bin/ptxas",
        list: Box::new(|| Ok(existing(&env.prefixes, &["cuda/bin/ptxas"]))),
    };
    [named, variable("CUDA_HOME", "bin/ptxas"), path, site_packages, cache, system]
}

/// Returns the existing files of `names` in `folders`.
fn existing(folders: &[PathBuf], names: &[&str]) -> Vec<PathBuf> {
    let all = folders.iter().flat_map(|folder| names.iter().map(|name| folder.join(name)));
    all.filter(|path| path.is_file()).collect()
}

fn check(env: &Env, path: &Path, oldest: (u32, u32)) -> Result<(), String> {
    if !path.is_file() {
        return Err("there is no such file".to_owned());
    }
    let text = (env.version_of)(path)?;
    let (major, minor) = release(&text).ok_or("its --version output names no release")?;
    if (major, minor) < oldest {
        let (least_major, least_minor) = oldest;
        return Err(format!(
            "it is from CUDA {major}.{minor}, needed is {least_major}.{least_minor} or newer"
        ));
    }
    Ok(())
}

/// Returns the release in `Cuda compilation tools, release 13.0, V13.0.88`.
fn release(text: &str) -> Option<(u32, u32)> {
    let (_, rest) = text.split_once("release ")?;
    let (major, rest) = rest.split_once('.')?;
    let minor: String = rest.chars().take_while(char::is_ascii_digit).collect();
    Some((major.parse().ok()?, minor.parse().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wheel::record;
    use std::ffi::OsString;
    use std::fs;

    fn find_ptxas_in(env: &Env) -> Result<PathBuf, NotFound> {
        super::find_ptxas_in(env, PTXAS_MIN)
    }

    fn env(root: &Path, vars: &[(&'static str, PathBuf)]) -> Env {
        let vars: Vec<(&str, OsString)> =
            vars.iter().map(|(k, v)| (*k, v.clone().into())).collect();
        let site = root.join("site");
        Env {
            var: Box::new(move |name| Some(vars.iter().find(|(key, _)| *key == name)?.1.clone())),
            python_path: Box::new(move || vec![site.clone()]),
            ldconfig: Box::new(String::new),
            prefixes: vec![root.join("usr/local")],
            // A fake ptxas is a text file that holds its `--version` output.
            version_of: Box::new(|path| {
                fs::read_to_string(path).map_err(|error| error.to_string())
            }),
            ..Env::empty()
        }
    }

    fn put(path: PathBuf, release: &str) -> PathBuf {
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(&path, format!("Cuda compilation tools, release {release}, V{release}.1\n"))
            .unwrap();
        if path.components().any(|component| component.as_os_str() == "wheels") {
            record(path.ancestors().nth(4).unwrap());
        }
        path
    }

    #[test]
    fn the_order_of_the_search_is_as_documented() {
        let tree = tempfile::tempdir().unwrap();
        let root = tree.path();
        let vars = [
            ("DEVCOMM_PTXAS", root.join("mine/ptxas")),
            ("CUDA_HOME", root.join("home")),
            ("PATH", root.join("path")),
            ("DEVCOMM_CACHE", root.join("cache")),
        ];
        let places = [
            put(root.join("mine/ptxas"), "13.0"),
            put(root.join("home/bin/ptxas"), "13.0"),
            put(root.join("path/ptxas"), "13.0"),
            put(root.join("site/nvidia/cu13/bin/ptxas"), "13.0"),
            put(root.join("cache/wheels/nvidia-cuda-nvcc-13.5.37/nvidia/cu13/bin/ptxas"), "13.5"),
            put(root.join("usr/local/cuda/bin/ptxas"), "13.0"),
        ];
        for place in places {
            assert_eq!(find_ptxas_in(&env(root, &vars)).unwrap(), place);
            fs::remove_file(place).unwrap();
        }
        let text = find_ptxas_in(&env(root, &vars)).unwrap_err().to_string();
        for place in [
            "mine/ptxas",
            "home/bin/ptxas",
            "PATH",
            "site-packages",
            "cache",
            "the system",
            "cargo xtask setup",
        ] {
            assert!(text.contains(place), "{place} is not in: {text}");
        }
    }

    #[test]
    fn a_cached_ptxas_that_was_cut_is_not_run() {
        let tree = tempfile::tempdir().unwrap();
        let root = tree.path();
        let path = "cache/wheels/nvidia-cuda-nvcc-13.5.37/nvidia/cu13/bin/ptxas";
        let cached = put(root.join(path), "13.5");
        let vars = [("DEVCOMM_CACHE", root.join("cache"))];
        assert_eq!(find_ptxas_in(&env(root, &vars)).unwrap(), cached);
        let contents = fs::read_to_string(&cached).unwrap();
        fs::write(&cached, &contents[..contents.len() - 1]).unwrap();
        let text = find_ptxas_in(&env(root, &vars)).unwrap_err().to_string();
        assert!(text.contains("bytes: it was cut or changed"), "{text}");
    }

    #[test]
    fn a_ptxas_that_is_too_old_is_skipped_with_both_versions() {
        let tree = tempfile::tempdir().unwrap();
        let root = tree.path();
        put(root.join("path/ptxas"), "12.4");
        let vars = [("PATH", root.join("path")), ("DEVCOMM_CACHE", root.join("cache"))];
        let text = find_ptxas_in(&env(root, &vars)).unwrap_err().to_string();
        assert!(text.contains("CUDA 12.4, needed is 12.8"), "{text}");
        let newer = put(root.join("usr/local/cuda/bin/ptxas"), "12.8");
        assert_eq!(find_ptxas_in(&env(root, &vars)).unwrap(), newer);
        let text = super::find_ptxas_in(&env(root, &vars), (12, 9)).unwrap_err().to_string();
        assert!(text.contains("CUDA 12.8, needed is 12.9"), "{text}");
    }
}
