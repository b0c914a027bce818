//! Tests of opening NCCL: the real library where there is one, and small fake libraries.

use std::path::{Path, PathBuf};
use std::process::Command;

use devcomm_sys::nccl::PROTOTYPES;

use super::*;
use crate::communicator::CommConfig;
use crate::sys::nccl::call::Out;
use crate::sys::nccl::calls;

/// Prints on standard error why a test is skipped.
fn skipped(why: &dyn std::fmt::Display) {
    eprintln!("SKIPPED: {why}");
}

fn real() -> Option<Library> {
    Library::open(None).inspect_err(|error| skipped(error)).ok()
}

/// Builds a shared library from C into `<folder>/lib/libnccl.so.2`.
fn fake_library(folder: &Path, source: &str) -> Option<PathBuf> {
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
    assert_eq!(library.nccl().functions().missing(), [""; 0]);
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
    let Some(path) = fake_library(folder.path(), &of_version(22809)) else { return };
    let error = Library::load(&path, DEV_COMM_VERSION).unwrap_err();
    assert!(matches!(error, Error::Nccl(NcclError::TooOld { .. })));
    let text = error.to_string();
    assert!(text.contains("2.28.9") && text.contains("2.32.3"), "{text}");
    assert!(text.contains(path.to_str().unwrap()), "{text}");
}

/// Returns a Python environment in `root` with this NCCL, as PyTorch's wheel installs it: the path
/// of the library, and the command that installs a newer one.
fn python_environment(root: &Path, code: u32) -> Option<(PathBuf, String)> {
    let site = root.join("lib/python3.12/site-packages");
    std::fs::create_dir_all(site.join("nvidia_nccl_cu13-2.28.9.dist-info")).unwrap();
    std::fs::create_dir_all(root.join("bin")).unwrap();
    let python = root.join("bin/python");
    std::fs::write(&python, "").unwrap();
    let path = fake_library(&site.join("nvidia/nccl"), &of_version(code))?;
    Some((path, format!("`{} -m pip install nvidia-nccl-cu13==2.32.3`", python.display())))
}

#[test]
fn an_nccl_of_a_python_environment_that_is_too_old_names_the_command_that_renews_it() {
    let folder = tempfile::tempdir().unwrap();
    let root = folder.path().canonicalize().unwrap();
    let Some((path, command)) = python_environment(&root.join("env"), 22809) else { return };
    let again = format!("; run {command} and start the program again");
    let error = Library::load(&path, DEV_COMM_VERSION).unwrap_err().to_string();
    assert!(error.ends_with(&again), "{error}");
    // A program that opens it for its host functions gets the same advice at the first missing one.
    let library = Library::load(&path, OLDEST_VERSION).unwrap();
    let error = library.set_encryption(None).unwrap_err().to_string();
    assert!(error.contains("the loaded one is 2.28.9") && error.ends_with(&again), "{error}");
    // The advised version is the one for kernels, also for a program that needs an older one.
    let Some((path, command)) = python_environment(&root.join("older"), 22702) else { return };
    let error = Library::load(&path, OLDEST_VERSION).unwrap_err().to_string();
    assert!(error.contains("2.28.0 or newer") && error.contains(&command), "{error}");
    // Elsewhere pip does not help.
    let Some(path) = fake_library(&root.join("elsewhere"), &of_version(22809)) else { return };
    let error = Library::load(&path, DEV_COMM_VERSION).unwrap_err().to_string();
    assert!(error.contains("`devcomm setup`") && !error.contains("pip"), "{error}");
}

