//! `core` for the GPU: compiled once a toolchain and set of flags, and kept for all workspaces of
//! this machine. rustc takes it as the sysroot of the kernels, as it takes `std` for the host.
//!
//! It serves all architectures: what is linked is compiled for the one that the link names.

use std::fs;
use std::path::{Path, PathBuf};

use devcomm_locate::cache_dir;

use crate::arch::NvvmArch;
use crate::artifact;
use crate::cache::{Cache, Entry};
use crate::compile::{Compile, TARGET};
use crate::error::Error;

/// Part of the cache key: change it when the same toolchain and flags give another sysroot.
const REVISION: u32 = 1;

/// The oldest architecture.
const ARCH: NvvmArch = NvvmArch::ALL[0];

/// A package that needs nothing but `core`.
const MANIFEST: &str =
    "[package]\nname = \"core-for-gpu\"\nversion = \"0.0.0\"\nedition = \"2024\"\n\n[workspace]\n";

/// A sysroot for the GPU.
#[derive(Debug)]
pub(crate) struct Sysroot {
    pub(crate) folder: PathBuf,
    /// The bitcode of its crates.
    pub(crate) bitcode: Vec<PathBuf>,
}

/// The sysroot for a compilation, made unless one is kept.
pub(crate) fn sysroot(compile: &Compile<'_>) -> Result<Sysroot, Error> {
    let shared = cache_dir().join("core");
    // A machine without a home keeps it in the target folder.
    let folder = match fs::create_dir_all(&shared) {
        Ok(()) => shared,
        Err(_) => compile.target_dir.join("core"),
    };
    let cache = Cache { folder };
    let key = key(compile);
    let (entry, names) = cache.find_or_make::<Vec<String>>(&key, |entry| make(compile, entry))?;
    cache.remove_unused();
    let bitcode = names.iter().map(|name| libraries(&entry.folder).join(name)).collect();
    Ok(Sysroot { folder: entry.folder, bitcode })
}

fn libraries(sysroot: &Path) -> PathBuf {
    sysroot.join("lib/rustlib").join(TARGET).join("lib")
}

/// The hash of everything that a sysroot is made of.
fn key(compile: &Compile<'_>) -> String {
    let toolchain = compile.toolchain;
    // Two builds of a development version have one version.
    let made_of = serde_json::json!([
        REVISION,
        toolchain.version,
        toolchain.libllvm,
        compile.debug,
        compile.rustflags(ARCH),
    ]);
    artifact::sha256(made_of.to_string().as_bytes())[..16].to_owned()
}

/// Compiles `core` and what belongs to it, and returns the names of the bitcode.
fn make(compile: &Compile<'_>, entry: &Entry) -> Result<Vec<String>, Error> {
    let package = entry.folder.join("build");
    let source = package.join("src/lib.rs");
    let manifest = package.join("Cargo.toml");
    fs::create_dir_all(package.join("src")).map_err(Error::io("create", &package))?;
    fs::write(&source, "#![no_std]\n").map_err(Error::io("write", &source))?;
    fs::write(&manifest, MANIFEST).map_err(Error::io("write", &manifest))?;

    let target = package.join("target");
    let mut command = compile.command("core-for-gpu", &manifest, &target, &compile.rustflags(ARCH));
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
