//! Against the real library where there is one, and against small impostors.

use std::path::{Path, PathBuf};
use std::process::Command;

use super::*;
use crate::sys::nccl::functions::SYMBOLS;

/// Says on standard error why a test has nothing to look at.
fn skipped(why: &dyn std::fmt::Display) {
    eprintln!("SKIPPED: {why}");
}

fn real() -> Option<Library> {
    Library::open(None).inspect_err(|error| skipped(error)).ok()
}

/// Builds a shared library from C into `<folder>/lib/libnccl.so.2`.
fn impostor(folder: &Path, source: &str) -> Option<PathBuf> {
    let lib = folder.join("lib");
    std::fs::create_dir_all(&lib).unwrap();
    let (file, library) = (folder.join("nccl.c"), lib.join("libnccl.so.2"));
    std::fs::write(&file, source).unwrap();
    let mut compiler = Command::new("cc");
    compiler.args(["-shared", "-fPIC", "-o"]).arg(&library).arg(&file);
    match compiler.status() {
        Err(error) => {
            skipped(&format!("no C compiler: {error}"));
            None
        }
        Ok(status) => {
            assert!(status.success(), "cc: {status}");
            Some(library)
        }
    }
}

fn of_version(code: u32) -> String {
    format!("int ncclGetVersion(int *v) {{ *v = {code}; return 0; }}")
}

#[test]
fn every_function_is_in_the_real_library_and_no_gpu_is_needed_to_open_it() {
    let Some(library) = real() else { return };
    assert!(library.version() >= DEV_COMM_VERSION, "{library:?}");
    for symbol in SYMBOLS {
        // SAFETY: the address is not called.
        let address = unsafe { library.nccl().symbol::<unsafe extern "C" fn()>(symbol) };
        assert!(address.is_some(), "{symbol}");
    }
}

#[test]
fn a_path_is_loaded_once() {
    let Some(library) = real() else { return };
    let again = Library::load(library.path(), DEV_COMM_VERSION).unwrap();
    assert!(Arc::ptr_eq(&library.nccl, &again.nccl));
}

#[test]
fn an_nccl_that_is_too_old_names_both_versions() {
    let folder = tempfile::tempdir().unwrap();
    let Some(path) = impostor(folder.path(), &of_version(22809)) else { return };
    let error = Library::load(&path, DEV_COMM_VERSION).unwrap_err();
    assert!(matches!(error, Error::NcclTooOld { .. }));
    let text = error.to_string();
    assert!(text.contains("2.28.9") && text.contains("2.32.3"), "{text}");
    assert!(text.contains(path.to_str().unwrap()), "{text}");
}

#[test]
fn the_search_skips_an_nccl_that_is_too_old_with_its_reason() {
    let folder = tempfile::tempdir().unwrap();
    if impostor(folder.path(), &of_version(22809)).is_none() {
        return;
    }
    match Library::open(Some(folder.path())) {
        Ok(other) => assert!(!other.path().starts_with(folder.path()), "{other:?}"),
        Err(error) => {
            let text = error.to_string();
            assert!(text.contains(folder.path().to_str().unwrap()), "{text}");
            assert!(text.contains("it is NCCL 2.28.9, needed is 2.32.3 or newer"), "{text}");
        }
    }
}

#[test]
fn nothing_of_a_later_version_is_called_in_an_old_library() {
    let folder = tempfile::tempdir().unwrap();
    // Its ncclDevCommCreate takes another struct: to call it would end the test.
    let source = of_version(22809) + "\nint ncclDevCommCreate(void) { __builtin_trap(); }";
    let Some(path) = impostor(folder.path(), &source) else { return };
    let library = Library::load(&path, OLDEST_VERSION).unwrap();
    let nccl = library.nccl();
    // SAFETY: the version is checked before anything is called.
    let refused = unsafe {
        nccl.dev_comm_create(std::ptr::null_mut(), std::ptr::null(), std::ptr::null_mut())
    };
    match refused {
        Err(Error::Unsupported { what: "ncclDevCommCreate", needs, has }) => {
            assert_eq!((needs.code(), has.code()), (23203, 22809));
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_function_that_is_missing_is_unsupported_when_it_is_used() {
    let folder = tempfile::tempdir().unwrap();
    let Some(path) = impostor(folder.path(), &of_version(23203)) else { return };
    let library = Library::load(&path, DEV_COMM_VERSION).unwrap();
    let error = library.unique_id().err().unwrap();
    assert!(matches!(error, Error::Unsupported { what: "ncclGetUniqueId", .. }), "{error}");
}

#[test]
fn a_failed_call_carries_everything_nccl_says() {
    let folder = tempfile::tempdir().unwrap();
    let source = of_version(23203)
        + r#"
        const char *ncclGetErrorString(int code) { return code == 2 ? "unhandled system error" : "?"; }
        const char *ncclGetLastError(void *comm) { return "socket: no interface eth7"; }
        int ncclGetUniqueId(void *id) { return 2; }"#;
    let Some(path) = impostor(folder.path(), &source) else { return };
    let error = Library::load(&path, DEV_COMM_VERSION).unwrap().unique_id().err().unwrap();
    let text = error.to_string();
    for part in ["ncclGetUniqueId", "unhandled system error", "code 2", "eth7", "NCCL_DEBUG=INFO"] {
        assert!(text.contains(part), "{part}: {text}");
    }
}

#[test]
fn what_is_no_nccl_is_an_error() {
    let folder = tempfile::tempdir().unwrap();
    let text = folder.path().join("libnccl.so.2");
    std::fs::write(&text, "not a library").unwrap();
    let missing = folder.path().join("nothing.so");
    for path in [&text, &missing] {
        let error = Library::load(path, OLDEST_VERSION).unwrap_err();
        assert!(matches!(error, Error::NcclUnusable { .. }), "{error}");
    }
    let Some(path) = impostor(folder.path(), "int other(void) { return 0; }") else { return };
    let error = Library::load(&path, OLDEST_VERSION).unwrap_err().to_string();
    assert!(error.contains("it has no ncclGetVersion"), "{error}");
    let Some(path) = impostor(&folder.path().join("broken"), &of_version(0)) else { return };
    assert!(Library::load(&path, OLDEST_VERSION).is_err());
}

#[test]
fn a_unique_id_travels_as_128_bytes() {
    let id = UniqueId::from_bytes(&[7; 128]).unwrap();
    assert_eq!(id.as_bytes(), &[7; 128]);
    assert!(UniqueId::from_bytes(&[7; 127]).is_none());
}

#[test]
fn the_real_library_makes_an_id_and_refuses_a_rank_without_a_gpu_in_words() {
    let Some(library) = real() else { return };
    let id = match library.unique_id() {
        Ok(id) => id,
        // A machine without a network interface that NCCL likes.
        Err(error) => return skipped(&error),
    };
    assert_ne!(id.as_bytes(), &[0; 128]);
    if crate::visible_gpus().is_ok() {
        return skipped(&"this machine has a GPU");
    }
    match library.nccl().init_rank(&id.0, 0, 1).err() {
        Some(Error::Nccl { operation: "ncclCommInitRank", rank: Some(0), text, .. }) => {
            assert!(!text.is_empty());
        }
        other => panic!("{other:?}"),
    }
}
