//! Caching: `core`, and modules that a change does not affect.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use libtest_mimic::Trial;

use crate::support::Needs::{Nccl, Ptxas, RustSource};
use crate::support::{Package, TestResult, ensure, script, stderr, stdout, test};

pub fn tests() -> Vec<Trial> {
    vec![
        test("a_change_of_one_kernel_file_links_one_module", &[RustSource, Nccl], one_module),
        test(
            "a_truncated_module_in_the_cache_is_linked_again",
            &[RustSource, Ptxas],
            truncated_module,
        ),
        test("core_is_compiled_once_for_all_workspaces", &[RustSource], one_core),
        test("a_truncated_core_in_the_cache_is_compiled_again", &[RustSource], truncated_core),
        test("a_relative_path_of_the_cache_is_an_error", &[RustSource], relative_cache),
        test("profiles_of_packages_do_not_reach_kernels", &[RustSource], profiles),
        test("every_file_that_the_kernels_are_made_of_is_watched", &[RustSource], watched),
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

fn truncated_module() -> TestResult {
    let source =
        "#[unsafe(no_mangle)] pub unsafe extern \"ptx-kernel\" fn cut_module(p: *mut u32) {
            unsafe { *p = 1 }
        }";
    let package = Package::new("cut_module", source);
    let target = package.folder.join("target-of-kernels");
    let build = || package.builder().target_dir(&target).build();
    let first = build()?;
    let ptx = fs::read(&first.modules[0].ptx)?;
    let files = [
        ("module.ptx", ptx.len() / 2),
        ("module.ptx.z", 0),
        ("module.cubin", 0),
        ("module.cubin.z", 0),
    ];
    for (name, kept) in files {
        for entry in fs::read_dir(target.join("modules"))? {
            let file = entry?.path().join(name);
            fs::write(&file, &fs::read(&file)?[..kept])?;
        }
        let again = build()?;
        ensure(again.modules[0].linked, format!("a truncated {name} is not noticed"))?;
        ensure(fs::read(&again.modules[0].ptx)? == ptx, "another module was linked")?;
        ensure(!build()?.modules[0].linked, "a whole module is linked again")?;
    }
    Ok(())
}

fn profiles() -> TestResult {
    let source = "#[unsafe(no_mangle)] pub unsafe extern \"ptx-kernel\" fn profiles(p: *mut u32) {
            let add = |sum: u32, i: usize| sum + unsafe { *p.add(i) };
            unsafe { *p = (1..9).fold(0, add) }
        }";
    let package = Package::new("profiles", source);
    let ptx = || -> Result<String, libtest_mimic::Failed> {
        let artifacts = package.builder().build()?;
        let text = fs::read_to_string(&artifacts.modules[0].ptx)?;
        // Names of functions, which have the crate's hash, may follow the code.
        let code = text.split_once("\n}\n").map(|(code, _)| code.to_owned());
        Ok(code.ok_or("the PTX has no kernel")?)
    };
    let plain = ptx()?;
    package.add_to_manifest(
        "[profile.release.package.profiles]\nopt-level = 0\ndebug = \"full\"\n\
         debug-assertions = true\noverflow-checks = true\n",
    );
    let profiled = ptx()?;
    ensure(plain == profiled, format!("{plain}\nwith a profile:\n{profiled}"))
}

