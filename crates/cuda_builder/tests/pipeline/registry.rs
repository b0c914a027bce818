//! Kernel packages that a program depends on: from a registry, and with features.

use cuda_builder::CudaBuilder;
use libtest_mimic::Trial;

use crate::support::Needs::RustSource;
use crate::support::{Package, TestResult, body, ensure, stderr, target, test};

pub fn tests() -> Vec<Trial> {
    vec![
        test(
            "a_dependency_from_the_registry_is_built_as_the_lock_file_has_it",
            &[RustSource],
            dependency,
        ),
        test("kernels_have_the_features_that_the_program_enables", &[RustSource], features),
    ]
}

/// The kernel stores the sum of a number for each feature that is on.
fn features() -> TestResult {
    let source = "
#[unsafe(no_mangle)]
pub unsafe extern \"ptx-kernel\" fn sum_of_features(to: *mut u32) {
    let on = [cfg!(feature = \"unasked\"), cfg!(feature = \"named\"), cfg!(feature = \"by-own\")];
    unsafe { *to = 1000 + on[0] as u32 + on[1] as u32 * 10 + on[2] as u32 * 100 }
}
";
    let kernels = Package::new("with_features", source);
    kernels.add_to_manifest(
        "[features]\ndefault = [\"unasked\"]\nunasked = []\nnamed = []\nby-own = []\n",
    );
    let program =
        Package { name: kernels.name.clone(), folder: kernels.folder.join("its-program") };
    program.write("src/lib.rs", "");
    let build = |dependency: &str, own: &str| -> Result<String, libtest_mimic::Failed> {
        let manifest = format!(
            "[package]\nname = \"program\"\nversion = \"0.0.0\"\nedition = \"2024\"\n\n\
             [features]\nown-one = [\"math/by-own\"]\n\n[dependencies]\nmath = {{ package = {:?}, \
             path = \"..\"{dependency} }}\n\n[workspace]\n",
            kernels.name
        );
        program.write("Cargo.toml", &manifest);
        let output = program.as_build_script(|command| {
            command.env(own, "1");
        });
        ensure(output.status.success(), stderr(&output))?;
        let ptx = program.folder.join("out-dir/kernels/with_features.ptx");
        Ok(std::fs::read_to_string(ptx)?)
    };
    let asked = ", default-features = false, features = [\"named\"]";
    for (dependency, own, stored) in [
        ("", "CARGO_FEATURE_OTHER", 1001),
        (asked, "CARGO_FEATURE_OTHER", 1010),
        (asked, "CARGO_FEATURE_OWN_ONE", 1110),
    ] {
        let ptx = build(dependency, own)?;
        ensure(ptx.contains(&format!(", {stored};")), format!("no {stored} in: {ptx}"))?;
    }
    Ok(())
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
