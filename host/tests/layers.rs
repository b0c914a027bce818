//! Checks the layers of this crate: no layer uses one above it.

use std::fs;
use std::path::{Path, PathBuf};

/// The layers, from the bottom up: each is a folder of `src`.
const LAYERS: [&str; 6] = ["error", "machine", "sys", "device", "communicator", "world"];

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

/// Returns the line numbers and names after `crate::` in the code of a file, without comments.
fn uses(source: &str) -> impl Iterator<Item = (usize, &str)> {
    let code = source.lines().enumerate().filter(|(_, line)| !line.trim_start().starts_with("//"));
    code.flat_map(|(index, line)| {
        line.split("crate::").skip(1).map(move |rest| {
            let end = rest.find(|c: char| !c.is_alphanumeric() && c != '_').unwrap_or(rest.len());
            (index + 1, &rest[..end])
        })
    })
}

#[test]
fn no_layer_uses_one_above_it() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let rank = |name: &str| LAYERS.iter().position(|layer| *layer == name);
    let mut n_uses = 0;
    for layer in LAYERS {
        let mut files = Vec::new();
        sources(&root.join(layer), &mut files);
        let is_test =
            |file: &Path| file.strip_prefix(&root).unwrap().to_string_lossy().contains("test");
        for file in files.into_iter().filter(|file| !is_test(file)) {
            let source = fs::read_to_string(&file).unwrap();
            for (line, used) in uses(&source) {
                let place = format!("{}:{line}: crate::{used}", file.display());
                let used_layer = rank(used);
                // A name that the crate root re-exports would hide its layer.
                assert!(used_layer.is_some(), "{place} names no layer");
                assert!(used_layer <= rank(layer), "{place} is used by {layer}, a lower layer");
                n_uses += 1;
            }
        }
    }
    // The search still finds how the sources write a use.
    assert!(n_uses > 100, "only {n_uses} uses were found");
    let mut top: Vec<_> = fs::read_dir(&root).unwrap().map(|entry| entry.unwrap()).collect();
    top.retain(|entry| rank(&entry.file_name().to_string_lossy()).is_none());
    let rest: Vec<_> = top.iter().map(fs::DirEntry::file_name).collect();
    assert_eq!(rest, ["lib.rs"], "entries of `src` in no layer");
}
