//! Checks the layers of crates: no layer uses one above it.

use std::fs;
use std::path::{Path, PathBuf};

/// Sources with their layers, from the bottom up: each is a folder.
const CRATES: [(&str, &[&str]); 3] = [
    ("bench/src", &["base", "contenders", "harness", "report", "cases"]),
    ("host/src", &["error", "machine", "sys", "device", "communicator", "world"]),
    ("crates/sim/src", &["base", "race", "memory", "gpu", "machine"]),
];

fn sources(folder: &Path, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            sources(&path, found);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            found.push(path);
        }
    }
}

/// Returns the line numbers of the paths from the root of the crate in the code of a file, without
/// comments, and the name after the root in each. Such a path begins with `crate`, or with as many
/// `super` as its module is deep; `depth` is that of the file's module.
fn uses(source: &str, depth: usize) -> Vec<(usize, &str)> {
    let mut found = Vec::new();
    // The indentations of the modules within the file around the line.
    let mut inner = Vec::new();
    for (index, line) in source.lines().enumerate() {
        let code = line.trim_start();
        let indentation = line.len() - code.len();
        if code.starts_with("//") {
            continue;
        }
        inner.pop_if(|module| code == "}" && *module == indentation);
        for root in ["crate::", &"super::".repeat(depth + inner.len())] {
            found.extend(line.match_indices(root).map(|(at, _)| {
                let rest = &line[at + root.len()..];
                let end = rest.find(|c: char| !c.is_alphanumeric() && c != '_');
                (index + 1, &rest[..end.unwrap_or(rest.len())])
            }));
        }
        if code.ends_with('{') && code.split(' ').any(|word| word == "mod") {
            inner.push(indentation);
        }
    }
    found
}

#[test]
fn paths_from_the_root_are_found() {
    let source = "use crate::sys::a;\n// crate::b\nuse super::super::world::{c, d};\n\
        use super::e;\nmod inner {\n    use super::super::f;\n    \
        use super::super::super::device::g;\n}\n\
        fn h() { super::super::machine::i(super::j, crate::error::k) }";
    let from_root = [(1, "sys"), (3, "world"), (7, "device"), (9, "error"), (9, "machine")];
    assert_eq!(uses(source, 2), from_root);
}

#[test]
fn no_layer_uses_one_above_it() {
    for (folder, layers) in CRATES {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join(folder);
        let rank = |name: &str| layers.iter().position(|layer| *layer == name);
        let mut n_uses = 0;
        for layer in layers {
            let mut files = Vec::new();
            sources(&root.join(layer), &mut files);
            let is_test =
                |file: &Path| file.strip_prefix(&root).unwrap().to_string_lossy().contains("test");
            for file in files.into_iter().filter(|file| !is_test(file)) {
                let source = fs::read_to_string(&file).unwrap();
                let path = file.strip_prefix(&root).unwrap();
                let depth = path.components().count() - usize::from(path.ends_with("mod.rs"));
                for (line, used) in uses(&source, depth) {
                    let place = format!("{}:{line}: {used}", file.display());
                    let used_layer = rank(used);
                    // A name that the crate root re-exports would hide its layer.
                    assert!(used_layer.is_some(), "{place} names no layer");
                    assert!(used_layer <= rank(layer), "{place} is used by {layer}, a lower layer");
                    n_uses += 1;
                }
            }
        }
        // The search still finds how the sources write a use.
        assert!(n_uses > 100, "only {n_uses} uses were found in {folder}");
        let mut top: Vec<_> = fs::read_dir(&root).unwrap().map(|entry| entry.unwrap()).collect();
        top.retain(|entry| rank(&entry.file_name().to_string_lossy()).is_none());
        let rest: Vec<_> = top.iter().map(fs::DirEntry::file_name).collect();
        let root = rest == ["lib.rs"] || rest == ["main.rs"];
        assert!(root, "entries of {folder} in no layer: {rest:?}");
    }
}
