//! Caching: `core`, and modules that a change does not affect.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use libtest_mimic::{Failed, Trial};

use crate::support::Needs::{Nccl, RustSource};
use crate::support::{Package, TestResult, ensure, stderr, test};

pub fn tests() -> Vec<Trial> {
    vec![
        test("a_change_of_one_kernel_file_links_one_module", &[RustSource, Nccl], one_module),
        test("core_is_compiled_once_for_all_workspaces", &[RustSource], one_core),
    ]
}

fn one_module() -> TestResult {
    let package = Package::fixture("one_module");
    package.builder().build()?;

    let again = package.builder().build()?;
    let linked = |artifacts: &cuda_builder::Artifacts| -> Vec<String> {
        artifacts.modules.iter().filter(|m| m.linked).map(|m| m.file.clone()).collect()
    };
    ensure(linked(&again).is_empty(), format!("no change links {:?}", linked(&again)))?;

    // A number that no earlier run has used, so that the cache has no entry.
    let number = SystemTime::now().duration_since(UNIX_EPOCH)?.as_nanos();
    let old = fs::read_to_string(package.folder.join("src/shared.rs"))?;
    let new =
        old.replace("*slot.add(255 - i)", &format!("*slot.add(255 - i) + {number}_f64 as f32"));
    ensure(old != new, "the fixture has no line to change")?;
    package.write("src/shared.rs", &new);
    let changed = package.builder().build()?;
    ensure(linked(&changed) == ["shared"], format!("one change links {:?}", linked(&changed)))
}

/// A package of another workspace reuses the first one's `core`.
fn one_core() -> TestResult {
    let source =
        |name: &str| format!("#[unsafe(no_mangle)] pub extern \"ptx-kernel\" fn {name}() {{}}");
    let cache = Package::new("one_core", "").folder.join("cache");
    let build = |name: &str| -> Result<Vec<(PathBuf, SystemTime)>, Failed> {
        let package = Package::new(name, &source(name));
        let output = package.as_build_script(|command| {
            command.env("DEVCOMM_CACHE", &cache);
        });
        ensure(output.status.success(), stderr(&output))?;
        ensure(package.index().contains(name), package.index())?;
        bitcode_of_core(&cache)
    };
    let (first, second) = (build("one_core_first")?, build("one_core_second")?);
    ensure(first.len() == 1, format!("{first:?}"))?;
    ensure(first == second, "core was compiled again")
}

/// The bitcode files of `core` in a cache, with their times.
fn bitcode_of_core(cache: &Path) -> Result<Vec<(PathBuf, SystemTime)>, Failed> {
    let mut found = Vec::new();
    for sysroot in fs::read_dir(cache.join("core"))? {
        let folder = sysroot?.path().join("lib/rustlib/nvptx64-nvidia-cuda/lib");
        for entry in fs::read_dir(folder)? {
            let path = entry?.path();
            let name = path.file_name().unwrap_or_default().to_string_lossy();
            if name.starts_with("core-") && name.ends_with(".bc") {
                found.push((path.clone(), fs::metadata(&path)?.modified()?));
            }
        }
    }
    Ok(found)
}
