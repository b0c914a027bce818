use super::*;

use std::ffi::OsString;

/// Returns a fake system whose program is at `program` under a temporary folder.
fn machine(root: &Path, program: &str, named: Option<&str>) -> Env {
    let named: Option<OsString> = named.map(|path| root.join(path).into());
    Env {
        var: Box::new(move |name| named.clone().filter(|_| name == VARIABLE)),
        program: Some(root.join(program)),
        ..Env::empty()
    }
}

fn file(root: &Path, path: &str) -> PathBuf {
    let path = root.join(path);
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    fs::write(&path, "").unwrap();
    fs::canonicalize(path).unwrap()
}

#[test]
fn cargos_folders_are_searched_from_programs_examples_and_tests() {
    for (program, plugin) in [
        ("release/app", "release/deps/libdevcomm_rma_loopback.so"),
        ("release/app", "release/libdevcomm_rma_loopback.so"),
        ("release/examples/app", "release/deps/libdevcomm_rma_loopback-0123abcd.so"),
        ("release/deps/app-99", "release/deps/libdevcomm_rma_loopback.so"),
        ("bin/app", "lib/libdevcomm_rma_loopback.so"),
    ] {
        let root = tempfile::tempdir().unwrap();
        file(root.path(), program);
        let plugin = file(root.path(), plugin);
        let env = machine(root.path(), program, None);
        assert_eq!(find_gin_loopback_in(&env, None), Ok(plugin), "from {program}");
    }
}

#[test]
fn the_newest_of_several_is_taken() {
    let root = tempfile::tempdir().unwrap();
    file(root.path(), "debug/app");
    let old = file(root.path(), "debug/libdevcomm_rma_loopback.so");
    let new = file(root.path(), "debug/deps/libdevcomm_rma_loopback.so");
    let long_ago = std::time::SystemTime::UNIX_EPOCH;
    fs::File::options().append(true).open(old).unwrap().set_modified(long_ago).unwrap();
    assert_eq!(find_gin_loopback_in(&machine(root.path(), "debug/app", None), None), Ok(new));
}

#[test]
fn a_named_file_goes_first_and_its_absence_ends_the_search() {
    let root = tempfile::tempdir().unwrap();
    file(root.path(), "app");
    file(root.path(), "libdevcomm_rma_loopback.so");
    let other = file(root.path(), "elsewhere/plugin.so");
    let env = machine(root.path(), "app", Some("elsewhere/plugin.so"));
    assert_eq!(find_gin_loopback_in(&env, None), Ok(other));
    let explicit = file(root.path(), "explicit.so");
    assert_eq!(find_gin_loopback_in(&env, Some(&explicit)), Ok(explicit));

    let env = machine(root.path(), "app", Some("gone.so"));
    let error = find_gin_loopback_in(&env, None).unwrap_err();
    assert_eq!(error.tried().len(), 1);
    assert!(error.to_string().contains("gone.so (DEVCOMM_GIN_LOOPBACK): there is no such file"));
}

#[test]
fn not_found_lists_the_places_and_how_to_build_it() {
    let root = tempfile::tempdir().unwrap();
    file(root.path(), "app");
    file(root.path(), "libdevcomm_rma_loopback.txt");
    file(root.path(), "libdevcomm_rma_loopbacks.so");
    let text =
        find_gin_loopback_in(&machine(root.path(), "app", None), None).unwrap_err().to_string();
    assert!(text.contains("cargo build -p devcomm-rma-loopback"), "{text}");
    assert!(text.contains("holds no libdevcomm_rma_loopback.so"), "{text}");
}