fn watched() -> TestResult {
    let source = "#[path = \"../other/by path.rs\"] mod by_path;
        const TEXT: &str = concat!(
            include_str!(\"../other/number\"), include_str!(\"../../watched of all\")
        );
        #[unsafe(no_mangle)] pub unsafe extern \"ptx-kernel\" fn watched(p: *mut u32) {
            unsafe { *p = by_path::NUMBER + TEXT.len() as u32 }
        }";
    let package = Package::new("watched", source);
    package.write("other/by path.rs", "pub const NUMBER: u32 = 1;\n");
    package.write("other/number", "2");
    package.write("../watched of all", "3");
    package.write("root.rs", &package.source().replace("\"../", "\"src/../"));
    package.add_to_manifest("[lib]\npath = \"root.rs\"\n");
    let output = package.as_build_script(|_| {});
    ensure(output.status.success(), stderr(&output))?;
    let lines = stdout(&output);
    for file in ["src", "root.rs", "other/by path.rs", "other/number", "Cargo.toml"] {
        let line = format!("cargo::rerun-if-changed={}", package.folder.join(file).display());
        ensure(lines.lines().any(|one| one == line), format!("no `{line}` in {lines}"))?;
    }
    let outside = lines.lines().any(|line| line.ends_with("/watched of all"));
    ensure(outside, format!("no file outside of the package in {lines}"))?;
    Ok(())
}

/// The second of two workspaces builds with a rustc that refuses to compile `core`.
fn one_core() -> TestResult {
    let build = |name: &str, rustc: Option<&Path>| {
        let source = format!("#[unsafe(no_mangle)] pub extern \"ptx-kernel\" fn {name}() {{}}");
        let package = Package::new(name, &source);
        let output = package.as_build_script(|command| {
            rustc.map(|rustc| command.env("RUSTC", rustc));
        });
        ensure(output.status.success(), stderr(&output))?;
        ensure(package.index().contains(name), package.index())
    };
    build("one_core_first", None)?;
    let rustc = Package::new("one_core", "").folder.join("rustc");
    let refuse = "case \" $* \" in *' --crate-name core '*) exit 1;; esac";
    script(&rustc, &format!("#!/bin/sh\n{refuse}\nexec rustc \"$@\"\n"));
    build("one_core_second", Some(&rustc))
}

fn relative_cache() -> TestResult {
    let source = "#[unsafe(no_mangle)] pub extern \"ptx-kernel\" fn relative_cache() {}";
    let package = Package::new("relative_cache", source);
    let output = package.as_build_script(|command| {
        command.env("DEVCOMM_CACHE", "cache");
    });
    ensure(!output.status.success(), stdout(&output))?;
    ensure(stderr(&output).contains("DEVCOMM_CACHE=cache is a relative path"), stderr(&output))
}

fn truncated_core() -> TestResult {
    let source = "#[unsafe(no_mangle)] pub extern \"ptx-kernel\" fn truncated_core() {}";
    let package = Package::new("truncated_core", source);
    let cache = package.folder.join("cache");
    // An earlier run's, which may be by another toolchain.
    let _ = fs::remove_dir_all(&cache);
    let build = || {
        let output = package.as_build_script(|command| {
            command.env("DEVCOMM_CACHE", &cache);
        });
        ensure(output.status.success(), stderr(&output))
    };
    let library = || -> Result<PathBuf, libtest_mimic::Failed> {
        let mut core =
            fs::read_dir(cache.join("core"))?.filter_map(|entry| Some(entry.ok()?.path()));
        let entry = core.find(|path| path.is_dir()).ok_or("the cache has no core")?;
        let libraries = fs::read_dir(entry.join("lib/rustlib/nvptx64-nvidia-cuda/lib"))?;
        let mut paths = libraries.filter_map(|file| Some(file.ok()?.path()));
        let is_core = |path: &PathBuf| {
            let name = path.file_name().map(|name| name.to_string_lossy().into_owned());
            name.is_some_and(|name| name.starts_with("libcore-") && name.ends_with(".rlib"))
        };
        Ok(paths.find(is_core).ok_or("the cache has no libcore")?)
    };
    build()?;
    let (path, whole) = (library()?, fs::read(library()?)?.len());
    fs::File::options().write(true).open(&path)?.set_len(whole as u64 / 2)?;
    package.write("src/lib.rs", &package.source().replace("truncated_core", "whole_core"));
    build()?;
    let again = fs::metadata(library()?)?.len();
    ensure(again as usize == whole, format!("libcore has {again} bytes, not {whole}"))
}
