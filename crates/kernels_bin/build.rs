//! Checks the folder `data`, and passes what is wrong with it to the library.

use std::path::Path;

#[allow(dead_code, reason = "`cargo xtask kernels-bin` writes the stamp")]
mod stamp;

fn main() {
    println!("cargo::rustc-check-cfg=cfg(devcomm_has_kernels)");
    // Cargo runs build scripts in the folder of their package.
    let package = Path::new(".");
    // The whole package: for a folder `data` that is missing cargo would run this in every build.
    println!("cargo::rerun-if-changed=.");
    for folder in stamp::sources(package) {
        println!("cargo::rerun-if-changed={}", folder.display());
    }
    match stamp::check(package) {
        Ok(()) => println!("cargo::rustc-cfg=devcomm_has_kernels"),
        Err(problem) => println!("cargo::rustc-env=DEVCOMM_KERNELS_PROBLEM={problem}"),
    }
}
