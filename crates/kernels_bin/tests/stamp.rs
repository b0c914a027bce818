//! Compiled kernels that are missing, damaged, or of another version or other sources are refused.

use std::fs;
use std::path::PathBuf;

use tempfile::TempDir;

#[path = "../stamp.rs"]
mod stamp;

/// A checkout with sources of kernels, and the package with what was compiled from them.
struct Checkout(TempDir);

impl Checkout {
    fn new() -> Self {
        let this = Self(tempfile::tempdir().unwrap());
        this.write("kernels/src/sum/two.rs", "fn two() {}");
        for package in ["cuda_builder", "cuda_std", "cuda_std_macros", "nccl_device", "types"] {
            this.write(&format!("crates/{package}/src/lib.rs"), "//! A library.");
        }
        this.write("crates/kernels_bin/data/kernels.rs", "(&[], None)");
        this.write("crates/kernels_bin/data/sum.ptx.z", "ptx");
        stamp::write(&this.package()).unwrap();
        this
    }

    fn package(&self) -> PathBuf {
        self.0.path().join("crates/kernels_bin")
    }

    fn write(&self, name: &str, text: &str) {
        let path = self.0.path().join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }

    /// Returns the message of the check, which says what to do.
    fn problem(&self) -> String {
        let problem = stamp::check(&self.package()).unwrap_err();
        assert!(problem.contains("`cargo xtask kernels-bin` compiles them"), "{problem}");
        assert!(problem.contains("crates/kernels_bin/data"), "{problem}");
        assert!(!problem.contains('\n'), "cargo takes one line: {problem}");
        problem
    }
}

#[test]
fn kernels_of_this_version_and_these_sources_are_accepted() {
    let checkout = Checkout::new();
    assert_eq!(stamp::check(&checkout.package()), Ok(()));
    assert_eq!(stamp::sources(&checkout.package()).len(), 6);
    // PTX and cubins that are not compressed are not part of the package.
    checkout.write("crates/kernels_bin/data/sum.ptx", "of another build");
    assert_eq!(stamp::check(&checkout.package()), Ok(()));
    // A package from a registry has no sources beside it.
    fs::remove_dir_all(checkout.0.path().join("kernels")).unwrap();
    assert_eq!(stamp::check(&checkout.package()), Ok(()));
}

#[test]
fn a_vendored_package_is_not_compared_with_the_users_own_kernels() {
    let checkout = Checkout::new();
    checkout.write("kernels/src/sum/two.rs", "fn of_the_user() {}");
    // The names of vendored packages differ from those of the checkout's folders.
    for package in ["cuda_builder", "cuda_std", "cuda_std_macros", "nccl_device", "types"] {
        fs::remove_dir_all(checkout.0.path().join("crates").join(package)).unwrap();
    }
    assert!(stamp::sources(&checkout.package()).is_empty());
    assert_eq!(stamp::check(&checkout.package()), Ok(()));
}

#[test]
fn a_package_without_kernels_says_which_command_compiles_them() {
    let checkout = Checkout::new();
    fs::remove_dir_all(checkout.package().join("data")).unwrap();
    assert!(checkout.problem().contains("data are missing"));
}

#[test]
fn kernels_of_another_version_are_refused_with_both_versions() {
    let checkout = Checkout::new();
    let path = checkout.package().join("data/stamp");
    let text = fs::read_to_string(&path).unwrap();
    fs::write(&path, text.replacen(env!("CARGO_PKG_VERSION"), "0.0.7", 1)).unwrap();
    let expected =
        format!("are of devcomm 0.0.7, and this is devcomm {}", env!("CARGO_PKG_VERSION"));
    assert!(checkout.problem().contains(&expected));
}

#[test]
fn kernels_of_sources_that_have_changed_are_refused() {
    let checkout = Checkout::new();
    let is_refused = || assert!(checkout.problem().contains("are older than the sources"));
    checkout.write("kernels/src/sum/two.rs", "fn two() { 2; }");
    is_refused();
    checkout.write("kernels/src/sum/two.rs", "fn two() {}");
    assert_eq!(stamp::check(&checkout.package()), Ok(()));
    checkout.write("kernels/src/sum/three.rs", "");
    is_refused();
    fs::remove_file(checkout.0.path().join("kernels/src/sum/three.rs")).unwrap();
    checkout.write("crates/types/src/lib.rs", "");
    is_refused();
}

#[test]
fn files_that_are_damaged_or_gone_are_noticed() {
    let whole = ["kernels.rs", "sum.ptx.z"];
    for name in whole {
        for damage in ["", "pt", "PTX"] {
            let checkout = Checkout::new();
            checkout.write(&format!("crates/kernels_bin/data/{name}"), damage);
            assert!(checkout.problem().contains("are damaged"), "{name}: {damage:?}");
        }
        let checkout = Checkout::new();
        fs::remove_file(checkout.package().join("data").join(name)).unwrap();
        assert!(checkout.problem().contains("are damaged"), "{name} is removed");
    }
    let checkout = Checkout::new();
    for stamp in [env!("CARGO_PKG_VERSION"), concat!(env!("CARGO_PKG_VERSION"), " 12 ")] {
        checkout.write("crates/kernels_bin/data/stamp", stamp);
        assert!(checkout.problem().contains("are damaged"), "{stamp:?}");
    }
}
