//! Checks that no files of this crate use each other in a circle.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

/// Adds a folder's modules to `found`: their paths, as `["cases", "gemm"]`, and code without tests.
fn modules(folder: &Path, path: &[String], found: &mut BTreeMap<Vec<String>, String>) {
    for entry in fs::read_dir(folder).unwrap() {
        let entry: PathBuf = entry.unwrap().path();
        let name = entry.file_stem().unwrap().to_str().unwrap().to_owned();
        let inner = [path, std::slice::from_ref(&name)].concat();
        if entry.is_dir() {
            modules(&entry, &inner, found);
        } else {
            let code = fs::read_to_string(&entry).unwrap();
            let code = code.split("#[cfg(test)]").next().unwrap().to_owned();
            found.insert(if name == "mod" { path.to_vec() } else { inner }, code);
        }
    }
}

/// Returns the paths after `crate::` and `super::` in a module's code, without comments, and in a
/// `mod.rs` those that it re-exports.
fn uses(module: &[String], code: &str, children: &[&String]) -> Vec<Vec<String>> {
    let lines = code.lines().map(str::trim).filter(|line| !line.starts_with("//"));
    let words = |path: &str| {
        let end = path.find(|c: char| !c.is_alphanumeric() && !"_:".contains(c));
        let path = &path[..end.unwrap_or(path.len())];
        path.split("::").map(str::to_owned).collect::<Vec<_>>()
    };
    let mut found = Vec::new();
    for line in lines {
        found.extend(line.split("crate::").skip(1).map(words));
        let parent = &module[..module.len().saturating_sub(1)];
        let absolute = line.split("super::").skip(1).map(|path| [parent, &words(path)].concat());
        found.extend(absolute);
        let own = line.trim_start_matches("pub ").strip_prefix("use ").map(words);
        let own = own.map(|path| path.into_iter().skip_while(|word| word == "self").collect());
        let own = own.filter(|path: &Vec<_>| path.first().is_some_and(|f| children.contains(&f)));
        found.extend(own.map(|path| [module, &path].concat()));
    }
    found
}

/// Returns the modules that each one uses.
fn graph() -> BTreeMap<Vec<String>, BTreeSet<Vec<String>>> {
    let mut sources = BTreeMap::new();
    modules(&Path::new(env!("CARGO_MANIFEST_DIR")).join("src"), &[], &mut sources);
    let edges = sources.iter().map(|(module, code)| {
        let is_child =
            |other: &&Vec<String>| other.len() == module.len() + 1 && other.starts_with(module);
        let children: Vec<_> = sources.keys().filter(is_child).filter_map(|c| c.last()).collect();
        let longest = |path: Vec<String>| {
            let prefixes = (1..=path.len()).rev().map(|n| path[..n].to_vec());
            prefixes.into_iter().find(|prefix| sources.contains_key(prefix))
        };
        let used = uses(module, code, &children).into_iter().filter_map(longest);
        (module.clone(), used.filter(|used| used != module).collect())
    });
    edges.collect()
}

#[test]
fn no_files_use_each_other_in_a_circle() {
    let mut left = graph();
    // The search still finds how the sources write a use.
    let n_uses: usize = left.values().map(BTreeSet::len).sum();
    assert!(n_uses > 100, "only {n_uses} uses were found");
    // A module that uses none of those that are left is in no circle.
    loop {
        let is_left = |module: &Vec<String>| left.contains_key(module);
        let done = |used: &BTreeSet<_>| !used.iter().any(is_left);
        let free: Vec<_> =
            left.iter().filter(|(_, used)| done(used)).map(|(m, _)| m.clone()).collect();
        if free.is_empty() {
            break;
        }
        free.iter().for_each(|module| _ = left.remove(module));
    }
    let circle: Vec<_> = left.keys().map(|module| module.join("::")).collect();
    assert!(circle.is_empty(), "these use each other: {circle:?}");
}
