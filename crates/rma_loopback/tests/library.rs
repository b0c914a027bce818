//! The shared library, loaded as NCCL does.

use std::path::PathBuf;
use std::ptr::null_mut;

use devcomm_rma_loopback::abi::{RmaV14, RmaV15, RmaV16, SUCCESS, SYSTEM_ERROR};

fn library() -> libloading::Library {
    let folder: PathBuf = std::env::current_exe().unwrap().parent().unwrap().to_owned();
    let path = folder.join("libdevcomm_rma_loopback.so");
    // SAFETY: it is this crate's own library, which runs no code when it is loaded.
    unsafe { libloading::Library::new(path) }.unwrap()
}

#[test]
fn the_library_has_a_table_for_each_version() {
    let library = library();
    // SAFETY: the symbols are tables of this crate, from the same build.
    unsafe {
        let v16 = **library.get::<*const RmaV16>(b"ncclRmaPlugin_v16").unwrap();
        let v15 = **library.get::<*const RmaV15>(b"ncclRmaPlugin_v15").unwrap();
        let v14 = **library.get::<*const RmaV14>(b"ncclRmaPlugin_v14").unwrap();
        for name in [v16.name, v15.name, v14.name] {
            assert_eq!(std::ffi::CStr::from_ptr(name), c"devcomm loopback");
        }
    }
}

#[test]
fn without_a_driver_init_fails_so_that_nccl_goes_on() {
    // SAFETY: loading the driver's library runs only its initialisers.
    if unsafe { libloading::Library::new("libcuda.so.1") }.is_ok() {
        return;
    }
    let library = library();
    let mut context = null_mut();
    // SAFETY: the symbol is a table of this crate; the arguments follow the interface.
    let status = unsafe {
        let table: *const RmaV16 = *library.get::<*const RmaV16>(b"ncclRmaPlugin_v16").unwrap();
        ((*table).init)(&raw mut context, 1, None)
    };
    assert_ne!(status, SUCCESS);
    assert_eq!(status, SYSTEM_ERROR);
}
