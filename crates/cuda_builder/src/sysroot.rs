//! Compiles `core` for the GPU, once per toolchain, architecture and set of flags, into a cache for
//! all workspaces. rustc uses it as the kernels' sysroot.
//!
//! rustc 1.99 refuses crates that were compiled with different values of `-Ctarget-cpu`.

use std::fs;
use std::path::{Path, PathBuf};

use devcomm_locate::cache_dir_if_safe;

use crate::arch::TARGET;
use crate::artifact;
use crate::cache::{Cache, Entry};
use crate::compile::{Compile, Sysroot};
use crate::error::Error;

/// Part of the cache key: change it when equal toolchain and flags give another sysroot.
const REVISION: u32 = 2;

/// A package that depends only on `core`.
const MANIFEST: &str =
    "[package]\nname = \"core-for-gpu\"\nversion = \"0.0.0\"\nedition = \"2024\"\n\n[workspace]\n";

/// Returns the sysroot for a compilation, cached or new.
pub(crate) fn sysroot(compile: &Compile<'_>) -> Result<Sysroot, Error> {
    let key = key(compile);
    // Files are compared by size only, as they have 50 MB.
    let at = |folder| Cache { folder, hashes: false };
    let shared = cache_dir_if_safe()?.map(|cache| at(cache.join("core")));
    // If the shared cache cannot be written, the sysroot is in the target folder.
    let cache = shared
        .filter(|shared| shared.find::<Vec<String>>(&key).is_some() || shared.is_writable())
        .unwrap_or_else(|| at(compile.target_dir.join("core")));
    let (entry, names) = cache.find_or_make::<Vec<String>>(&key, |entry| make(compile, entry))?;
    cache.remove_unused();
    let bitcode = names.iter().map(|name| libraries(&entry.folder).join(name)).collect();
    Ok(Sysroot { folder: entry.folder, bitcode })
}

fn libraries(sysroot: &Path) -> PathBuf {
    sysroot.join("lib/rustlib").join(TARGET).join("lib")
}

/// Returns the hash of all inputs of a sysroot.
fn key(compile: &Compile<'_>) -> String {
    let toolchain = compile.toolchain;
    // Different builds of a development compiler may have the same version.
    let inputs = serde_json::json!([
        REVISION,
        toolchain.version,
        toolchain.libllvm,
        compile.panics as u8,
        compile.rustflags(),
    ]);
    artifact::sha256(inputs.to_string().as_bytes())[..16].to_owned()
}

/// Compiles `core` and its dependencies; returns the names of the bitcode files.
fn make(compile: &Compile<'_>, entry: &Entry) -> Result<Vec<String>, Error> {
    let package = entry.folder.join("build");
    let source = package.join("src/lib.rs");
    let manifest = package.join("Cargo.toml");
    fs::create_dir_all(package.join("src")).map_err(Error::io("create", &package))?;
    fs::write(&source, "#![no_std]\n").map_err(Error::io("write", &source))?;
    fs::write(&manifest, MANIFEST).map_err(Error::io("write", &manifest))?;

    let target = package.join("target");
    let mut command = compile.command("core-for-gpu", &manifest, &target, &compile.rustflags());
    command.arg("-Zbuild-std=core");
    let made = compile.compiled(command)?;
    let target = libraries(&entry.folder);
    fs::create_dir_all(&target).map_err(Error::io("create", &target))?;
    let mut names = Vec::new();
    for artifact in made.iter().filter(|artifact| !artifact.source.starts_with(&package)) {
        for file in [&artifact.library, &artifact.bitcode] {
            let copy = target.join(file.file_name().unwrap_or_default());
            fs::rename(file, &copy).map_err(Error::io("move", file))?;
        }
        names.extend(artifact.bitcode.file_name().map(|name| name.to_string_lossy().into_owned()));
    }
    fs::remove_dir_all(&package).map_err(Error::io("remove", &package))?;
    Ok(names)
}
