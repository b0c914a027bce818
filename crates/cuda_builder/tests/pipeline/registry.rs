//! Kernel packages from a registry.

use cuda_builder::CudaBuilder;
use libtest_mimic::Trial;

use crate::support::Needs::RustSource;
use crate::support::{Package, TestResult, body, ensure, target, test};

pub fn tests() -> Vec<Trial> {
    vec![test(
        "a_dependency_from_the_registry_is_built_as_the_lock_file_has_it",
        &[RustSource],
        dependency,
    )]
}

/// The dependency names no path. A patch in the manifest stands for the registry, so that no
/// network is needed.
fn dependency() -> TestResult {
    let source = "
#[unsafe(no_mangle)]
pub unsafe extern \"ptx-kernel\" fn store(to: *mut u32) {
    unsafe { *to = 7 }
}
";
    let kernels = Package::new("registry_kernels", source);
    let program =
        Package { name: "registry-program".to_owned(), folder: kernels.folder.join("program") };
    program.write("src/lib.rs", "");
    let manifest = format!(
        "[package]\nname = {:?}\nversion = \"0.0.0\"\nedition = \"2024\"\n\n[dependencies]\n{} = \
         \"=0.0.0\"\n\n[workspace]\n\n[patch.crates-io]\n{} = {{ path = {:?} }}\n",
        program.name, kernels.name, kernels.name, kernels.folder
    );
    program.write("Cargo.toml", &manifest);
    let builder = |package: &str| {
        let builder = CudaBuilder::new(package).manifest_dir(&program.folder).target_dir(target());
        builder.out_dir(program.folder.join("out"))
    };
    let artifacts = builder(&kernels.name).build()?;
    ensure(body(&artifacts, "store").contains("st.global"), "the kernel stores nothing")?;
    // It was built in the program's workspace.
    ensure(program.folder.join("Cargo.lock").is_file(), "the program's lock file was not used")?;
    ensure(
        !kernels.folder.join("Cargo.lock").is_file(),
        "the kernels have a lock file of their own",
    )?;
    let error = builder("registry-nothing").build().unwrap_err().to_string();
    ensure(error.contains("no package `registry-nothing`"), error)
}
