//! Tests of the licence texts of other projects' crates that go with what we distribute: the wheel
//! for Python, and the packs (folders of programs that run on machines without Rust).

use std::fs;
use std::io::Write;

use xtask::licences::notices;
use xtask::project::root;

/// Compares the file in the wheel with the licences of its crates; `DEVCOMM_BLESS=1` writes the
/// file.
#[test]
fn the_wheel_has_the_licences_of_its_crates() {
    let name = "the_wheel_has_the_licences_of_its_crates";
    let file = root().join("python/THIRD_PARTY_CRATES");
    let found = match notices(&root().join("python/Cargo.toml"), &["devcomm-python"], &[]) {
        Ok(found) => found,
        Err(error) => {
            // Cargo could not get the wheel's crates: there is no network. This is written to
            // standard output, as the test harness would capture `println!`.
            let _ = writeln!(std::io::stdout(), "SKIPPED {name}: {error:#}");
            return;
        }
    };
    if std::env::var_os("DEVCOMM_BLESS").is_some() {
        fs::write(&file, &found).unwrap();
    }
    let in_file = fs::read_to_string(&file).unwrap_or_default();
    assert!(in_file == found, "DEVCOMM_BLESS=1 writes {}", file.display());
    assert!(found.contains("* pyo3 ") && found.contains("Permission is hereby granted"));
}

#[test]
fn a_packs_licences_are_of_linked_crates_from_registries_only() {
    let packages = ["devcomm-examples", "devcomm-bench"];
    let list = |tested: &[&str]| {
        let found = notices(&root().join("Cargo.toml"), &packages, tested).unwrap();
        found.split("\n---").next().unwrap().to_owned()
    };
    let has = |list: &str, name: &str| list.contains(&format!("\n* {name} "));
    let linked = list(&[]);
    for name in ["anyhow", "clap", "serde_json"] {
        assert!(has(&linked, name), "{name}: {linked}");
    }
    // None of these is listed: a crate of macros, one of tests only, and one of this project.
    for name in ["syn", "libtest-mimic", "devcomm-host"] {
        assert!(!has(&linked, name), "{name}: {linked}");
    }
    // A pack with the guide's tests contains their harness, which is linked then.
    assert!(has(&list(&["devcomm-guide"]), "libtest-mimic"));
}

#[test]
fn a_package_that_is_not_there_is_named() {
    let error = notices(&root().join("Cargo.toml"), &["no-such"], &[]).unwrap_err();
    assert_eq!(error.to_string(), "there is no package no-such");
}
