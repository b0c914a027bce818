//! What is given to others has the licences of the crates in it.

use std::fs;
use std::io::Write;

use xtask::licences::notices;
use xtask::project::root;

/// `DEVCOMM_BLESS=1` makes it write them.
#[test]
fn the_wheel_has_the_licences_of_its_crates() {
    let name = "the_wheel_has_the_licences_of_its_crates";
    let file = root().join("python/THIRD_PARTY_CRATES");
    let found = match notices(&root().join("python/Cargo.toml"), &["devcomm-python"], &[]) {
        Ok(found) => found,
        Err(error) => {
            // Without network, if the wheel's crates are not there. Directly to standard output,
            // bypassing the test harness's capture.
            let _ = writeln!(std::io::stdout(), "SKIPPED {name}: {error:#}");
            return;
        }
    };
    if std::env::var_os("DEVCOMM_BLESS").is_some() {
        fs::write(&file, &found).unwrap();
    }
    let there = fs::read_to_string(&file).unwrap_or_default();
    assert!(there == found, "DEVCOMM_BLESS=1 writes {}", file.display());
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
    // A macro, a crate of tests, and devcomm's own.
    for name in ["syn", "libtest-mimic", "devcomm-host"] {
        assert!(!has(&linked, name), "{name}: {linked}");
    }
    // The guide's tests have their own harness.
    assert!(has(&list(&["devcomm-guide"]), "libtest-mimic"));
}

#[test]
fn a_package_that_is_not_there_is_named() {
    let error = notices(&root().join("Cargo.toml"), &["no-such"], &[]).unwrap_err();
    assert_eq!(error.to_string(), "there is no package no-such");
}