#[test]
fn the_search_skips_an_nccl_that_is_too_old_with_its_reason() {
    let folder = tempfile::tempdir().unwrap();
    if fake_library(folder.path(), &of_version(22809)).is_none() {
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
    // A call of its ncclDevCommCreate would end the test's process.
    let source = of_version(22809) + "\nint ncclDevCommCreate(void) { __builtin_trap(); }";
    let Some(path) = fake_library(folder.path(), &source) else { return };
    let library = Library::load(&path, OLDEST_VERSION).unwrap();
    let nccl = library.nccl();
    // SAFETY: the version is checked before anything is called.
    let refused = unsafe {
        nccl.dev_comm_create(std::ptr::null_mut(), std::ptr::null(), std::ptr::null_mut())
    };
    match refused {
        Err(Error::Nccl(NcclError::Unsupported {
            what: "ncclDevCommCreate", needs, has, ..
        })) => {
            assert_eq!((needs.code(), has.code()), (23203, 22809));
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_function_that_is_missing_is_unsupported_when_it_is_used() {
    let folder = tempfile::tempdir().unwrap();
    let Some(path) = fake_library(folder.path(), &of_version(23203)) else { return };
    let library = Library::load(&path, DEV_COMM_VERSION).unwrap();
    let error = library.unique_id().err().unwrap();
    assert!(
        matches!(error, Error::Nccl(NcclError::Unsupported { what: "ncclGetUniqueId", .. })),
        "{error}"
    );
}

#[test]
fn a_failed_call_carries_everything_nccl_says() {
    let folder = tempfile::tempdir().unwrap();
    let source = of_version(23203)
        + r#"
        const char *ncclGetErrorString(int code) {
            return code == 2 ? "unhandled system error" : "?";
        }
        const char *ncclGetLastError(void *comm) { return "socket: no interface eth7"; }
        int ncclGetUniqueId(void *id) { return 2; }"#;
    let Some(path) = fake_library(folder.path(), &source) else { return };
    let error = Library::load(&path, DEV_COMM_VERSION).unwrap().unique_id().err().unwrap();
    let text = error.to_string();
    for word in ["ncclGetUniqueId", "unhandled system error", "code 2", "eth7", "NCCL_DEBUG=INFO"] {
        assert!(text.contains(word), "{word}: {text}");
    }
}

#[test]
fn a_file_that_is_not_nccl_is_an_error() {
    let folder = tempfile::tempdir().unwrap();
    let text = folder.path().join("libnccl.so.2");
    std::fs::write(&text, "not a library").unwrap();
    let missing = folder.path().join("nothing.so");
    for path in [&text, &missing] {
        let error = Library::load(path, OLDEST_VERSION).unwrap_err();
        assert!(matches!(error, Error::Nccl(NcclError::Unusable { .. })), "{error}");
    }
    let Some(path) = fake_library(folder.path(), "int other(void) { return 0; }") else { return };
    let error = Library::load(&path, OLDEST_VERSION).unwrap_err().to_string();
    assert!(error.contains("it has no ncclGetVersion"), "{error}");
    let Some(path) = fake_library(&folder.path().join("broken"), &of_version(0)) else { return };
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
        // A machine without a network interface that NCCL can use.
        Err(error) => return skipped(&error),
    };
    assert_ne!(id.as_bytes(), &[0; 128]);
    if crate::visible_gpus().is_ok() {
        return skipped(&"this machine has a GPU");
    }
    let out = Out::new(std::ptr::null_mut());
    let config = CommConfig::new().lower(library.loaded()).unwrap();
    let call = calls::init_rank(out.clone(), vec![id.0], 0, 1, config);
    // SAFETY: the call owns what it writes to.
    let code = unsafe { call.make(library.nccl()) }.unwrap();
    match library.nccl().check("ncclCommInitRankScalable", code, Some(0)).err() {
        Some(Error::Nccl(NcclError::Failed { rank: Some(0), text, .. })) => {
            assert!(!text.is_empty())
        }
        other => panic!("{other:?}"),
    }
    assert!(out.communicator().is_none());
}

#[test]
fn the_version_in_full_names_the_file_and_the_cuda_it_was_built_with() {
    let Some(library) = real() else { return };
    let versions = library.versions();
    assert_eq!((versions.path.as_path(), versions.version), (library.path(), library.version()));
    let build = versions.build.as_deref().unwrap();
    assert!(build.starts_with(&library.version().to_string()), "{build}");
    let cuda = versions.cuda().unwrap();
    assert!(cuda.split('.').all(|part| part.parse::<u32>().is_ok()), "{cuda}");
    assert_eq!(versions.to_string(), format!("NCCL {build}, {}", library.path().display()));
}

#[test]
fn a_library_without_a_banner_has_its_version_only() {
    let folder = tempfile::tempdir().unwrap();
    let Some(path) = fake_library(folder.path(), &of_version(23203)) else { return };
    let versions = Library::load(&path, DEV_COMM_VERSION).unwrap().versions();
    assert_eq!((&versions.build, versions.cuda()), (&None, None));
    assert!(versions.to_string().starts_with("NCCL 2.32.3, "), "{versions}");
}

#[test]
fn result_codes_have_nccls_texts_and_without_a_failure_there_is_no_last_error() {
    let Some(library) = real() else { return };
    assert_eq!(library.error_string(0), "no error");
    assert!(library.error_string(5).starts_with("invalid usage"));
    assert!(!library.error_string(-77).is_empty());
    let folder = tempfile::tempdir().unwrap();
    let source = of_version(23203) + "\nconst char *ncclGetLastError(void *comm) { return \"\"; }";
    let Some(path) = fake_library(folder.path(), &source) else { return };
    let library = Library::load(&path, DEV_COMM_VERSION).unwrap();
    assert_eq!(library.last_error(), None);
    assert_eq!(library.error_string(3), "no text");
}

#[test]
fn an_encryption_key_is_checked_and_handed_over_whole() {
    let folder = tempfile::tempdir().unwrap();
    let source = of_version(23203)
        + r#"
        #include <string.h>
        struct config { unsigned long size; unsigned magic, version; int mode; const char *psk; };
        int ncclSetEncryption(const struct config *c) {
            if (c->size != 32 || c->magic != 0xcafebeef || c->version != 23203) return 5;
            if (c->mode == 0) return c->psk ? 4 : 0;
            return c->mode == 1 && !strcmp(c->psk, "0123456789abcdef0123456789abcdef") ? 0 : 4;
        }"#;
    let Some(path) = fake_library(folder.path(), &source) else { return };
    let library = Library::load(&path, DEV_COMM_VERSION).unwrap();
    let key = "0123456789abcdef".repeat(2);
    library.set_encryption(Some(&key)).unwrap();
    library.set_encryption(None).unwrap();
    let short = library.set_encryption(Some(&key[..31])).unwrap_err().to_string();
    assert!(short.contains("has 31 bytes") && short.contains("at least 32"), "{short}");
    let nul = library.set_encryption(Some(&(key + "\0"))).unwrap_err();
    assert!(matches!(nul, Error::InvalidInput { .. }), "{nul}");
    assert!(!short.contains("0123"), "the error shows the key: {short}");
}

#[test]
fn ids_are_equal_by_their_bytes_and_do_not_show_them() {
    let id = |byte| UniqueId::from_bytes(&[byte; 128]).unwrap();
    assert_eq!(id(7), id(7));
    assert_ne!(id(7), id(8));
    assert_eq!(format!("{:?}", id(7)), "UniqueId(..)");
}

/// Returns a library of version `code` in which every other function ends the process.
fn trapping_library(folder: &Path, code: u32) -> Option<Library> {
    let functions = PROTOTYPES.iter().map(|(symbol, ..)| symbol);
    let functions = functions.filter(|symbol| **symbol != "ncclGetVersion");
    let functions = functions.map(|symbol| format!("\nint {symbol}(void) {{ __builtin_trap(); }}"));
    let source = of_version(code) + &functions.collect::<String>();
    Some(Library::load(&fake_library(folder, &source)?, NcclVersion::from_code(0)).unwrap())
}

/// Checks that the library was too old for a call. Making the call would have ended the process.
fn refused<T>(result: Result<T>, library: &Library, what: &str, needs: u32) {
    match result.err() {
        Some(Error::Nccl(NcclError::Unsupported { what: refused, needs: least, has, .. })) => {
            assert_eq!((refused, least.code(), has), (what, needs, library.version()));
        }
        other => panic!("{what}: {other:?}"),
    }
}

#[test]
fn calls_that_need_a_newer_library_are_refused_before_they_are_made() {
    use std::ptr::{null, null_mut};
    let folder = tempfile::tempdir().unwrap();
    let at = |code: u32| trapping_library(&folder.path().join(code.to_string()), code);
    let Some(library) = at(22702) else { return };
    let (nccl, stream) = (library.nccl(), null_mut());
    // SAFETY: nothing is called, in this library and in those below: the version is checked first.
    let all_to_all = unsafe { nccl.all_to_all(null(), null_mut(), 0, 7, null_mut(), stream) };
    refused(all_to_all, &library, "ncclAlltoAll", 22803);

    let Some(library) = at(22809) else { return };
    let nccl = library.nccl();
    // SAFETY: the call is refused before it uses its arguments.
    let properties = unsafe { nccl.comm_query_properties(null_mut(), null_mut()) };
    refused(properties, &library, "ncclCommQueryProperties", 22902);
    // SAFETY: the call is refused before it uses its arguments.
    let signal = unsafe { nccl.signal(0, 0, 0, 0, null_mut(), stream) };
    refused(signal, &library, "ncclSignal", 22902);
    refused(library.params().keys(), &library, "ncclParamGetAllParameterKeys", 23004);
    refused(library.params().get("NCCL_DEBUG"), &library, "ncclParamGetParameter", 23004);
    refused(library.dump_params(), &library, "ncclParamDumpAll", 23004);

    let Some(library) = at(23202) else { return };
    let nccl = library.nccl();
    refused(
        // SAFETY: the call is refused before it uses its arguments.
        unsafe { nccl.dev_comm_create(null_mut(), null(), null_mut()) },
        &library,
        "ncclDevCommCreate",
        23203,
    );
    // SAFETY: the call is refused before it uses its arguments.
    let with_config =
        unsafe { nccl.all_reduce_config(null(), null_mut(), 0, 7, 0, null_mut(), stream, null()) };
    refused(with_config, &library, "ncclAllReduceConfig", 23203);
    refused(library.set_encryption(None), &library, "ncclSetEncryption (as of 2.32.3)", 23203);
}

#[test]
fn functions_that_the_version_promises_and_the_file_lacks_are_unsupported() {
    let folder = tempfile::tempdir().unwrap();
    let Some(path) = fake_library(folder.path(), &of_version(23203)) else { return };
    let library = Library::load(&path, DEV_COMM_VERSION).unwrap();
    refused(library.params().keys(), &library, "ncclParamGetAllParameterKeys", 23004);
    refused(library.set_encryption(None), &library, "ncclSetEncryption", 23100);
    refused(library.dump_params(), &library, "ncclParamDumpAll", 23004);
    assert_eq!((library.last_error(), library.error_string(1)), (None, "no text".to_owned()));
}

#[test]
#[cfg(feature = "simulator")]
fn the_simulated_library_has_every_function() {
    let machine = Machine::simulate(&crate::Simulation::new(1), None).unwrap();
    let library = Library::open_on(&machine, None, DEV_COMM_VERSION).unwrap();
    assert_eq!(library.nccl().functions().missing(), [""; 0]);
}
