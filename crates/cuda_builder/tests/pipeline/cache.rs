//! What a change of one kernel file costs.

use std::fs;
use std::time::{SystemTime, UNIX_EPOCH};

use libtest_mimic::Trial;

use crate::support::Needs::{Nccl, RustSource};
use crate::support::{Outcome, Package, ensure, target, test};

pub fn tests() -> Vec<Trial> {
    vec![test("a_change_of_one_kernel_file_links_one_module", &[RustSource, Nccl], one_module)]
}

fn one_module() -> Outcome {
    let package = Package::fixture("one_module");
    package.builder().build()?;
    let cores = core_bitcode();

    let again = package.builder().build()?;
    let linked = |artifacts: &cuda_builder::Artifacts| -> Vec<String> {
        artifacts.modules.iter().filter(|m| m.linked).map(|m| m.file.clone()).collect()
    };
    ensure(linked(&again).is_empty(), format!("no change links {:?}", linked(&again)))?;

    // A number that no earlier run has used, so that the cache cannot know the result.
    let number = SystemTime::now().duration_since(UNIX_EPOCH)?.as_nanos();
    let old = fs::read_to_string(package.folder.join("src/shared.rs"))?;
    let new =
        old.replace("*slot.add(255 - i)", &format!("*slot.add(255 - i) + {number}_f64 as f32"));
    ensure(old != new, "the fixture has no line to change")?;
    package.write("src/shared.rs", &new);
    let changed = package.builder().build()?;
    ensure(linked(&changed) == ["shared"], format!("one change links {:?}", linked(&changed)))?;
    ensure(core_bitcode() == cores, "core was compiled again")
}

/// The bitcode of `core` in the target folder, with the times of its files.
fn core_bitcode() -> Vec<(String, SystemTime)> {
    let folder = target().join("nvptx64-nvidia-cuda/release/deps");
    let mut found: Vec<(String, SystemTime)> = fs::read_dir(folder)
        .unwrap()
        .filter_map(|entry| {
            let entry = entry.ok()?;
            let name = entry.file_name().into_string().ok()?;
            let is_core = name.starts_with("core-") && name.ends_with(".bc");
            Some((name, entry.metadata().ok()?.modified().ok()?)).filter(|_| is_core)
        })
        .collect();
    found.sort();
    found
}
